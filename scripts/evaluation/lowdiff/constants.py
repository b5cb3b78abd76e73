"""The constants of each system that the simulations need, all measured in one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evaluation.lowdiff.checkfreq import BOUND
from evaluation.lowdiff.process import Worker
from evaluation.lowdiff.recovery import FULL, IN_MEMORY, persisted_times, recovery_times
from evaluation.lowdiff.rounds import Costs, measure
from evaluation.lowdiff.systems import OURS, WITHOUT
from evaluation.lowdiff.training import NEVER, Bench, options_of, own_policy, plan_for
from evaluation.report import Column, Row, digits

SPARSE = 10
"""Steps between checkpoints that do not wait for each other: what one of them stalls training is measured there."""
NEAR, FAR = 2, 50
"""Steps since the full checkpoint at two recoveries: their difference tells what a step of replay takes."""


def constants(bench: Bench, systems: Sequence[str], repeats: int) -> list[Row]:
    """Measure a row of constants for each system, all in seconds.

    `iteration`: of a step without checkpoints; `overhead`: that a step takes longer with a checkpoint in each; `stall`:
    that one checkpoint costs training where there is one in every `SPARSE` steps (of systems with full ones); `lag`:
    from the end of a step until its checkpoint can be used; `load`: until training goes on from a full state; `replay`:
    of each step after it; `disk_load`: of a state on disk, where `load` is of one in memory. Of CheckFreq `policy` is
    the interval that it chose by itself, and its overhead per step; of LowDiff `tuner` is what it measured of itself;
    of LowDiff+ `persist` is the time to write a state.
    """
    rows: dict[str, Row] = {system: {"name": system} for system in systems if system != WITHOUT}
    every_step = {system: bench.job(system, "-1", **_logged(system)) for system in rows}
    for system, costs in measure(every_step, bench.plan, bench.report).items():
        rows[system] |= {
            "iteration": statistics.median(costs.alone), "overhead": _per_step(costs), "about": costs.about,
            "measured_overhead": statistics.median(costs.overhead), "stalled": statistics.median(costs.stalls),
        }
    sparse = {system: bench.job(system, "-sparse", every=SPARSE) for system in rows if system in FULL}
    for system, costs in measure(sparse, plan_for(bench.plan, SPARSE), bench.report).items() if sparse else ():
        rows[system]["stall"] = SPARSE * _per_step(costs)
    if "checkfreq" in rows:
        chosen = own_policy(bench, BOUND)
        rows["checkfreq"]["policy"] = {
            "every": chosen["interval"], "overhead": max(chosen["overhead"], chosen["stall"]) * chosen["alone"]
        }
    for system, row in rows.items():
        row |= _lag(bench, system, repeats)
    for row in recovery_times(bench, list(rows), (NEAR, FAR), repeats, again=False):
        rows[row["name"]].setdefault("recoveries", {})[row["interval"]] = row["cold"]
    for row in persisted_times(bench, [system for system in IN_MEMORY if system in rows], repeats):
        rows[row["name"].partition(",")[0]]["disk_load"] = row["cold"]
    for system, row in rows.items():
        near, far = row["recoveries"][NEAR], row["recoveries"][FAR]
        logged = system in ("naive", "lowdiff")
        row["replay"] = max(0.0, (far - near) / (FAR - NEAR)) if logged else 0.0
        row["load"] = max(0.0, near - NEAR * row["replay"])
    if "lowdiff" in rows:
        rows["lowdiff"]["tuner"] = tuner = _tuner(bench)
        if "lowdiff+" in rows:  # its states are written by the same engine
            rows["lowdiff+"]["persist"] = tuner["snapshot_bytes"] / tuner["bandwidth"]
    return list(rows.values())


def _per_step(costs: Costs) -> float:
    """Return the additional seconds of a step: as measured, which noise may hide, but no less than the training thread
    itself was in the system.
    """
    return max(statistics.median(costs.overhead) * statistics.median(costs.alone), statistics.median(costs.stalls))


def _logged(system: str) -> dict[str, Any]:
    """Return the options for a checkpoint in every step, besides full ones."""
    extra: dict[str, dict[str, Any]] = {"naive": {"full_every": NEVER}, "lowdiff": {"snapshot_every": NEVER}}
    return {**options_of(system), **extra.get(system, {})}


def _lag(bench: Bench, system: str, repeats: int) -> Row:
    """Return seconds until a checkpoint can be used, and bytes of a state."""
    options = {"naive": {"full_every": 1}} | {name: {} for name in OURS}
    job = replace(bench.job(system, "-lag"), options=options.get(system, {"every": 1}))
    with Worker(job) as worker:
        worker.call("prepare")
        worker.call("train", 0, bench.plan.lead)
        worker.call("wait")
        lags = [worker.call("lag") for _ in range(repeats)]
        size = worker.call("bytes")["state"]
        worker.call("finish")
    return {"lag": statistics.median(lags) if system not in OURS else None, "state_bytes": size}


def _tuner(bench: Bench) -> Row:
    """Return the state of LowDiff's tuner after a run: its snapshot_every and batch, and its measurements."""
    job = bench.job("lowdiff", "-tuner", snapshot_every=SPARSE)
    with Worker(job) as worker:
        worker.call("prepare")
        worker.call("train", 6 * SPARSE)
        worker.call("finish")
    with Worker(job) as worker:
        worker.call("recover")
        costs: Row = worker.call("costs")
    return costs


COLUMNS = (
    Column("<system", "name"), Column("iteration, s", "iteration", digits(4)),
    Column("overhead, ms", "overhead", lambda value: f"{1e3 * value:.2f}"),
    Column("stall, ms", "stall", lambda value: f"{1e3 * value:.1f}"),
    Column("lag, ms", "lag", lambda value: f"{1e3 * value:.1f}"),
    Column("load, ms", "load", lambda value: f"{1e3 * value:.1f}"),
    Column("replay, ms / step", "replay", lambda value: f"{1e3 * value:.2f}"),
)
NOTES = f"""\
Overhead: of a step, with a checkpoint in each; stall: of a checkpoint where there is one in every {SPARSE} steps; lag:
until it can be used; load: of a full state; replay: of each step after it."""
