"""A chain on an object store, saved and loaded by ranks: argv = URL of a run, `save` or `load`."""

from __future__ import annotations

import errno
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import broken, fault
from harness import depth, done, fails_everywhere, normal, whole, world, zeros
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.container import ContainerWriter
from dsq_ckpt.storage.paths import resolve_checkpoint_path

STEPS = 3


def truth(step: int) -> dict[str, torch.Tensor]:
    return {
        "rows.weight": normal(101, 256, seed=1) + 0.001 * step * normal(101, 256, seed=step),
        "columns.weight": normal(96, 256, seed=2) + 0.001 * step * normal(96, 256, seed=9 + step),
        "bias": normal(10, seed=step),
    }


def state_at(step: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    values = truth(step)
    return {
        "rows.weight": distribute_tensor(values["rows.weight"], mesh, [Shard(0)]),
        "columns.weight": distribute_tensor(values["columns.weight"], mesh, [Shard(1)]),
        "bias": values["bias"],
    }


def check(run: str, size: int) -> None:
    newest = dsq_ckpt.latest(run)
    assert newest == f"{run}/step-{STEPS - 1}"
    for step in range(STEPS):
        target = zeros(state_at(step, size))
        dcp.load(target, storage_reader=dsq_ckpt.DSQStorageReader(f"{run}/step-{step}"))
        for fqn, value in whole(target).items():
            expected = truth(step)[fqn]
            assert torch.equal(value, expected) if fqn == "bias" else (value - expected).abs().max() < 0.01, fqn


def fail(url: str, rank: int, size: int) -> None:
    """A save by DCP's own function that fails on one rank leaves no object of the others."""
    for culprit in range(size):
        path = f"{url}-failed/{culprit}"
        with broken(rank == culprit, ContainerWriter, "finish", fault(errno.EIO)):
            fails_everywhere(
                lambda: dcp.save(state_at(1, size), storage_writer=dsq_ckpt.DSQStorageWriter(path)), "Input/output",  # noqa: B023
            )
        assert not get_storage(resolve_checkpoint_path(path)).list_entries(resolve_checkpoint_path(path))
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    url = sys.argv[1]
    with world() as (me, ranks):
        if sys.argv[2] == "save":
            for step in range(STEPS):
                dcp.save(state_at(step, ranks), storage_writer=dsq_ckpt.DSQStorageWriter(f"{url}/step-{step}"))
                dist.barrier()
                assert depth(resolve_checkpoint_path(f"{url}/step-{step}")) == step
            done("saved")
            check(url, ranks)
            done("loaded")
            for kind in (False, True):
                future = dsq_ckpt.async_save(state_at(1, ranks), f"{url}-async/{kind}", processes=kind)
                result = future.result(timeout=240)
                assert result.depth == int(kind), result
            done("in the background")
            fail(url, me, ranks)
            done("failed")
        else:
            check(url, ranks)
            done("resharded")
            state, newest, history = state_at(0, ranks), f"{url}/step-{STEPS - 1}", dsq_ckpt.SaveHistory()
            dsq_ckpt.load(state, newest, history=history)
            dsq_ckpt.save(state, f"{url}-by-{ranks}/next", parent=newest, history=history)  # of another run: copied
            loaded = zeros(state)
            dsq_ckpt.load(loaded, f"{url}-by-{ranks}/next")
            for fqn, value in whole(loaded).items():
                assert (value - truth(STEPS - 1)[fqn]).abs().max() < 0.01, fqn
            done("went on")
