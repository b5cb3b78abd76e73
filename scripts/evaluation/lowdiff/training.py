"""Experiments 1, 2, 4 and 8 of LowDiff: what checkpoints in every iteration cost training, how often they may be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from evaluation.lowdiff.checkfreq import BOUND
from evaluation.lowdiff.loop import Setting
from evaluation.lowdiff.process import Cores, Job, Worker
from evaluation.lowdiff.rounds import Plan, Report, measure
from evaluation.lowdiff.systems import OURS, WITHOUT
from evaluation.report import Column, Row, digits, percent

NEVER = 1_000_000
"""Steps between snapshots where there are to be none but the first."""
LONGEST = 200
"""Interval at which the search for the shortest one within the bound gives up."""
PLUS = "lowdiff+"
OWN_POLICY = "checkfreq, own policy"
PROFILE_STEPS = 40
"""After which CheckFreq has chosen its interval."""


@dataclass(frozen=True)
class Bench:
    """Where and on what is measured.

    Attributes:
        setting: What is trained.
        directory: For checkpoints: on the disk that is to be measured.
        cores: CPUs of training and of checkpointing.
        plan: How much is measured.
        report: Called with a line about what is going on.
    """

    setting: Setting
    directory: Path
    cores: Cores
    plan: Plan
    report: Report

    def job(self, system: str, part: str = "", **options: Any) -> Job:
        """Return a job in a directory of its own. LowDiff+ is for gradients that are not compressed."""
        setting = replace(self.setting, compressor="none") if system == PLUS else self.setting
        return Job(setting, system, self.directory / f"{system}{part}", self.cores, options)


def options_of(system: str, every: int = 1) -> dict[str, Any]:
    """Return the options with which a system checkpoints every so many steps; LowDiff logs every step regardless."""
    return {} if system in (WITHOUT, *OURS) else {"every": every}


def training_time(bench: Bench, systems: Sequence[str]) -> list[Row]:
    """Measure the seconds of an iteration with a checkpoint in each (experiments 1 and 2)."""
    jobs = {system: bench.job(system, **options_of(system)) for system in systems}
    all_costs = measure(jobs, bench.plan, bench.report)
    return [{"name": name, **costs.row()} for name, costs in all_costs.items()]


def shortest_intervals(bench: Bench, systems: Sequence[str], bound: float = BOUND) -> list[Row]:
    """Find the highest frequency whose overhead keeps to a bound (experiment 4).

    The interval of a system is lengthened in proportion to what it exceeds the bound by, until it keeps to it, and then
    shortened for as long as it does. CheckFreq's own policy is a system of its own.
    """
    tried: dict[str, dict[int, Row]] = {system: {} for system in systems if system != WITHOUT}
    every = dict.fromkeys(tried, 1)
    number = 0
    while every:
        number += 1
        plan = plan_for(bench.plan, max(every.values()))
        jobs = {
            system: bench.job(system, f"-{number}", **options_of(system, interval))
            for system, interval in every.items()
        }
        for system, costs in measure(jobs, plan, bench.report).items():
            tried[system][every[system]] = costs.row()
        every = {
            system: after for system in every
            if (after := _next(tried[system], bound, fixed=system in OURS)) is not None
        }
    rows = []
    for system, intervals in tried.items():
        within = [interval for interval, row in intervals.items() if row["overhead"] <= bound]
        chosen = min(within, default=max(intervals))
        rows.append({
            "name": system, "interval": chosen if within else None, **intervals[chosen], "bound": bound,
            "tried": {interval: row["overhead"] for interval, row in sorted(intervals.items())},
        })
    if "checkfreq" in tried:
        rows.append(own_policy(bench, bound))
    if PLUS in tried:
        rows.append(_persisted(bench, tried[PLUS][1]))
    return rows


def ratios(bench: Bench, values: Sequence[float], bound: float = BOUND) -> list[Row]:
    """Measure LowDiff at several ratios of gradient compression: bytes per step and overhead (experiment 8).

    Training without checkpoints compresses with the same ratio, so that the cost of compressing is in both.
    """
    rows = []
    for value in values:
        setting = replace(bench.setting, compressor=f"topk:{value:g}")
        of_value = replace(bench, setting=setting, directory=bench.directory / f"ratio-{value:g}")
        all_costs = measure({"lowdiff": of_value.job("lowdiff", snapshot_every=NEVER)}, bench.plan, bench.report)
        row = all_costs["lowdiff"].row()
        rows.append({"name": setting.compressor, "ratio": value, **row, "within": row["overhead"] <= bound})
    return rows


def _next(tried: Mapping[int, Row], bound: float, fixed: bool) -> int | None:
    """Return the interval to try next; None when the shortest is known, or `fixed`."""
    last = list(tried)[-1]
    within = [interval for interval, row in tried.items() if row["overhead"] <= bound]
    if fixed or last >= LONGEST:
        return None
    if not within:
        return min(LONGEST, max(last + 1, math.ceil(last * tried[last]["overhead"] / bound)))
    shorter = min(within) - 1
    return shorter if shorter >= 1 and shorter not in tried else None


def own_policy(bench: Bench, bound: float) -> Row:
    """Measure CheckFreq with the interval that it chooses and tunes; the row has the final one."""
    job = bench.job("checkfreq", "-own", every=None, bound=bound)
    plan = replace(bench.plan, warm_up=PROFILE_STEPS, steps=2 * bench.plan.steps)
    costs = measure({OWN_POLICY: job}, plan, bench.report)[OWN_POLICY]
    return {"name": OWN_POLICY, "interval": costs.about["every"], **costs.row(), "bound": bound, "tried": {}}


def _persisted(bench: Bench, row: Row) -> Row:
    """Measure the steps between states that LowDiff+ saves to disk while it follows every step."""
    with Worker(bench.job(PLUS, "-persisted")) as worker:
        worker.call("prepare")
        steps = worker.call("persisted", bench.plan.rounds * bench.plan.steps)
        worker.call("finish")
    between = [after - before for before, after in pairwise(steps)]
    return {**row, "name": f"{PLUS}, on disk", "interval": statistics.fmean(between) if between else None, "tried": {}}


def plan_for(plan: Plan, every: int) -> Plan:
    """Return a plan with blocks of whole intervals, so that each contains the right number of checkpoints."""
    return replace(plan, steps=math.ceil(max(plan.steps, every) / every) * every)


TIME_COLUMNS = (
    Column("<system", "name"), Column("s / iteration", "seconds", digits(4)), Column("without", "alone", digits(4)),
    Column("overhead", "overhead", percent), Column("quartiles", "overhead_low", percent),
    Column("", "overhead_high", percent), Column("stall", "stall", percent),
    Column("kB / step", "bytes_per_step", lambda value: f"{value / 1e3:.1f}"), Column("rounds", "rounds"),
)
INTERVAL_COLUMNS = (
    Column("<system", "name"), Column("interval", "interval", lambda value: f"{value:.3g}"),
    Column("overhead", "overhead", percent),
    Column("quartiles", "overhead_low", percent), Column("", "overhead_high", percent),
    Column("<tried", "tried", lambda shares: ", ".join(f"{k}: {100 * value:.1f} %" for k, value in shares.items())),
)
RATIO_COLUMNS = (
    Column("<compression", "name"), Column("kB / step", "bytes_per_step", lambda value: f"{value / 1e3:.1f}"),
    Column("overhead", "overhead", percent), Column("quartiles", "overhead_low", percent),
    Column("", "overhead_high", percent), Column("every step within bound", "within"),
)
TIME_NOTES = """\
Overhead: median over rounds of a block's time against the blocks of a process without checkpoints before and after it,
over the same before the system began; that of "none" is the noise. Stall: time of the training thread within the
system, against an iteration."""
