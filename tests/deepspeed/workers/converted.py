"""A lossy tag of a ZeRO stage, and what the engine that loaded it computes with. argv = a directory, a stage."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from common import LOSSY, begin, end, engine_of, settings, train


def main() -> None:
    directory, stage = begin(), int(sys.argv[2])
    engine = engine_of(settings(stage), LOSSY)
    for number in range(2):
        train(engine, 3 * number, 3 * number + 3)
        engine.save_checkpoint(str(directory / "run"))
    again = engine_of(settings(stage), LOSSY, seed=1)
    again.load_checkpoint(str(directory / "run"))
    state = {}
    for name, parameter in again.module.named_parameters():
        full = deepspeed.utils.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            state[name] = (parameter.detach().float() if full is None else full).clone()
    if dist.get_rank() == 0:
        torch.save(state, directory / "expected.pt")
    end()


if __name__ == "__main__":
    main()
