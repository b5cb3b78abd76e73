"""Lossy resumes on several ranks: argv = an empty directory."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import done, normal, whole, world, zeros
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt.quantization import restored_values
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import read_bits


def state_of(size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    return {
        "rows.weight": distribute_tensor(normal(101, 64, seed=1), mesh, [Shard(0)]),
        "replica.weight": distribute_tensor(normal(90, 64, seed=2), mesh, [Replicate()]),
        "one.weight": distribute_tensor(normal(1, 5000, 2, seed=3), mesh, [Shard(0)]),  # all of it on rank 0
        "state.p.exp_avg": normal(80, 64, seed=4),
        "step": 1,
    }


def count_warnings(work: Any) -> int:
    """How often all ranks together warn of the limit; collective."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum("max_lossy_resumes" in str(warning.message) for warning in caught))
    return sum(counts)


def check(run: Path, rank: int, size: int, background: bool) -> None:
    """Restored twice, exact from then on, on all ranks, with one warning each; a restore of that one does not count."""
    config = {"search": {"max_lossy_resumes": 2}}
    for number in range(5):
        path, state, history = run / str(number), state_of(size), dsq_ckpt.SaveHistory()
        if number:
            dsq_ckpt.load(state, run / str(number - 1), history=history)
        options: dict[str, Any] = {"config": config, "history": history}

        def save(path: Path = path, state: dict[str, Any] = state, options: dict[str, Any] = options) -> None:
            if background:
                dsq_ckpt.async_save(state, path, **options).result()
            else:
                dsq_ckpt.save(state, path, **options)

        # An asynchronous save ends on rank 0 when all is committed, and elsewhere it may be seen a little later.
        assert count_warnings(save) == (number >= 2)
        dist.barrier()
        manifest = Manifest.read(path)
        assert manifest.lossy_resumes == min(number, 2)
        assert manifest.lossy == (number < 2)
        back = zeros(state)
        dsq_ckpt.load(back, path)
        equal = all(torch.equal(value, whole(state)[fqn]) for fqn, value in whole(back).items())
        assert equal == (number >= 2)


def loaded_by_one(run: Path, rank: int) -> None:
    """One rank loads for all, whichever it is: moments have the narrowest parts on the rank that writes them."""
    state = {
        "w": normal(240, 192, seed=1),  # each is replicated, and large enough to be written by any rank
        "state.w.exp_avg": normal(240, 192, seed=2), "state.w.exp_avg_sq": normal(240, 192, seed=3).square() + 1,
    }
    for reader in range(dist.get_world_size()):
        restored_values._loads = restored_values.LoadCounts()
        first, second, history = run / f"{reader}-a", run / f"{reader}-b", dsq_ckpt.SaveHistory()
        dsq_ckpt.save(state, first, history=history)
        if rank == reader:
            dsq_ckpt.load(state, first, no_dist=True, history=history)
        for tensor in state.values():
            dist.broadcast(tensor, reader)
        dsq_ckpt.save(state, second, history=history)
        assert read_bits(second)["state.w.exp_avg"] == 8, reader


def main() -> None:
    root = Path(sys.argv[1])
    with world() as (rank, size):
        check(root / "plain", rank, size, background=False)
        done("save")
        check(root / "background", rank, size, background=True)
        done("async_save")
        loaded_by_one(root / "one", rank)
        done("loaded by one")


main()
