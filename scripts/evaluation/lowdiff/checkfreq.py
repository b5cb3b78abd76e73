"""CheckFreq (Mohan, Phanishayee, Chidambaram; FAST '21): two phases, and a frequency that keeps overhead in a bound.

A snapshot copies the state to memory while the next iteration computes; only the next update waits for it. The snapshot
is then persisted in the background, one at a time. How often is decided from a profile of the first iterations, and
tuned at run time.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsq_ckpt.lowdiff.arena import Arena
from evaluation.lowdiff.base import Layout, OnDisk, copy_all, keep_to, live_tensors, read_state
from evaluation.lowdiff.durable import SUFFIX, Host, steps_in

BOUND = 0.035
"""Largest overhead that checkpointing may have, as a share of training time: the paper's figure."""
SKIPPED, PROFILED = 3, 12
"""Iterations that are not profiled, as they warm up, and those that are; the authors' code profiles 95 after 5."""
STEP = 2
"""Iterations by which the interval grows when the bound is exceeded, as in the authors' code."""


@dataclass(frozen=True)
class Profile:
    """What the first iterations showed; all in seconds.

    Attributes:
        iteration: Of one iteration without a checkpoint.
        update: Of the optimizer's step, which a snapshot cannot overlap.
        snapshot: Of a copy of the state.
        persist: Of writing it.
    """

    iteration: float
    update: float
    snapshot: float
    persist: float

    @property
    def stall(self) -> float:
        """What the next update waits for a snapshot that began after the last one."""
        return max(0.0, self.snapshot - (self.iteration - self.update))


def interval(profile: Profile, bound: float = BOUND) -> int:
    """Return the smallest number of iterations between checkpoints that the bound and the disk allow.

    One checkpoint has to be persisted before the next begins, and what it stalls training is spread over the interval.
    """
    persisted = math.ceil((profile.snapshot + profile.persist) / profile.iteration)
    return max(1, persisted, math.ceil(profile.stall / (bound * profile.iteration)))


class Tuner:
    """Adaptive rate tuning: from the time that iterations really take.

    Args:
        every: Interval to begin with.
        iteration: Seconds of an iteration without a checkpoint.
        bound: On the overhead.

    Attributes:
        every: The interval now.
    """

    def __init__(self, every: int, iteration: float, bound: float = BOUND) -> None:
        self.every = every
        self._iteration = iteration
        self._bound = bound
        self._seen: list[float] = []

    def observe(self, seconds: float) -> None:
        """Take in one iteration. After each interval, which has one checkpoint in it, the interval may grow."""
        self._seen.append(seconds)
        if len(self._seen) >= self.every:
            if sum(self._seen) > (1 + self._bound) * self._iteration * len(self._seen):
                self.every += STEP
            self._seen.clear()


class CheckFreq(OnDisk):
    """The system.

    Args:
        directory: Where checkpoints go.
        every: Iterations between them; None: by profile and tuning.
        core: CPU for snapshots and writes.
        bound: On the overhead.
    """

    def __init__(self, directory: Path, every: int | None = 1, core: int | None = None, bound: float = BOUND) -> None:
        super().__init__(directory, core=core)
        self._fixed = every
        self._bound = bound

    @property
    def every(self) -> int | None:
        """Iterations between checkpoints; None while the profile is made."""
        return self._fixed if self._tuner is None else self._tuner.every

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Map the snapshot, and start the process that persists it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._live = list(live_tensors(model, optimizer).values())
        layout = Layout(self._live)
        self._size = layout.size
        self._host = Host.start(f"checkfreq-{os.getpid()}", layout.size, self._core)
        self._arena = Arena(self._host.descriptor, layout.size)
        self._snapshot = layout.views(self._arena.tensor)
        self._copier = ThreadPoolExecutor(1, initializer=keep_to, initargs=(self._core,))
        self._copying: Future[None] | None = None
        self._updates = _Updates(optimizer, self._wait_for_snapshot)
        self._tuner: Tuner | None = None
        self._iterations: list[float] = []
        self._last: float | None = None
        self._checkpoint = step

    def after_step(self, step: int) -> None:
        """Begin a snapshot if it is time for one."""
        if self._fixed is None:
            self._measure(step)
        due = step - self._checkpoint >= self._tuner.every if self._tuner else not step % (self._fixed or step + 1)
        if due:
            self._begin(step)

    def wait(self) -> None:
        """Wait for the snapshot and the file."""
        self._wait_for_snapshot()
        self._written += sum(self._host.wait())
        self._last = None  # the time until the next step is none of training's

    def finish(self) -> None:
        """Wait, and end thread and process."""
        self.wait()
        self._updates.remove()
        self._copier.shutdown()
        self._host.stop()
        self._arena.close()

    def recover(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Read the newest file."""
        by_step = steps_in(self._directory)
        if not by_step:
            return 0
        return read_state(by_step[max(by_step)], list(live_tensors(model, optimizer).values()))

    def _begin(self, step: int) -> None:
        # There is one snapshot: the last one has to be persisted before it is overwritten.
        self._wait_for_snapshot()
        self._written += sum(self._host.wait())
        self._checkpoint = step
        self._copying = self._copier.submit(self._copy, step)

    def _copy(self, step: int) -> None:
        copy_all(self._live, self._snapshot)
        self._host.persist(0, self._size, self._directory / f"{step:09d}{SUFFIX}", step)

    def _wait_for_snapshot(self) -> None:
        if self._copying is not None:
            self._copying.result()
            self._copying = None

    def _measure(self, step: int) -> None:
        """Measure the last iteration; after enough of them, profile a checkpoint and choose the interval."""
        now = time.perf_counter()
        seconds, self._last = None if self._last is None else now - self._last, now
        if self._tuner is not None:
            if seconds is not None:
                self._tuner.observe(seconds)
            return
        if seconds is not None:
            self._iterations.append(seconds)
        if len(self._iterations) == SKIPPED + PROFILED:
            profile = self._profile(step)
            self._tuner = Tuner(interval(profile, self._bound), profile.iteration, self._bound)
            self._checkpoint, self._last = step, None

    def _profile(self, step: int) -> Profile:
        self._begin(step)
        self.wait()  # takes the pages of the snapshot, which later ones need not
        started = time.perf_counter()
        self._begin(step)
        self._wait_for_snapshot()
        copied = time.perf_counter()
        self.wait()
        return Profile(
            statistics.median(self._iterations[SKIPPED:]), statistics.median(self._updates.seconds),
            copied - started, time.perf_counter() - copied,
        )


class _Updates:
    """Something to do before each of an optimizer's updates, and how long the last of them took.

    Attributes:
        seconds: Of each of the last updates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Any) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

        def pre_hook(*_: Any) -> None:
            before()
            self._started = time.perf_counter()

        def post_hook(*_: Any) -> None:
            self.seconds = [*self.seconds[-PROFILED:], time.perf_counter() - self._started]

        self._handles = [optimizer.register_step_pre_hook(pre_hook), optimizer.register_step_post_hook(post_hook)]

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()


