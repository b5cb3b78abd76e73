"""Tensors whose communication is under way when they are saved: argv = run directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import done, world
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dsq_ckpt


class Planner(DefaultSavePlanner):
    """One of a user's, whose save must see tensors."""


def state(mesh: Any, pending: bool) -> dict[str, Any]:
    """A replicated and a sharded tensor, and a plain one, which has two names."""
    generator = torch.Generator().manual_seed(0)
    whole, rows, plain = (torch.randn(128, 66, generator=generator) for _ in range(3))
    summed: torch.Tensor = all_reduce(plain / 2, "sum", mesh) if pending else plain
    if not pending:
        parts = [distribute_tensor(whole, mesh, [Replicate()]), distribute_tensor(rows, mesh, [Shard(0)])]
    else:
        parts = [
            distribute_tensor(whole, mesh, [Shard(0)]).redistribute(placements=[Replicate()], async_op=True),
            DTensor.from_local(rows / 2, mesh, [Partial()]).redistribute(placements=[Shard(0)], async_op=True),
        ]
        assert all(isinstance(part._local_tensor, AsyncCollectiveTensor) for part in parts)
        assert isinstance(summed, AsyncCollectiveTensor)
    return {"model": {"whole": parts[0], "rows": parts[1], "a": summed, "b": summed, "step": 3, "none": {}}}


def values(mesh: Any, path: Path) -> dict[str, Any]:
    """Load a checkpoint into a state of the same kinds; return local parts of tensors."""
    target = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
        for name, value in state(mesh, False)["model"].items()
    }
    dcp.load({"model": target}, storage_reader=dsq_ckpt.DSQStorageReader(path))
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in target.items()}


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.dsq"))


def main(run: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for pending in (False, True):
        base = run / str(pending)
        dsq_ckpt.save(state(mesh, pending), base / "sync", parent=None)
        for how in ("auto", "copy", "quantize"):
            given = state(mesh, pending)
            local = given["model"]["whole"]._local_tensor
            dsq_ckpt.async_save(given, base / how, config={"storage": {"stage": how}}, parent=None).result()
            assert given["model"]["whole"]._local_tensor is local  # the caller's is left alone
        for planner in (None, Planner()):
            writer = dsq_ckpt.DSQStorageWriter(base / type(planner).__name__, parent=None)
            dcp.async_save(state(mesh, pending), storage_writer=writer, planner=planner).result()
    for how in ("sync", "auto", "copy", "quantize", "NoneType", "Planner"):
        expected, loaded = (values(mesh, run / str(pending) / how) for pending in (False, True))
        assert expected.keys() == loaded.keys() and loaded["step"] == 3
        for name, value in expected.items():
            assert not isinstance(value, torch.Tensor) or (
                value.any() and torch.equal(value, loaded[name])
            ), (how, name)
        sizes = [size(run / str(pending) / how) for pending in (False, True)]
        assert abs(sizes[1] - sizes[0]) < 1000, (how, sizes)  # what has two names is stored once
        done(how)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world():
        main(Path(sys.argv[1]))
