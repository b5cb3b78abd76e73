"""Experiments 3, 9 and 10 of LowDiff: jobs with failures, simulated from the constants that `constants` measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dsq_ckpt.lowdiff.tuning import Bounds, CostModel, Costs
from evaluation import simulation
from evaluation.lowdiff.checkfreq import BOUND
from evaluation.lowdiff.naive import FULL_EVERY
from evaluation.report import Column, Row, digits, percent
from evaluation.simulation import Disk, Failures, Memory, System, simulate

HOUR = 3600.0
BEST = ", best interval"
"""What the name of a system ends in whose interval was chosen for the failures at hand."""
OURS = ("LowDiff", "LowDiff+ (S)", "LowDiff+ (P)")
OPT_175B = 992 * 90 * 24 / 112
"""Hours between failures of one rank: 112 in 90 days of 992 GPUs, the training of OPT-175B (LowDiff, section I)."""
INTERVALS = (1, 2, 3, 4, 5, 7, 10, 14, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000, 2000, 5000)
"""Steps between checkpoints of which the best is taken, for systems that leave it to their user."""
PERSIST_HOURS = 3.0
"""Between Gemini's writes to disk, as in its paper."""
TRIED = 500
"""Failures of the trace that intervals are chosen on; it is not the one that is then measured."""


def compare(rows: Sequence[Row], cases: Iterable[Failures], count: int, restart: float) -> list[Row]:
    """Simulate every system under every kind of failures.

    Comparison systems are set as their papers and LowDiff's have them: CheckFreq by its own policy, Gemini and naive
    differences at every step; `torch.save` and DCP, which have no policy, as often as CheckFreq's bound allows. Those
    with an interval appear once more, `BEST`: with the one that wastes least in each case, found by simulation, which
    takes a knowledge of failures that their policies do not have. LowDiff's settings are those of its model.

    Args:
        rows: Constants.
        cases: Failures.
        count: How many of them.
        restart: Seconds from a failure until a process is there that can load; the same for all.
    """
    constants = {row["name"]: _restarted(_plausible(row), restart) for row in rows}
    return simulation.compare(lambda failures: _systems(constants, failures), cases, count)


def with_overheads(rows: Sequence[Row], measured: Iterable[Row]) -> list[Row]:
    """Return constants with the overheads that other runs measured, all blocks of a system together.

    Args:
        rows: Constants.
        measured: Rows of training times with a checkpoint in every step.
    """
    blocks: dict[str, list[float]] = {}
    for row in measured:
        own = 1 + row["before"]
        blocks.setdefault(row["name"], []).extend(seconds / alone / own - 1 for alone, seconds in row["blocks"])
    return [
        {**row, "overhead": max(statistics.median(blocks[row["name"]]) * row["iteration"], row["stalled"])}
        if row["name"] in blocks else row for row in rows
    ]


def below_all(rows: Sequence[Row], system: str, best: bool) -> dict[float, tuple[float, Row]]:
    """Return a system's waste and the least of a comparison system, by the job's mean time between failures.

    Args:
        rows: Of `compare`.
        ours: Name of the system.
        best: Whether those at their best intervals count, or those as their papers have them.
    """
    result: dict[float, tuple[float, Row]] = {}
    for case in sorted({row["job_mtbf"] for row in rows}):
        of_case = [row for row in rows if row["job_mtbf"] == case]
        own = [row["wasted"] for row in of_case if row["name"] == system]
        others = [row for row in of_case if row["name"] not in OURS and row["name"].endswith(BEST) == best]
        if own and others:
            result[case] = own[0], min(others, key=lambda row: float(row["wasted"]))
    return result


def _systems(constants: Mapping[str, Row], failures: Failures) -> Iterator[System]:
    for name in ("torch.save", "dcp.async_save", "checkfreq"):
        if name in constants:
            row = constants[name]
            yield _bounded(row) if name != "checkfreq" else _own_policy(row)
            yield _best(_saving(row), failures)
    if "naive" in constants:
        yield _naive(constants["naive"])(FULL_EVERY)
        yield _best(_naive(constants["naive"]), failures)
    if "gemini" in constants:
        yield _gemini(constants["gemini"])
    if "lowdiff" in constants:
        yield _lowdiff(constants["lowdiff"], failures)
    if "lowdiff+" in constants:
        yield from simulation.modes(_lowdiff_plus(constants["lowdiff+"]))


