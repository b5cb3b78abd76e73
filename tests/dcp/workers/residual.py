"""Chains of differences on several ranks: argv = a directory, `save` or `load`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import depth, done, whole, world, zeros
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers.lc import CONFIG, algorithm_1, make_config, make_walk

STEPS = 4
TRUTH = {
    "rows.weight": make_walk(101, 64, steps=STEPS, seed=1), "columns.weight": make_walk(96, 64, steps=STEPS, seed=2),
    "replica.weight": make_walk(90, 64, steps=STEPS, seed=3), "empty.weight": make_walk(1, 80, 80, steps=STEPS, seed=4),
    "plain.weight": make_walk(88, 64, steps=STEPS, seed=5), "short.weight": make_walk(2, 4000, steps=STEPS, seed=6),
}


def state_at(step: int, size: int) -> dict[str, Any]:
    """The tensors of a step, sharded in all ways."""
    mesh = init_device_mesh("cpu", (size,))
    placements = {"columns.weight": [Shard(1)], "replica.weight": [Replicate()]}
    state: dict[str, Any] = {"step": step}
    for fqn, states in TRUTH.items():
        if fqn == "plain.weight":
            state[fqn] = states[step].clone()
        else:
            state[fqn] = distribute_tensor(states[step].clone(), mesh, placements.get(fqn, [Shard(0)]))
    return state


def read(path: Path, size: int, **options: Any) -> dict[str, torch.Tensor]:
    target = zeros(state_at(0, size))
    dsq_ckpt.load(target, path, **options)
    return whole(target)


def check(run: Path, size: int) -> None:
    expected = {fqn: algorithm_1(states) for fqn, states in TRUTH.items()}
    for step in range(STEPS):
        assert depth(run / str(step)) == step
        for fqn, value in read(run / str(step), size).items():
            assert torch.equal(value, expected[fqn][step]), (run.name, step, fqn)


def chain(run: Path, size: int, mode: str) -> None:
    """Whoever holds which part: the same as Algorithm 1 on whole tensors, bit for bit."""
    for step in range(STEPS):
        state = state_at(step, size)
        if mode == "sync":
            dsq_ckpt.save(state, run / str(step), config=CONFIG)
        else:
            future = dsq_ckpt.async_save(state, run / str(step), config=CONFIG, processes=mode == "processes")
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(1e9)  # training goes on
            future.result(timeout=240)
        dist.barrier()
    check(run, size)
    done(f"chain, {mode}")


def continued(run: Path, size: int) -> None:
    """A chain that goes on after a load, by the same ranks."""
    history = dsq_ckpt.SaveHistory()
    for step in range(STEPS):
        dsq_ckpt.save(state_at(step, size), run / str(step), config=CONFIG, history=history)
        history = dsq_ckpt.SaveHistory()
        read(run / str(step), size, history=history)
    check(run, size)
    done("continued")


def parts(run: Path, size: int) -> None:
    """Parts of every rank's chunks take turns."""
    config = make_config(fit="partition", parts=3)
    for step in (0, 1, 1, 1):
        dsq_ckpt.save(state_at(step, size), run / f"{len(list(run.glob('*')))}", config=config)
        dist.barrier()
    before, after, loaded = (whole(state) for state in (state_at(0, size), state_at(1, size), read(run / "3", size)))
    for fqn, value in after.items():
        change = value - before[fqn]
        assert float((loaded[fqn] - before[fqn] - change).abs().max()) <= float(change.abs().max()) * 2**-8, fqn
        assert int((loaded[fqn] != before[fqn]).sum()) == int((value != before[fqn]).sum()), fqn
    done("parts")


def elsewhere(run: Path, size: int) -> None:
    """Loaded by other numbers of ranks; what these save next has no parent where its chunks are others."""
    check(run / "sync", size)
    state = state_at(STEPS - 1, size)
    target = run / f"by-{size}" / "next"
    dsq_ckpt.save(state, target, config=CONFIG, parent=run / "sync" / str(STEPS - 1), history=dsq_ckpt.SaveHistory())
    with Checkpoint(target) as checkpoint:
        added = {key.fqn for key, ref in checkpoint.iter_chunks() if "residual" in checkpoint.read_record(ref)}
    assert added == {"plain.weight", "replica.weight", "empty.weight", "short.weight"} - (
        {"short.weight"} if size == 1 else set()  # otherwise cut as it was by two ranks
    )
    for fqn, value in read(target, size).items():
        states = TRUTH[fqn]
        expected = algorithm_1([*states, states[-1]])[-1] if fqn in added else states[-1]
        assert torch.equal(value, expected), fqn
    done("elsewhere")


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    with world() as (_, ranks):
        if sys.argv[2] == "load":
            elsewhere(root, ranks)
        else:
            for kind in ("sync", "threads", "processes"):
                chain(root / kind, ranks, kind)
            continued(root / "continued", ranks)
            parts(root / "parts", ranks)
