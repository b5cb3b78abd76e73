"""Searches through the engine, and averaged gradients of flat partitions. argv = a directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import begin, check, end, engine_of, error_of, everywhere, settings, train

import dsq_ckpt
from dsq_ckpt.deepspeed.flat_buffers import take_inventory
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.analysis import GlobalSketch
from dsq_ckpt.storage.manifest import Manifest

SEARCH = {"quantize": {"min_elements": 64}, "search": {"epsilon": 0.5, "max_progress_loss": 1.0, "floor": 0.1}}


def everything(engine: Any) -> list[torch.Tensor]:
    """All that a trial may have changed, copied."""
    inventory = take_inventory(engine)
    tensors = [buffer.tensor for buffer in inventory.buffers] + list(engine.module.parameters())
    tensors += [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
    return [tensor.detach().clone().view(torch.uint8) for tensor in tensors if tensor.numel()]  # NaN are equal then


def search(run: Path, name: str, tree: dict[str, Any]) -> None:
    calls: list[float] = []
    checks: list[float] = []

    def metric(told: list[float], first: int) -> float:
        with torch.no_grad():
            total = sum(engine(*held_out(number)).item() for number in range(first, first + 4))
        told.append(total)
        return total / 4

    engine = engine_of(tree, SEARCH, evaluate=partial(metric, calls, 0), check=partial(metric, checks, 4))
    train(engine, 0, 3)
    touch(engine)
    before = everything(engine)
    engine.save_checkpoint(str(run))
    after = everything(engine)
    same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    check(same, f"{name}: after the search the engine is what it was")
    quality = Manifest.read(run / "global_step3").quality
    check(quality is not None and quality["satisfied"], f"{name}: {quality['chosen'] if quality else None}")
    told = dsq_ckpt.deepspeed.quality(engine)
    same = {**told, "seconds": 0} == {**quality, "seconds": 0}
    check(same and (told["evaluations"], told["checks"]) == (len(calls), len(checks)), f"{name}: recorded")
    check(len(set(calls)) > 1, f"{name}: trials change what the engine computes")
    train(engine, 3, 5)
    calls.clear()
    engine.save_checkpoint(str(run))
    check(0 < len(calls) <= 8, f"{name}: {len(calls)} evaluations in the next search")


def touch(engine: Any) -> None:
    """A parameter that is no longer what its master gives, as after a clamp."""
    parameter = engine.module.norm.weight
    target = getattr(parameter, "ds_tensor", parameter)
    target.data.mul_(1.25)
    if target is not parameter and parameter.numel():  # small ones stay gathered
        parameter.data.mul_(1.25)


def held_out(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(99 + number)
    return torch.randint(97, (16,), generator=generator), torch.randint(97, (16,), generator=generator)


def gradients(run: Path, name: str, tree: dict[str, Any]) -> None:
    """The published system weighs elements by gradients, which the optimizer steps with."""
    engine = engine_of(tree, {"system": "inshrinkerator", "quantize": {"min_elements": 64}})
    seen: list[int] = []
    original = GlobalSketch.fit

    def fit(self: GlobalSketch, *arguments: Any, **options: Any) -> Any:
        seen.append(sum(chunk.gradient is not None for chunk in self.chunks))
        return original(self, *arguments, **options)

    GlobalSketch.fit = fit  # type: ignore[method-assign]
    train(engine, 0, 3)
    engine.save_checkpoint(str(run))
    GlobalSketch.fit = original  # type: ignore[method-assign]
    check(bool(seen) and min(seen) > 0, f"{name}: chunks with averaged gradients: {seen}")


def halve_a_norm(engine: Any) -> None:
    parameter = engine.module.norm.weight
    getattr(parameter, "ds_tensor", parameter).data.mul_(0.5)


def halve_a_moment(engine: Any) -> None:
    next(iter(engine.basic_optimizer.state.values()))["exp_avg"].mul_(0.5)


def changing(run: Path, name: str, tree: dict[str, Any]) -> None:
    """An `evaluate` that changes the engine: the save fails on all ranks, and parameters are what they were."""
    for change, named in ((halve_a_norm, "norm.weight"), (halve_a_moment, "exp_avg")):
        engine = engine_of(tree, SEARCH)
        dsq_ckpt.deepspeed.attach(engine, evaluate=partial(changing_metric, engine, change))
        train(engine, 0, 3)
        before = everything(engine)
        error = error_of(partial(engine.save_checkpoint, str(run)))
        told = everywhere(str(error))
        check(isinstance(error, SaveFailed), f"{name}: changed by `evaluate`, no rank saves")
        check(told[0].count("`evaluate`") > 0 and " changed " in told[0] and named in told[0], f"{name}: {told[0]}")
        check(not (run / "latest").exists(), f"{name}: nothing is there")
        after = everything(engine)
        same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        check(same or change is halve_a_moment, f"{name}: its parameters were put back")


def changing_metric(engine: Any, change: Callable[[Any], None]) -> float:
    """A loss; on one rank the engine is another one afterwards."""
    with torch.no_grad():
        loss = engine(*held_out(0)).item()
    if torch.distributed.get_rank() == 0:
        change(engine)
    return loss


def main() -> None:
    directory = begin()
    for name, tree in (("stage 0", settings(0)), ("stage 0, fp32", settings(0, bf16=False)), ("stage 2", settings(2)),
                       ("stage 3", settings(3, sub_group_size=9000))):
        for part in (search, gradients, changing):
            part(directory / f"{part.__name__} {name}", name, tree)
    end()


if __name__ == "__main__":
    main()
