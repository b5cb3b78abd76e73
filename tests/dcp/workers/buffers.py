"""DDP, whose replicas of buffers differ by rank: argv = an empty directory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import done, world
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

import dsq_ckpt
from dsq_ckpt import DSQStorageWriter
from dsq_ckpt.storage.checkpoint import Checkpoint

BACKGROUND = [{"storage": {"stage": stage}} for stage in ("copy", "quantize")]


class Cached(dcp.DefaultSavePlanner):
    """Has plans of its own in DCP's cache."""


def trained(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose statistics are of the batches of this rank."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(160, 160), nn.BatchNorm1d(160), nn.ReLU()) for _ in range(5)]
    model = DistributedDataParallel(nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(16, 160, generator=generator) * (1 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saves(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[Any, Path], object]]:
    """All ways of saving a state with the model and the optimizer."""
    group = dist.new_group(backend="gloo")

    def score() -> float:
        return float(sum(parameter.square().mean() for parameter in model.parameters()))

    def compressing(**options: Any) -> Callable[[Any, Path], object]:
        def save(state: Any, path: Path) -> object:
            with dsq_ckpt.Compressor(model, optimizer, **options) as compressor:
                return compressor.save(path, extra=state["extra"])
        return save

    def cached(state: Any, path: Path) -> object:
        return dcp.save(state, storage_writer=DSQStorageWriter(path), planner=Cached(enable_plan_caching=True))

    def background(config: Any, **options: Any) -> Callable[[Any, Path], object]:
        return lambda state, path: dsq_ckpt.async_save(state, path, config=config, **options).result(timeout=240)

    return {
        "save": lambda state, path: dsq_ckpt.save(state, path, model=model),
        "copied": background(BACKGROUND[0]), "quantized": background(BACKGROUND[1]),
        "processes": background(BACKGROUND[0], processes=True),
        "compressor": compressing(), "searched": compressing(evaluate=score),
        "dcp": lambda state, path: dcp.save(state, storage_writer=DSQStorageWriter(path)),
        "dcp async": lambda state, path: dcp.async_save(
            state, storage_writer=DSQStorageWriter(path, process_group=group), process_group=group
        ).result(timeout=240),
        "cached 0": cached, "cached 1": cached, "cached 2": cached,
    }


def of_rank_0(name: str, save: Callable[[Any, Path], object], state: Any, path: Path, rank: int) -> None:
    """Buffers and numbers are those of rank 0; what only another rank has is its own."""
    save(state, path)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, (state["model"], state["extra"]))
    back: dict[str, Any] = {}
    dsq_ckpt.load(back, path)
    model, extra = held[0]
    buffers = [fqn for fqn in model if "running" in fqn]
    assert len(buffers) == 10 and not any(model[fqn].equal(held[1][0][fqn]) for fqn in buffers)
    foreign = [fqn for fqn in buffers if not back["model"][fqn].equal(model[fqn])]
    assert not foreign, (name, foreign)
    own = {key: value for entry in held for key, value in entry[1].items() if key.startswith("rng")}
    content = back["extra"] if "extra" in back else {key: back[key] for key in (*extra, *own)}
    assert content["best"] == extra["best"] and content["seen"] == extra["seen"], (name, content)
    assert all(content[key].equal(value) for key, value in own.items()), name
    with Checkpoint(path) as checkpoint:
        writers = {ref.file for key, ref in checkpoint.iter_chunks() if key.shape == (160, 160)}
    assert len(writers) == 2, "large replicas are shared out"


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with world() as (me, size):
        net, adam = trained(me)
        for number, (way, work) in enumerate(saves(net, adam).items()):
            weights, moments = get_state_dict(net, adam)
            more = {
                "best": {"loss": 0.5 + me, "step": number + me, "name": f"of {me}", "epoch": me}, "seen": [me, number],
                f"rng-{me}": torch.Generator().manual_seed(me).get_state(),
            }
            of_rank_0(way, work, {"model": weights, "optimizer": moments, "extra": more}, root / way, me)
            done(way)
