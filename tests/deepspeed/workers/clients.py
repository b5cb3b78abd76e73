"""Optimizers that DeepSpeed is given: moments that consist of other tensors, and Adagrad. argv = a directory.

DeepSpeed replaces torch's Adagrad by another one in the stages 1 to 3, and its `basic_optimizer` makes no step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from common import EXACT, Model, begin, check, end, everywhere, settings, train
from torch.utils._pytree import tree_map_only

import dsq_ckpt.deepspeed
from dsq_ckpt.deepspeed.flat_buffers import get_base_optimizer, take_inventory
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers import forks

SENSITIVITY = {"system": "inshrinkerator"}


class Rounded(torch.Tensor):
    """Numbers that say they are float32, and are kept in another tensor, in bf16."""

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=torch.float32, device=kept.device)

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["kept"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Rounded:
        return cls(inner["kept"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            return cls(args[0].kept.clone())
        return function(*tree_map_only(cls, lambda tensor: tensor.kept.float(), args), **(kwargs or {}))


class Momentum(torch.optim.SGD):
    """Momentum that is rounded between steps, and a list of matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["rounded"] = Rounded(torch.zeros_like(parameter, dtype=torch.bfloat16))
                        state["matrices"] = [torch.ones(64, 64), torch.ones(64, 65)]
                    momentum = state["rounded"].kept
                    momentum.copy_(0.9 * momentum + parameter.grad)
                    parameter -= group["lr"] * momentum


def make(stage: int, kind: Callable[..., Any], block: dict[str, Any] | None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    tree = {**settings(stage, bf16=stage > 0), "zero_allow_untested_optimizer": True}
    del tree["optimizer"]
    model = Model().bfloat16() if stage else Model()
    optimizer = kind([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    if block is None:
        return deepspeed.initialize(model=model, optimizer=optimizer, config=tree)[0]
    whole = {**tree, "dsq_checkpoint": block}
    return dsq_ckpt.deepspeed.initialize(model=model, optimizer=optimizer, config=whole)[0]


def resumed(run: Path, name: str, engine_of: Callable[..., Any], plain: bool = True) -> tuple[list[str], set[str]]:
    """Check that a resumed run is the run itself; the warnings of state that is whole, and names of what is not."""
    engine = engine_of(EXACT)
    train(engine, 0, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save_checkpoint(str(run))
    expected = train(engine, 3, 6)
    for block in (EXACT, None)[: 1 + plain]:
        again = engine_of(block, seed=1)
        again.load_checkpoint(str(run))
        how = "resumed" if block else "resumed with nothing attached"
        check(train(again, 3, 6) == expected, f"{name}: {how}, the same losses to the last bit")
    with Checkpoint(run / "global_step3") as checkpoint:
        names = set(checkpoint.index["tensors"])
    return [str(warning.message) for warning in caught if "stored whole" in str(warning.message)], names


def rounded(run: Path) -> None:
    for stage in range(4):
        name = f"stage {stage}, moments that consist of others"
        # In stage 0 DeepSpeed itself loads no such files: it gives torch a function for the device.
        said, names = resumed(run / str(stage), name, partial(make, stage, Momentum), plain=stage > 0)
        engine = make(stage, Momentum, None)
        train(engine, 0, 1)
        counts = [state["rounded"].numel() for state in get_base_optimizer(engine).state.values()]
        each = everywhere(sum(2 * count for count in counts if count >= 4096) + len(counts) * 4 * 64 * (64 + 65))
        size = f"{sum(each if stage else each[:1]) / 2**20:.3g} MiB of the optimizer's 'matrices', 'rounded' is stored"
        first = dist.get_rank() == 0
        check(len(said) == first and all(text.startswith(size) for text in said), f"{name}: {size}: {said}")
        check("optimizer.state.emb.weight.rounded" not in names, f"{name}: in DeepSpeed's files")


def adagrad(run: Path) -> None:
    for stage in range(4):
        name = f"stage {stage}, Adagrad"

        def engine_of(block: dict[str, Any] | None, seed: int = 0, stage: int = stage) -> Any:
            engine = make(stage, torch.optim.Adagrad, block, seed)
            if stage == 3 and seed:
                train(engine, 0, 1)  # DeepSpeed itself loads no Adagrad into an engine that has made no step
            return engine

        said, names = resumed(run / str(stage), name, engine_of)
        check(said == [] and "optimizer.state.emb.weight.sum" in names, f"{name}: nothing is whole: {said}")
        engine = engine_of(SENSITIVITY)
        train(engine, 0, 2)
        averages = engine.checkpoint_engine._gradients.split_by_chunk(take_inventory(engine).buffers)
        check(len(averages) > 0, f"{name}: gradients tell what the loss is sensitive to")
        engine = engine_of(None)
        train(engine, 0, 1)
        with dsq_ckpt.deepspeed.gradient_log(engine, run / f"log-{stage}", batch=1, snapshot_every=1000) as log:
            for number in range(1, 5):
                train(engine, number, number + 1)
                log.step()
        expected = train(engine, 5, 8)
        again = engine_of(None, seed=1)
        recovered = dsq_ckpt.deepspeed.recover(again, run / f"log-{stage}")
        check(recovered is not None and recovered.replayed == 4, f"{name}: steps are logged, and replayed")
        check(train(again, 5, 8) == expected, f"{name}: recovered, the same losses to the last bit")


def main() -> None:
    directory = begin()
    rounded(directory / "rounded")
    with mock.patch("subprocess.Popen", forks.popen):  # eight checkpointing processes, which import for three seconds
        adagrad(directory / "adagrad")
    end()


if __name__ == "__main__":
    deepspeed.logger.setLevel("ERROR")
    main()
