"""What the commands of the evaluation leave behind: tables for people, a JSON file each, and plots made from those."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import typer
from rich.table import Table

import dsq_ckpt
from dsq_ckpt.cli import json_files, output
from dsq_ckpt.cli.machine import processor
from evaluation import along, overview

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]


class Column(NamedTuple):
    """A column of a table: its head, the key of a row that it shows, and how."""

    head: str
    key: str
    show: Callable[[Any], str] = str


def ratio(value: float) -> str:
    """Format a ratio with three digits: 56.8x."""
    return f"{value:.0f}x" if value >= 99.95 else f"{value:.1f}x" if value >= 9.995 else f"{value:.2f}x"


def percent(value: float) -> str:
    """Format a fraction as 1.23 %."""
    return f"{100 * value:.2f} %"


def digits(places: int) -> Callable[[Any], str]:
    """Show numbers with so many decimal places."""
    return lambda value: f"{value:.{places}f}"


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> Table:
    """Format rows as a table; a value that is missing or None is a dash."""
    rich_table = output.table(*(column.head for column in columns))
    for row in rows:
        values = [row.get(column.key) for column in columns]
        cells = ["-" if v is None else column.show(v) for v, column in zip(values, columns, strict=True)]
        rich_table.add_row(*cells)
    return rich_table


def show(title: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], legend: str = "") -> None:
    """Print a table under its title; in a file or a pipe it is as wide as it needs to be."""
    screen = output.console()
    screen.print(f"\n{title}")
    screen.print(table(columns, rows))
    if legend:
        screen.print(legend)


def document(measured: str, settings: Mapping[str, Any], rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    """Return the results of a command, with all that is needed to repeat it."""
    content = {
        "measured": measured, "command": command_line(), "settings": dict(settings), "rows": list(rows), **more,
        "machine": machine(), "torch": torch.__version__, "python": platform.python_version(),
        "dsq_ckpt": dsq_ckpt.__version__, "date": time.strftime("%Y-%m-%d"),
    }
    plain: dict[str, Any] = json_files.replace_nonfinite(content)
    return plain


def command_line() -> str:
    """Return the command line of this program; of files outside the repository only the names."""
    arguments = [Path(part).name if Path(part).is_absolute() else part for part in sys.argv[1:]]
    return " ".join(["python", f"scripts/{Path(sys.argv[0]).name}", *arguments])


def machine() -> dict[str, Any]:
    """Return the processor, its cores, the system and the threads of torch."""
    return {
        "processor": processor(), "cores": os.cpu_count(), "system": platform.system(),
        "torch_threads": torch.get_num_threads(),
    }


class PlotError(typer.BadParameter):
    """A document cannot be plotted; the message says why, also where a command ends with it."""


def plot(source: Path, target: Path) -> None:
    """Draw what a command wrote.

    Args:
        source: a JSON file with a `document`.
        target: a PNG file.

    Raises:
        PlotError: matplotlib is not there, or nothing knows how to draw this.
    """
    content = json.loads(source.read_text())
    panels = _panels(content, source)
    with _figure((6.5 * min(len(panels), 2), 4.6 * math.ceil(len(panels) / 2)), target) as figure:
        axes = list(figure.subplots(math.ceil(len(panels) / 2), min(len(panels), 2), squeeze=False).flat)
        for axis, panel in zip(axes, panels, strict=False):
            panel(axis)
        for axis in axes[len(panels):]:
            axis.remove()
        figure.suptitle(f"{_heading(content)}\n{content['machine']['processor']}, {content['date']}", fontsize=8)


def plot_side_by_side(sources: Sequence[Path], target: Path) -> None:
    """Draw the first panel of each file, side by side.

    Args:
        sources: JSON files with a `document` each.
        target: a PNG file.

    Raises:
        PlotError: matplotlib is not there, or nothing knows how to draw one of them.
    """
    panels = [_panels(json.loads(source.read_text()), source)[0] for source in sources]
    with _figure((6.5 * len(panels), 4.4), target) as figure:
        for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
            panel(axis)


def plot_each(sources: Iterable[Path], directory: Path | None) -> Iterator[Path]:
    """Draw JSON files as `plot` does, each to a PNG file in a directory or beside it; yield the path of each."""
    for source in sources:
        target = (directory or source.parent) / f"{source.stem}.png"
        plot(source, target)
        yield target


def plot_together(sources: Sequence[Path], target: Path) -> None:
    """Draw size against degradation of all systems on all recorded runs, from what `offline` and `peers` wrote.

    Args:
        sources: JSON files.
        target: a PNG file.

    Raises:
        PlotError: matplotlib is not there, or none of the files holds such figures.
    """
    points = overview.points(json.loads(source.read_text()) for source in sources)
    if not points:
        raise PlotError("none of these files holds results of offline or peers")
    with _figure((13.0, 6.2), target) as figure:
        overview.draw(figure, points)


def _panels(content: Any, source: Path) -> list[Panel]:
    measured = content.get("measured") if isinstance(content, dict) else None
    panels = PANELS[measured](content["rows"]) if measured in PANELS else []
    if not panels:
        raise PlotError(f"{source} holds nothing that can be drawn (measured: {measured!r})")
    return panels


@contextmanager
def _figure(size: tuple[float, float], target: Path) -> Iterator[Figure]:
    """Yield a figure to draw on, and write it.

    Raises:
        PlotError: matplotlib is not there.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("plots need matplotlib: pip install matplotlib") from error
    with matplotlib.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)