def _plausible(row: Row) -> Row:
    """Return costs without effects that only noise can have: fewer checkpoints do not make one more expensive."""
    new_row = dict(row)
    if "stall" in row:
        new_row["stall"] = min(row["stall"], row["overhead"])
    if "policy" in row:
        new_row["policy"] = {**row["policy"], "overhead": min(row["policy"]["overhead"], row["overhead"])}
    return new_row


def _restarted(row: Row, restart: float) -> Row:
    disk = {"disk_load": row["disk_load"] + restart} if "disk_load" in row else {}
    return {**row, "load": row["load"] + restart, **disk}


def _best(make: Callable[[int], System], failures: Failures) -> System:
    other = replace(failures, seed=failures.seed + 1)
    best_system = max((make(every) for every in INTERVALS), key=lambda system: simulate(system, other, TRIED).ratio)
    return replace(best_system, name=f"{best_system.name}{BEST}")


def _saving(row: Row) -> Callable[[int], System]:
    """Simulate full checkpoints every so many steps; training waits if they cannot be written fast enough."""
    def make(every: int) -> System:
        waits = max(0.0, row["lag"] - every * row["iteration"])
        stall = row["overhead"] if every == 1 else max(row["stall"], waits)
        return System(row["name"], row["iteration"], Disk(every, row["load"], stall=stall, lag=max(row["lag"], stall)))

    return make


def _bounded(row: Row) -> System:
    """Simulate checkpoints as frequent as CheckFreq's bound allows."""
    tried = map(_saving(row), itertools.count(1))
    return next(system for system in tried if system.disk.stall <= BOUND * system.disk.every * system.iteration)


def _own_policy(row: Row) -> System:
    every, overhead = row["policy"]["every"], row["policy"]["overhead"]
    stall = every * overhead
    return System("checkfreq", row["iteration"], Disk(every, row["load"], stall=stall, lag=max(row["lag"], stall)))


def _naive(row: Row) -> Callable[[int], System]:
    def make(every: int) -> System:
        full = simulation.naive(row["iteration"], every, row["lag"], row["load"], row["overhead"], row["replay"])
        return replace(full, name="naive")

    return make


def _gemini(row: Row) -> System:
    """Simulate a copy to the peer in every step, which survives a failure of this machine."""
    memory = Memory(1, row["load"], lag=row["lag"], software=1.0, hardware=1.0)
    every = max(1, round(PERSIST_HOURS * HOUR / row["iteration"]))
    system = simulation.gemini(row["iteration"], memory, row["overhead"], every, 0.0, row["disk_load"])
    return replace(system, name="gemini")


def _lowdiff(row: Row, failures: Failures) -> System:
    """Simulate LowDiff with the model's settings for the costs that the log measured; the overhead is measured here."""
    known = dict(row["tuner"] or {})
    known |= {
        "iteration": row["iteration"], "load": row["load"], "replay": max(row["replay"], 1e-9),
        "mtbf": failures.job_mtbf, "ranks": failures.ranks,
    }
    costs = Costs(**known)
    settings = CostModel(costs).best_settings(Bounds())
    system = simulation.lowdiff(costs, settings.snapshot_every, settings.batch, row["overhead"])
    return replace(system, name="LowDiff")


def _lowdiff_plus(row: Row) -> System:
    memory = Memory(1, row["load"], lag=row["iteration"], software=1.0, hardware=0.0)
    system = simulation.lowdiff_plus(row["iteration"], row["overhead"], memory, row["persist"], row["disk_load"])
    return replace(system, name="LowDiff+")


COLUMNS = (
    Column("<system", "name"), Column("ranks", "ranks"),
    Column("job MTBF, h", "job_mtbf", lambda value: f"{value / HOUR:.2f}"),
    Column("wasted", "wasted", percent), Column("lost", "lost", percent), Column("recovering", "recovering", percent),
    Column("overhead", "steady", percent), Column("effective", "ratio", digits(4)),
)
NOTES = """\
Shares of wall clock time: lost are iterations that were done again, recovering is loading and replaying, overhead is
paid at every step. Best interval: the one that wastes least at that mean time between failures (MTBF), which the
system's own policy does not know. LowDiff+ (S): failures leave its memory; (P): they do not."""
