"""Files whose tensors go by the same name on several ranks: experts and pipeline stages. argv = a directory.

Nothing of them is compressed, which the first save of an engine says once, on one rank.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from common import LOSSY, begin, check, end, settings
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from torch import nn

import dsq_ckpt.deepspeed
from dsq_ckpt.storage.manifest import Manifest


class Experts(nn.Module):
    """Two experts, one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.moe = MoE(64, nn.Linear(64, 64), num_experts=2, ep_size=2, k=1)
        self.last = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, _, _ = self.moe(self.first(x))
        return nn.functional.mse_loss(self.last(h).float(), y.float())


def batches(seed: int, count: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed + torch.distributed.get_rank())
    return [
        (torch.randn(4, 32, generator=generator).to(dtype), torch.randn(4, 8, generator=generator).to(dtype))
        for _ in range(count)
    ]


def expert_engine(stage: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = Experts()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    tree = {**settings(stage), "dsq_checkpoint": LOSSY}
    return dsq_ckpt.deepspeed.initialize(model=model, model_parameters=groups, config=tree)[0]


def steps(engine: Any, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    losses = []
    for x, y in data:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_twice(engine: Any, run: Path, kind: str) -> None:
    """Save, and check that one rank says once that nothing is compressed, and why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save_checkpoint(str(run))
        engine.save_checkpoint(str(run))
    messages = [
        str(warning.message) for warning in caught
        if "nothing of this engine's tags is compressed" in str(warning.message)
    ]
    first = torch.distributed.get_rank() == 0
    check(len(messages) == first and all(f"with {kind} parallelism" in text for text in messages), f"{kind}: told once")


def experts(run: Path) -> None:
    for stage in (0, 2):
        engine = expert_engine(stage, 0)
        data = batches(7, 6, torch.bfloat16)
        steps(engine, data[:3])
        torch.manual_seed(5)  # gates draw numbers
        save_twice(engine, run / str(stage), "expert")
        expected = steps(engine, data[3:])
        check(Manifest.read(run / str(stage) / "global_step3").groups == {}, f"experts, stage {stage}: stored exactly")
        again = expert_engine(stage, 1)
        again.load_checkpoint(str(run / str(stage)))
        torch.manual_seed(5)
        check(steps(again, data[3:]) == expected, f"experts, stage {stage}: the same losses to the last bit")


def pipeline_engine(seed: int) -> Any:
    torch.manual_seed(seed)
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    tree = {**settings(1, bf16=False), "dsq_checkpoint": LOSSY, "gradient_accumulation_steps": 2}
    return dsq_ckpt.deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=tree
    )[0]


def pipeline(run: Path) -> None:
    def some(engine: Any, seed: int, count: int) -> list[float]:
        data = iter([(x, y) for x, y in batches(seed - torch.distributed.get_rank(), 2 * count, torch.float32)])
        return [float(engine.train_batch(data_iter=data)) for _ in range(count)]

    engine = pipeline_engine(0)
    some(engine, 3, 3)
    save_twice(engine, run, "pipeline")
    expected = some(engine, 50, 3)
    again = pipeline_engine(1)
    again.load_checkpoint(str(run))
    check(some(again, 50, 3) == expected, f"pipeline: the same losses to the last bit: {json.dumps(expected)}")


def without_optimizer(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    tree = {"train_micro_batch_size_per_gpu": 1, "dsq_checkpoint": LOSSY}
    engine = dsq_ckpt.deepspeed.initialize(model=model, config=tree)[0]
    engine.save_checkpoint(str(run))
    weight = torch.load(run / "global_step0" / "mp_rank_00_model_states.pt", weights_only=False)["module"]["weight"]
    check(torch.equal(weight, model.weight), "without an optimizer: saved")


def main() -> None:
    directory = begin()
    without_optimizer(directory / "alone")  # first: parallel engines leave settings in the process
    experts(directory / "experts")
    pipeline(directory / "pipeline")
    end()


if __name__ == "__main__":
    deepspeed.logger.setLevel("WARNING")
    main()
