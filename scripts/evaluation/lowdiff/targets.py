"""What LowDiff and LowDiff+ have to reach, read off the rows that experiments gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from evaluation.lowdiff.wasted import BEST, HOUR, OURS, below_all
from evaluation.report import Row, percent, ratio

TIME, PLAIN, FREQUENCY, RECOVERY, WRITES, STORAGE, RATIOS, CONSTANTS, WASTED, FAILURES, RANKS, CONTENTION = NAMES = (
    "lowdiff-time", "lowdiff-plain", "lowdiff-frequency", "lowdiff-recovery", "lowdiff-writes", "lowdiff-storage",
    "lowdiff-ratios", "lowdiff-constants", "lowdiff-wasted", "lowdiff-failures", "lowdiff-ranks", "lowdiff-contention",
)
"""What the documents of the experiments say they measured."""
TIMES = (TIME, PLAIN)
"""Those of training times."""

OVERHEAD, OVERHEAD_PLUS = 0.03, 0.08
"""Largest overhead over training without checkpoints, of LowDiff and LowDiff+ at every step."""
SHARE, COMPRESSOR = 0.025, "topk:0.01"
"""Largest share of weights and moments that a logged step takes, and the compression that this is for."""
REPLAYED, REPLAY_SPEEDUP = 50, 3.0
"""Steps whose recovery has to be so many times faster than training them again."""
LOAD_SPEEDUP = 5.0
"""So many times faster has a recovery from LowDiff+'s memory to be than a load of a checkpoint from disk."""


class Target(NamedTuple):
    """A target in words, with the figure that was found, and whether it was met."""

    text: str
    met: bool


def targets(measured: str, rows: Sequence[Row]) -> list[Target]:
    """Return the targets of an experiment.

    Args:
        measured: Which experiment, one of `NAMES`.
        rows: Its rows.
    """
    return list(_READERS[measured](rows)) if measured in _READERS else []


def _overhead(name: str, limit: float) -> Callable[[Sequence[Row]], Iterator[Target]]:
    def read(rows: Sequence[Row]) -> Iterator[Target]:
        for row in rows:
            if row["name"] == name:
                overhead = row["overhead"]
                yield Target(
                    f"{name}, every step: {percent(overhead)} over training without checkpoints, at most {limit:.0%}",
                    overhead <= limit,
                )

    return read


def _storage(rows: Sequence[Row]) -> Iterator[Target]:
    for row in rows:
        if row["name"] == "lowdiff" and row["what"] == f"step, {COMPRESSOR}":
            yield Target(
                f"a logged step with {COMPRESSOR}: {percent(row['share'])} of weights and moments, at most {SHARE:.1%}",
                row["share"] <= SHARE,
            )


def _recovery(rows: Sequence[Row]) -> Iterator[Target]:
    loads = {row["name"]: row["cold"] for row in rows if row["name"] in ("torch.save", "lowdiff+, from disk")}
    for row in rows:
        if row["name"] == "lowdiff" and row["interval"] == REPLAYED:
            yield Target(
                f"recovery of {REPLAYED} logged steps: {ratio(row['speedup'])} as fast as training them again, "
                f"at least {REPLAY_SPEEDUP:g}x", row["speedup"] >= REPLAY_SPEEDUP,
            )
            yield Target(f"that recovery is exact: {bool(row['exact'])}", bool(row["exact"]))
    memory = [row["warm"] for row in rows if row["name"] == "lowdiff+"]
    for name, load in loads.items() if memory else ():
        speedup = load / max(memory)  # the slowest from memory
        yield Target(
            f"LowDiff+ from memory: {ratio(speedup)} as fast as loading from disk ({name}), at least {LOAD_SPEEDUP:g}x",
            speedup >= LOAD_SPEEDUP,
        )


def _wasted(rows: Sequence[Row]) -> Iterator[Target]:
    for best, settings in ((False, "as their papers set them"), (True, "at their best intervals")):
        for system in OURS:
            for mtbf, (own, other) in below_all(rows, system, best).items():
                yield Target(
                    f"{system} at {mtbf / HOUR:g} h between failures: {percent(own)} wasted, below all comparison "
                    f"systems {settings} ({other['name'].removesuffix(BEST)}: {percent(other['wasted'])})",
                    own < other["wasted"],
                )


_READERS: dict[str, Callable[[Sequence[Row]], Iterator[Target]]] = {
    TIME: _overhead("lowdiff", OVERHEAD), PLAIN: _overhead("lowdiff+", OVERHEAD_PLUS), STORAGE: _storage,
    RECOVERY: _recovery, WASTED: _wasted,
}
