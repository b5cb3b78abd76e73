"""Runs without a log, in forks of a process: what those that are killed and recovered are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from dsq_ckpt.lowdiff import gradient_compressor
from tests.helpers import forked_work
from tests.lowdiff.loops import Case, Loop, digest

STEPS = 600
"""Of a run."""
CASE = Case(
    lambda model: torch.optim.Adam(model.parameters(), 0.01),
    schedule=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1),
    clip=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5),
)


def forked(work: Callable[[], Any]) -> int:
    """Fork a child that computes with one thread."""
    return forked_work.forked(lambda: _work_alone(work))


def answer(work: Callable[[], Any]) -> Any:
    """Return the result of a fork of this process that computes with one thread; None if it failed."""
    return forked_work.ask(lambda: _work_alone(work))[0]


def _work_alone(work: Callable[[], Any]) -> Any:
    torch.set_num_threads(1)
    return work()


def joined(loop: Loop, store: Path, rank: int, ranks: int) -> None:
    """Make a loop one of several."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        loop.model = DistributedDataParallel(loop.model)


def uninterrupted(spec: str, ranks: int, store: Path, steps: int = STEPS) -> list[str]:
    """Digests of the states of a run without a log, compressed as with it."""

    def work(rank: int) -> list[str]:
        loop = Loop(CASE)
        joined(loop, store, rank, ranks)
        compressor = gradient_compressor(spec)
        compressor.attach(loop.model)
        table = [digest(loop.state())]
        for number in range(steps):
            loop.step(number, rank)
            compressor.take()
            if rank == 0:
                table.append(digest(loop.state()))
        return table

    others = [forked(lambda rank=rank: work(rank) and None) for rank in range(1, ranks)]
    table = answer(lambda: work(0))
    for child in others:
        os.waitpid(child, 0)
    assert table is not None
    return table