def _heading(content: Mapping[str, Any]) -> str:
    named = (f"{key} {value}" for key, value in content["settings"].items() if isinstance(value, str | int | float))
    return f"{content['measured']}: {', '.join(named)}"


Panel = Callable[["Axes"], None]
RESTART_EVERY = 5
"""Steps between evaluations after a restart."""
_COLOURS = 10  # of matplotlib, before they come again


def _offline(rows: Sequence[Row]) -> list[Panel]:
    usable = [row for row in rows if row.get("checkpoints")]
    return [
        lambda axis: _ratios(axis, usable, "ratio of weights"),
        lambda axis: _trade(axis, usable),
    ] if usable else []


def _online(rows: Sequence[Row]) -> list[Panel]:
    """Plot, for each run, final loss against the ratio of weights, and of everything, that stays on disk.

    One run alone, of systems at one bound each, is drawn along its steps.
    """
    if len({(row["workload"], row["seed"]) for row in rows}) == 1 and (panels := along.panels(rows)):
        return panels
    runs: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["loss"] is not None and "ratio_state_kept" in row:  # else the run diverged, or is the noise floor
            runs.setdefault((row["workload"], row["seed"]), []).append(row)
    return [
        partial(_final, rows=own, key=key, title=f"{workload}, seed {seed}: {what}")
        for (workload, seed), own in runs.items()
        for key, what in (("ratio_weights_kept", "weights"), ("ratio_state_kept", "everything"))
        if any(row[key] is not None for row in own)
    ]


def _ablations(rows: Sequence[Row]) -> list[Panel]:
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    panels: list[Panel] = []
    if "coders" in parts:
        panels.append(lambda axis: _ratios(axis, parts["coders"], "same codes, other coders"))
    if "components" in parts:
        panels.append(lambda axis: _trade(axis, parts["components"]))
    if "bins" in parts:
        panels.append(lambda axis: _bins(axis, parts["bins"]))
    if "timings" in parts:
        panels.append(lambda axis: _timings(axis, parts["timings"]))
    return panels


def _resume(rows: Sequence[Row]) -> list[Panel]:
    """Plot the losses of one restart; then, for each workload, the steps by which restarted runs are behind."""
    restarts = [row for part in rows for row in part["rows"]]
    workloads = list(dict.fromkeys(row["workload"] for row in restarts))
    return [partial(_restart, rows=restarts), *(
        partial(_behind, rows=[row for row in restarts if row["workload"] == workload], title=workload)
        for workload in workloads
    )] if restarts else []


def _restart(axis: Axes, rows: Sequence[Row]) -> None:
    """Plot held-out losses after the first restart there is."""
    first = [row for row in rows if all(row[key] == rows[0][key] for key in ("workload", "seed", "step"))]
    steps = _steps(first[0])
    axis.plot(steps, first[0]["exact_losses"], color="black", linewidth=2.5, label="without a restart")
    for row in first:
        if row["system"] != "floor":
            axis.plot(steps, row["losses"], label=f"restarted from a checkpoint, {row['system']}", linestyle="--",
                      marker=".")
    axis.set(xlabel="steps after the restart", ylabel="held-out loss",
             title="A restart at step {step} ({workload}, seed {seed})".format(**first[0]))
    axis.legend(fontsize=7)


def _behind(axis: Axes, rows: Sequence[Row], title: str) -> None:
    """Plot the steps that restarted runs are behind, by system: the mean of all restarts, and each of them faintly."""
    for number, system in enumerate(dict.fromkeys(row["system"] for row in rows)):
        curves = [
            [(own - exact) / row["slope"] for own, exact in zip(row["losses"], row["exact_losses"], strict=True)]
            for row in rows if row["system"] == system and row["slope"] > 0
        ]
        for curve in curves:
            axis.plot(_steps(rows[0]), curve, color=f"C{number}", linewidth=0.6, alpha=0.3)
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        axis.plot(_steps(rows[0])[: len(mean)], mean, color=f"C{number}", label=system)
    axis.set(xlabel="steps after the restart", ylabel="steps behind the run without it", title=title)
    axis.legend(fontsize=7)


def _steps(row: Row) -> list[int]:
    return [RESTART_EVERY * number for number in range(len(row["losses"]))]


