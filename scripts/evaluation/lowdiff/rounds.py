"""What checkpointing costs training: every system in turns with training without, so that a noisy machine is fair.

All processes are there from the start and wait. In a round each of them trains a block, and before and after each block
another process does that never checkpoints; a block is compared with the mean of its two neighbours. Processes that do
the same differ by some percent for as long as they live, as memory was dealt to them. So there are rounds before any of
them checkpoints, and rounds when all do: the overhead is what the second say over the median of the first.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.lowdiff.loop import Block
from evaluation.lowdiff.process import Job, Worker
from evaluation.lowdiff.systems import WITHOUT
from evaluation.report import Row

Report = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: Rounds, of each kind.
        lead: Steps at the start of a block that are not timed.
        steps: Steps of a block that are timed.
        warm_up: Steps of each system before the first round.
    """

    rounds: int = 12
    lead: int = 4
    steps: int = 20
    warm_up: int = 4


class Costs(NamedTuple):
    """What a system was measured to cost.

    Attributes:
        seconds: Of an iteration; mean of each block.
        overhead: Over training without checkpoints, as a share of it; of each block.
        before: As overhead, before the process began to checkpoint: how it differs from the other one anyway. The
            median of these is in all of `overhead`, so what it is wrong by is not seen in the spread of that.
        stalls: Seconds per iteration in which the training thread was in the system, of each block.
        alone: Seconds of an iteration without checkpoints, next to each block.
        bytes: That were written per step, lead included.
        about: What the system says of itself at the end.
    """

    seconds: list[float]
    overhead: list[float]
    before: list[float]
    stalls: list[float]
    alone: list[float]
    bytes: float
    about: dict[str, Any]

    def row(self) -> Row:
        """Return medians and spread."""
        iteration = statistics.median(self.alone)
        return {
            "seconds": statistics.median(self.seconds), "seconds_min": min(self.seconds),
            "seconds_max": max(self.seconds), "alone": iteration,
            "overhead": statistics.median(self.overhead), "overhead_low": quartile(self.overhead, 1),
            "overhead_high": quartile(self.overhead, 3), "overhead_min": min(self.overhead),
            "overhead_max": max(self.overhead), "before": statistics.median(self.before),
            "before_blocks": self.before,
            "stall": statistics.median(self.stalls) / iteration,
            "bytes_per_step": self.bytes, "rounds": len(self.seconds), "about": self.about,
            "blocks": [list(block) for block in zip(self.alone, self.seconds, strict=True)],
        }


def measure(jobs: Mapping[str, Job], plan: Plan, report: Report = lambda line: None) -> dict[str, Costs]:
    """Measure what each job's checkpoints cost.

    Args:
        jobs: By name. Those that train the same take turns; others are measured by themselves.
        plan: How much is measured.
        report: Called with a line after every block.

    Returns:
        Costs by name; where there is one, of a second training without checkpoints: that is the noise.

    Raises:
        WorkerError: A process failed.
    """
    costs: dict[str, Costs] = {}
    for setting in dict.fromkeys(job.setting for job in jobs.values()):
        costs |= _measure({name: job for name, job in jobs.items() if job.setting == setting}, plan, report)
    return {name: costs[name] for name in jobs}


def _measure(jobs: Mapping[str, Job], plan: Plan, report: Report) -> dict[str, Costs]:
    """Measure jobs that train the same, but for their checkpoints."""
    other = replace(next(iter(jobs.values())), system=WITHOUT, options={}, directory=Path())
    with contextlib.ExitStack() as stack:
        reference = stack.enter_context(Worker(other))
        workers = {name: stack.enter_context(Worker(job)) for name, job in jobs.items()}
        for worker in (reference, *workers.values()):
            worker.call("train", 0, plan.warm_up)
        before = _rounds(reference, workers, plan, lambda line: report(f"without: {line}"))
        for worker in workers.values():
            worker.call("prepare")
            worker.call("train", 0, plan.warm_up)
            worker.call("wait")
        written = {name: worker.call("bytes")["written"] for name, worker in workers.items()}
        rounds = _rounds(reference, workers, plan, report)
        about = {name: worker.call("about") for name, worker in workers.items()}
        steps = plan.rounds * (plan.lead + plan.steps)
        sizes = {name: worker.call("finish")["written"] - written[name] for name, worker in workers.items()}
    costs = {}
    for name, blocks in rounds.items():
        own = statistics.median(_mean(block.seconds) / alone for alone, block in before[name])
        costs[name] = Costs(
            [_mean(block.seconds) for _, block in blocks],
            [_mean(block.seconds) / alone / own - 1 for alone, block in blocks],
            [_mean(block.seconds) / alone - 1 for alone, block in before[name]],
            [_mean(block.stalls) for _, block in blocks], [alone for alone, _ in blocks],
            sizes[name] / steps, about[name],
        )
    return costs


def _rounds(
    reference: Worker, workers: Mapping[str, Worker], plan: Plan, report: Report
) -> dict[str, list[tuple[float, Block]]]:
    """Return the blocks of each system, with the seconds of an iteration of the reference around them."""
    blocks: dict[str, list[tuple[float, Block]]] = {name: [] for name in workers}
    names = list(workers)
    before = block(reference, plan)
    for number in range(plan.rounds):
        # Another one is first in each round: no system always follows the same one.
        for name in names[number % len(names):] + names[: number % len(names)]:
            own = block(workers[name], plan)
            after = block(reference, plan)
            neighbours = (_mean(before.seconds) + _mean(after.seconds)) / 2
            blocks[name].append((neighbours, own))
            report(f"round {number + 1} of {plan.rounds}, {name}: "
                   f"{1e3 * _mean(own.seconds):.1f} ms, {1e3 * neighbours:.1f} without")
            before = after
    return blocks


def quartile(values: list[float], number: int) -> float:
    """Return the first, second or third quartile; a single value is returned itself."""
    return statistics.quantiles(values, n=4, method="inclusive")[number - 1] if len(values) > 1 else values[0]


def block(worker: Worker, plan: Plan) -> Block:
    """Train a block, and wait until its system has finished."""
    trained: Block = worker.call("train", plan.steps, plan.lead)
    worker.call("wait")  # what is under way would take time from the next one
    return trained


_mean = statistics.fmean
