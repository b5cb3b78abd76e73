"""A training job with failures, simulated from measured constants: wasted time and effective training time ratio.

`Failures` says how often ranks fail, `System` what a system of checkpoints costs and what it can go back to;
`simulate` goes from failure to failure, at a few microseconds each however many steps lie in between, so that months
of thousands of ranks take no longer than it takes to count their failures. All systems see the same failures.

*Wasted time* is what a job took beyond its useful iterations (LowDiff, §II-B); the *effective training time ratio*
is the share of them (Gemini, §7; LowDiff, Exp. 9 and 10).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.tuning import CostModel, Costs, wasted_time
from evaluation.report import Row


class Failure(NamedTuple):
    """One failure: seconds since the one before it, whether only processes died, and a number in [0, 1) for luck."""

    after: float
    software: bool
    luck: float


@dataclass(frozen=True)
class Failures:
    """Failures that come at any moment alike, each stopping the whole job.

    Attributes:
        mtbf: mean seconds between failures of one rank.
        ranks: their rates add up: the job fails every `mtbf / ranks` seconds.
        software: share of failures that leave the host's memory as it was; the others lose the machine.
        seed: of the trace. Traces of one seed are alike but for their scale, whatever the rate.
    """

    mtbf: float
    ranks: int = 1
    software: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.mtbf > 0 and self.ranks >= 1 and 0 <= self.software <= 1):
            raise ConfigError(f"mtbf must be positive, ranks at least 1, software a share: {self}")

    @property
    def job_mtbf(self) -> float:
        """Mean seconds between failures of the job."""
        return self.mtbf / self.ranks

    def trace(self, count: int) -> list[Failure]:
        """Return the first failures, so many."""
        drawn = np.random.default_rng(self.seed)
        gaps = drawn.exponential(1.0, count) * self.job_mtbf
        kinds, luck = drawn.random(count) < self.software, drawn.random(count)
        return [Failure(*values) for values in zip(gaps.tolist(), kinds.tolist(), luck.tolist(), strict=True)]


@dataclass(frozen=True)
class Disk:
    """Checkpoints that outlast every failure, and a log of the steps after them, if there is one.

    Attributes:
        every: steps from one checkpoint to the next.
        load: seconds until training goes on from one.
        stall: seconds that one stops training.
        lag: seconds from the begin of one until it can be loaded; at least `stall` where it is written meanwhile.
        batch: steps of the log that are written at once; 0 without a log.
        batch_lag: seconds from the last step of a batch until the batch can be replayed.
        replay: seconds per step.
    """

    every: int
    load: float
    stall: float = 0.0
    lag: float = 0.0
    batch: int = 0
    batch_lag: float = 0.0
    replay: float = 0.0


@dataclass(frozen=True)
class Memory:
    """A copy of the state in a host's memory.

    Attributes:
        every: steps from one copy to the next.
        load: seconds until training goes on from it.
        lag: seconds until a copy is complete.
        software, hardware: chance that it is there after a failure of that kind.
    """

    every: int
    load: float
    lag: float = 0.0
    software: float = 1.0
    hardware: float = 0.0


@dataclass(frozen=True)
class System:
    """What a system of checkpoints costs, and what a job can go back to.

    Attributes:
        name: for tables.
        iteration: seconds of one step without checkpoints.
        disk: what is always there.
        overhead: seconds that each step takes longer.
        memory: what is there after some failures, and then used.

    Raises:
        ConfigError: a memory beside a log, which no system here has.
    """

    name: str
    iteration: float
    disk: Disk
    overhead: float = 0.0
    memory: Memory | None = None

    def __post_init__(self) -> None:
        if self.memory and self.disk.batch:
            raise ConfigError(f"{self.name}: a copy in memory and a log are not simulated together")


@dataclass(frozen=True)
class Outcome:
    """Times of a job in seconds of wall clock, of which `wall` is the sum of the others.

    Attributes:
        wall: all of it.
        useful: iterations that were kept, without any overhead.
        lost: iterations that had to be done again, likewise.
        recovering: loading and replaying; also where a failure cut it short.
        steady: overhead of all iterations, and stalls.
        failures: how many.
    """

    wall: float
    useful: float
    lost: float
    recovering: float
    steady: float
    failures: int

    @property
    def wasted(self) -> float:
        """Wasted time."""
        return self.wall - self.useful

    @property
    def ratio(self) -> float:
        """Effective training time ratio, a share."""
        return self.useful / self.wall


class _Run:
    """A job between two failures: what was done, and what of it is on disk, at a time since training went on.

    Args:
        system: its constants.
        first: steps until the next checkpoint.
    """

    def __init__(self, system: System, first: float) -> None:
        self._disk, self._first = system.disk, first
        self._step = system.iteration + system.overhead
        self._before = first * self._step
        self._cycle = system.disk.every * self._step + system.disk.stall

    def done(self, time: float) -> float:
        """Return the steps done, including a fraction of the current one."""
        return sum(self._parts(time))

    def checkpoint(self, time: float) -> float | None:
        """Return the steps at the newest complete new checkpoint; None if there is none."""
        complete = time - self._disk.lag - self._before
        return None if complete < 0 else self._first + complete // self._cycle * self._disk.every

    def on_disk(self, time: float) -> float:
        """Return the steps that the log or a checkpoint restores, at least 0."""
        reached = self.checkpoint(time) or 0.0
        if self._disk.batch and time > self._disk.batch_lag:
            whole, beyond = self._parts(time - self._disk.batch_lag)
            reached = max(reached, whole + beyond // self._disk.batch * self._disk.batch)
        return reached

    def _parts(self, time: float) -> tuple[float, float]:
        """Return the steps until the newest checkpoint began, and after it; a checkpoint ends a batch of the log."""
        if time < self._before:
            return 0.0, time / self._step
        cycles, rest = divmod(time - self._before, self._cycle)
        return self._first + cycles * self._disk.every, max(0.0, rest - self._disk.stall) / self._step


def simulate(system: System, failures: Failures, count: int = 2000) -> Outcome:
    """Run a job until so many failures were seen, the last one ending it.

    A failure during a recovery begins it again. Checkpoints and batches that a failure finds half written are lost,
    and training goes on counting from where it is: the next checkpoint is `every` steps after the last that is whole.

    Args:
        system: what is run.
        failures: when it fails.
        count: how many failures; the figures are uncertain by about `1 / sqrt(count)` of the wasted time.
    """
    disk, memory = system.disk, system.memory
    kept_steps = 0.0  # steps that are done and need not be done again
    behind = 0.0  # of them, those after the newest checkpoint on disk
    recovery = lost = recovering = wall = 0.0
    for failure in failures.trace(count):
        wall += failure.after
        recovering += min(recovery, failure.after)
        time = max(0.0, failure.after - recovery)
        run = _Run(system, max(0.0, disk.every - behind))
        done = run.done(time)
        checkpoint = run.checkpoint(time)
        from_checkpoint = -behind if checkpoint is None else checkpoint  # in steps since training went on
        if memory and failure.luck < (memory.software if failure.software else memory.hardware):
            copied = run.done(max(0.0, time - memory.lag)) // memory.every * memory.every
            restored = max(copied, from_checkpoint)
            recovery = memory.load
        else:
            restored = run.on_disk(time) if disk.batch else from_checkpoint
            recovery = disk.load + (restored - from_checkpoint) * disk.replay
        lost += done - restored
        kept_steps += restored
        behind = restored - from_checkpoint
    useful = kept_steps * system.iteration
    lost *= system.iteration
    return Outcome(wall, useful, lost, recovering, wall - useful - lost - recovering, count)


def torch_save(iteration: float, every: int, save: float, load: float) -> System:
    """Simulate `torch.save`: training stops for `save` seconds every so many steps."""
    return System("torch.save", iteration, Disk(every, load, stall=save, lag=save))


def checkfreq(iteration: float, stall: float, persist: float, load: float, bound: float = 0.035) -> System:
    """Simulate CheckFreq: training stops for a copy, which is written in the background.

    As often as one is written before the next, and stalls stay within `bound`, a share of training time.
    """
    every = max(1, math.ceil(persist / iteration), math.ceil(stall / (bound * iteration)))
    return System("CheckFreq", iteration, Disk(every, load, stall=stall, lag=stall + persist))


def gemini(
    iteration: float, memory: Memory, overhead: float, disk_every: int, save: float, load: float
) -> System:
    """Simulate Gemini: copies in the memory of this host and of a peer; a rare checkpoint for the loss of both.

    Args:
        iteration: seconds of a step.
        memory: the copies; `hardware` is the chance that a lost host's peer is not lost with it.
        overhead: seconds that each step takes longer for the traffic of the copies.
        disk_every: steps between checkpoints on disk (every 3 hours in the paper of Gemini).
        save: seconds that one stops training.
        load: seconds until training goes on from one.
    """
    return System("Gemini", iteration, Disk(disk_every, load, stall=save, lag=save), overhead, memory)


def naive(iteration: float, every: int, save: float, load: float, difference: float, merge: float) -> System:
    """Simulate naive differential checkpoints: each step waits `difference` seconds for its own checkpoint.

    Restored from a full checkpoint, written every so many steps in `save` seconds, and `merge` seconds per step.
    """
    disk = Disk(every, load, stall=save, lag=save, batch=1, replay=merge)
    return System("naive differential", iteration, disk, overhead=difference)


def lowdiff(costs: Costs, every: int, batch: int, overhead: float = 0.0) -> System:
    """Simulate LowDiff as implemented here, under the assumptions of `CostModel`.

    Args:
        costs: all but `mtbf`, `ranks` and `merge` of them count.
        every: steps from one snapshot to the next.
        batch: steps written at once.
        overhead: seconds that handing over a gradient takes at each step, whatever the settings.
    """
    disk = Disk(
        every, costs.load, stall=costs.stall_seconds, lag=max(costs.stall_seconds, costs.write_seconds), batch=batch,
        batch_lag=costs.batch_fixed + batch * costs.batch_step, replay=costs.replay,
    )
    return System("LowDiff", costs.iteration, disk, overhead + CostModel(costs).slowdown(every, batch))


def lowdiff_of_the_equations(costs: Costs, every: int, batch: int) -> System:
    """Simulate LowDiff as in equation 8: synchronous snapshots, batches without cost and merged as one gradient."""
    disk = Disk(
        every, costs.load, stall=costs.write_seconds, lag=costs.write_seconds, batch=batch,
        replay=costs.merge_seconds / batch,
    )
    return System("LowDiff (equation 8)", costs.iteration, disk)


def lowdiff_plus(iteration: float, overhead: float, memory: Memory, persist: float, load: float) -> System:
    """Simulate LowDiff+: a replica in another process, saved as often as the disk allows, without stopping training.

    Args:
        iteration: seconds of a step.
        overhead: seconds that each step takes longer.
        memory: the replica, which a failure of software leaves.
        persist: seconds to write it.
        load: seconds until training goes on from what was written.
    """
    every = max(1, math.ceil(persist / (iteration + overhead)))
    return System("LowDiff+", iteration, Disk(every, load, lag=persist), overhead, memory)


def modes(system: System) -> tuple[System, System]:
    """Simulate a system as the paper shows LowDiff+: (S) if all failures were of software, (P) if none were."""
    if system.memory is None:
        raise ConfigError(f"{system.name} has nothing in memory")
    always = replace(system.memory, software=1.0, hardware=1.0)
    return (
        replace(system, name=f"{system.name} (S)", memory=always),
        replace(system, name=f"{system.name} (P)", memory=None),
    )


def compare(
    systems: Callable[[Failures], Iterable[System]], cases: Iterable[Failures], count: int = 2000
) -> list[Row]:
    """Simulate every system under every kind of failures, as in Exp. 3 (by MTBF), 9 and 10 (by ranks).

    Args:
        systems: makes what is compared, given the failures, which settings may depend on.
        cases: failures.
        count: of them, per system and case.

    Returns:
        A row for each, with seconds and shares of wall clock time.
    """
    rows: list[Row] = []
    for failures in cases:
        for system in systems(failures):
            outcome = simulate(system, failures, count)
            rows.append({
                "name": system.name, "ranks": failures.ranks, "mtbf": failures.mtbf, "job_mtbf": failures.job_mtbf,
                "software": failures.software, "ratio": outcome.ratio, "wasted": outcome.wasted / outcome.wall,
                "lost": outcome.lost / outcome.wall, "recovering": outcome.recovering / outcome.wall,
                "steady": outcome.steady / outcome.wall, "failures": outcome.failures, "seed": failures.seed,
            })
    return rows


def table(
    costs: Costs, fs: Sequence[int], bs: Sequence[int], count: int = 2000, seed: int = 0
) -> list[Row]:
    """Compute LowDiff's Table I, by equation and by simulation: wasted time, 1 at the best of the cells shown.

    Args:
        costs: what the job costs.
        fs: FCF, in iterations from one snapshot to the next.
        bs: batch sizes; those longer than an interval are left out.
        count: failures that are simulated for each cell.
        seed: of the trace, which is the same for all cells.

    Returns:
        A row per cell: `every`, `batch`, and four figures. `equation` is equation 8, `equation_simulated` a
        job under its assumptions; `model` is `CostModel`, `model_simulated` a job under its own.
    """
    failures = Failures(costs.mtbf, seed=seed)

    def share(system: System) -> float:
        outcome = simulate(system, failures, count)
        return outcome.wasted / outcome.wall

    rows: list[Row] = [
        {
            "every": every, "batch": batch,
            "equation": wasted_time(costs, 1 / every, batch, 1.0),
            "equation_simulated": share(lowdiff_of_the_equations(costs, every, batch)),
            "model": CostModel(costs).wasted_time(every, batch, 1.0),
            "model_simulated": share(lowdiff(costs, every, batch)),
        }
        for every in fs for batch in bs if batch <= every
    ]
    for key in ("equation", "equation_simulated", "model", "model_simulated"):
        least = min(row[key] for row in rows)
        for row in rows:
            row[key] /= least
    return rows