def _growth(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw the size of all checkpoints of a run so far, each curve with its name and its last value."""
    steps = [row["step"] for row in rows]
    for key, label, colour in (
        ("plain", "plain checkpoints", "dimgrey"), ("written", "dsq_ckpt, written", "C0"),
        ("kept", "dsq_ckpt, kept on disk", "C2"),
    ):
        sizes = [row[key] / 1e6 for row in rows]
        axis.plot(steps, sizes, color=colour, linewidth=2)
        less = "" if key == "plain" else f"\n{ratio(rows[-1]['plain'] / rows[-1][key])} smaller"
        axis.annotate(f"{label}\n{sizes[-1]:,.0f} MB{less}", (steps[-1], sizes[-1]), xytext=(6, 0), color=colour,
                      textcoords="offset points", verticalalignment="center", annotation_clip=False)
    axis.set(yscale="log", xlabel="training step", ylabel="MB", xlim=(0, 1.32 * steps[-1]),
             title=f"All checkpoints of a run so far ({len(rows)} in the end)")
    axis.set_xticks([step for step in axis.get_xticks() if 0 <= step <= steps[-1]])
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.spines[["top", "right"]].set_visible(False)


def _ratios(axis: Axes, rows: Sequence[Row], title: str) -> None:
    """Plot the ratio of every checkpoint along the run."""
    for number, row in enumerate(rows):
        points = [point for point in row["checkpoints"] if point["ratio_weights"] is not None]
        axis.plot(
            [point["step"] for point in points], [point["ratio_weights"] for point in points], marker=".",
            label=row["name"], linestyle="-" if number < _COLOURS else "--",
        )
    axis.set(yscale="log", xlabel="step", ylabel="times smaller", title=title)
    axis.legend(fontsize=7)


def _trade(axis: Axes, rows: Sequence[Row]) -> None:
    """Plot the ratio of the run against what its base layers cost on average."""
    for row in rows:
        axis.scatter([100 * row["degradation_mean"]], [row["ratio_weights"]], s=18)
        axis.annotate(
            row["name"], (100 * row["degradation_mean"], row["ratio_weights"]), fontsize=6, xytext=(3, 3),
            textcoords="offset points",
        )
    axis.set(
        yscale="log", xlabel="mean degradation of base layers, %", ylabel="times smaller, whole run",
        title="weights: size and degradation",
    )
    axis.margins(x=0.25, y=0.08)  # room for the names


def _final(axis: Axes, rows: Sequence[Row], key: str, title: str) -> None:
    """Plot the loss at the end of runs that failed, by system; bounds of one system are joined, the loosest first."""
    from matplotlib.ticker import MaxNLocator

    systems: dict[str, list[Row]] = {}
    for row in rows:
        if row[key] is not None:  # else no weights were quantized
            systems.setdefault(row["name"], []).append(row)
    for number, (name, own) in enumerate(systems.items()):
        axis.plot(
            [row[key] for row in own], [row["loss"] for row in own], marker="o" if number < _COLOURS else "s",
            linestyle=":", label=name,
        )
        for row in own:
            axis.annotate(
                row["bound"], (row[key], row["loss"]), fontsize=6, xytext=(3, 3), textcoords="offset points",
            )
    without = rows[0]["reference_loss"]
    axis.axhline(without, color="black", linewidth=0.8, label="no failures")
    axis.axhline(1.01 * without, color="black", linewidth=0.8, linestyle="--", label="1 % above")
    axis.set(xscale="log", xlabel="times smaller, kept on disk", ylabel="final loss", title=title)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.margins(x=0.2, y=0.1)  # room for the bounds
    axis.legend(fontsize=7)


def _bins(axis: Axes, rows: Sequence[Row]) -> None:
    """Plot the levels that each system needs, by bound."""
    systems = list(dict.fromkeys(row["name"] for row in rows))
    bounds = list(dict.fromkeys(row["bound"] for row in rows))
    for place, bound in enumerate(bounds):
        heights = [
            next((row["levels"] for row in rows if (row["name"], row["bound"]) == (system, bound)), None) or math.nan
            for system in systems
        ]
        offsets = [number + (place - (len(bounds) - 1) / 2) * 0.25 for number in range(len(systems))]
        axis.bar(offsets, heights, width=0.23, label=f"{100 * bound:g} %")
    axis.set_xticks(range(len(systems)), systems)
    axis.set(ylabel="levels, mean", title="levels needed, without deltas")
    axis.legend(title="degradation", fontsize=7)


def _timings(axis: Axes, rows: Sequence[Row]) -> None:
    """Plot the seconds of each way to do the same."""
    names = [row["name"] for row in rows]
    axis.barh(range(len(rows)), [row["seconds"] for row in rows])
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    axis.set(xscale="log", xlabel="seconds, median", title="thresholds and clustering")
    axis.invert_yaxis()


PANELS: dict[str, Callable[[Sequence[Row]], list[Panel]]] = {
    "offline": _offline, "ablations": _ablations, "online": _online, "resume": _resume,
    "growth": lambda rows: [partial(_growth, rows=rows)] if rows else [],
}
"""By what was measured: from a document's rows to what is drawn of it."""
