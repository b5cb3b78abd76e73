"""What is drawn of each experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from evaluation.lowdiff import targets
from evaluation.lowdiff.wasted import BEST, HOUR
from evaluation.report import Panel, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _bars(
    axis: Axes, rows: Sequence[Row], key: str, label: str, scale: float = 1.0, spread: tuple[str, str] | None = None,
    log: bool = False,
) -> None:
    """Draw a bar for each row that has a value, with quartiles if there are any."""
    shown = [row for row in rows if row.get(key) is not None]
    values = [scale * row[key] for row in shown]
    errors = None
    if spread is not None:
        low, high = spread
        errors = [
            [max(0.0, value - scale * row[low]) for value, row in zip(values, shown, strict=True)],
            [max(0.0, scale * row[high] - value) for value, row in zip(values, shown, strict=True)],
        ]
    axis.barh(range(len(shown)), values, xerr=errors, capsize=2)
    axis.set_yticks(range(len(shown)), [row["name"] for row in shown], fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel=label, xscale="log" if log else "linear")


def _lines(axis: Axes, rows: Sequence[Row], x: str, y: str, x_scale: float = 1.0, y_scale: float = 1.0) -> None:
    """Draw a line for each name; those of one system have one colour."""
    systems = list(dict.fromkeys(row["name"].removesuffix(BEST) for row in rows))
    colours = {system: f"C{number}" for number, system in enumerate(systems)}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = sorted((row for row in rows if row["name"] == name), key=lambda row: float(row[x]))
        axis.plot([x_scale * row[x] for row in own], [y_scale * row[y] for row in own], marker=".", label=name,
                  linestyle="--" if name.endswith(BEST) else "-", color=colours[name.removesuffix(BEST)])
    axis.legend(fontsize=7)


QUARTILES = ("overhead_low", "overhead_high")


def _training(rows: Sequence[Row]) -> list[Panel]:
    return [
        lambda axis: _bars(axis, rows, "seconds", "seconds per iteration, median", 1.0, ("seconds_min", "seconds_max")),
        lambda axis: _bars(axis, rows, "overhead", "over training without checkpoints, %", 100, QUARTILES),
    ]


def _frequency(rows: Sequence[Row]) -> list[Panel]:
    return [lambda axis: _bars(axis, rows, "interval", f"steps between checkpoints, within {rows[0]['bound']:.1%}")]


def _recovery(rows: Sequence[Row]) -> list[Panel]:
    def draw(axis: Axes, key: str, title: str) -> None:
        _lines(axis, [row for row in rows if "," not in row["name"]], "interval", key)
        axis.set(xlabel="steps since the full checkpoint", ylabel="seconds", yscale="log", title=title)

    return [
        partial(draw, key="total", title="back where the failure was"),
        partial(draw, key="cold", title="recovery alone"),
    ]


def _writes(rows: Sequence[Row]) -> list[Panel]:
    return [
        lambda axis: _bars(axis, rows, "write", "ms to write a step", 1e3, ("write_min", "write_max")),
        lambda axis: _bars(axis, rows, "overhead", "over training without checkpoints, %", 100, QUARTILES),
    ]


def _storage(rows: Sequence[Row]) -> list[Panel]:
    named = [{**row, "name": f"{row['name']}: {row['what']}"} for row in rows]
    return [lambda axis: _bars(axis, named, "share", "% of weights and moments", 100, log=True)]


def _ratios(rows: Sequence[Row]) -> list[Panel]:
    def draw(axis: Axes, key: str, scale: float, label: str) -> None:
        own = sorted(rows, key=lambda row: float(row["ratio"]))
        axis.plot([row["ratio"] for row in own], [scale * row[key] for row in own], marker=".")
        axis.set(xscale="log", xlabel="share of the gradient that is kept", ylabel=label)

    return [
        partial(draw, key="bytes_per_step", scale=1e-3, label="kB per step"),
        partial(draw, key="overhead", scale=100, label="over training without checkpoints, %"),
    ]


def _constants(rows: Sequence[Row]) -> list[Panel]:
    return [
        lambda axis: _bars(axis, rows, "overhead", "ms that a step takes longer", 1e3),
        lambda axis: _bars(axis, rows, "load", "ms to load a full state", 1e3),
    ]


def _contention(rows: Sequence[Row]) -> list[Panel]:
    spread = ("contention_low", "contention_high")
    return [lambda axis: _bars(axis, rows, "contention", "% of the work's time that training loses", 100, spread)]


def _wasted(rows: Sequence[Row]) -> list[Panel]:
    def draw(axis: Axes) -> None:
        _lines(axis, rows, "job_mtbf", "wasted", 1 / HOUR, 100)
        axis.set(xscale="log", yscale="log", xlabel="hours between failures", ylabel="wasted, % of wall clock")

    return [draw]


def _effective(rows: Sequence[Row], x: str, scale: float, label: str) -> list[Panel]:
    def draw(axis: Axes) -> None:
        _lines(axis, rows, x, "ratio", scale)
        axis.set(xscale="log", xlabel=label, ylabel="effective training time ratio")

    return [draw]


PANELS: dict[str, Callable[[Sequence[Row]], list[Panel]]] = {
    targets.TIME: _training, targets.PLAIN: _training, targets.FREQUENCY: _frequency, targets.RECOVERY: _recovery,
    targets.WRITES: _writes, targets.STORAGE: _storage, targets.RATIOS: _ratios, targets.CONSTANTS: _constants,
    targets.WASTED: _wasted, targets.CONTENTION: _contention,
    targets.FAILURES: partial(_effective, x="job_mtbf", scale=1 / HOUR, label="hours between failures"),
    targets.RANKS: partial(_effective, x="ranks", scale=1.0, label="ranks"),
}
"""By what was measured: from a document's rows to what is drawn of it."""
