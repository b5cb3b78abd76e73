"""One picture of all recorded runs that were compressed: how much smaller, and what it costs the loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WEIGHTS, STATE = "weights", "weights + moments"
REFINED = "dsq, with refinement"
OURS = "dsq"
COLOURS = {
    OURS: "C0", REFINED: "#7fb3e0", "inshrinkerator": "C3", "inshrinkerator_relaxed": "#f08080", "nncodec": "C2",
    "excp": "C1", "uniform": "C4", "adaptive": "C5", "kmeans": "C6", "lc": "C8", "topn": "C7", "scar": "C9",
    "exact": "black",
}
PUBLISHED = {
    "nncodec": "NNCodec", "excp": "ExCP", "uniform": "uniform (QD-Compressor)", "adaptive": "adaptive (Check-N-Run)",
    "kmeans": "kmeans (GOBO)", "lc": "lc (LC-Checkpoint)", "scar": "scar (SCAR)", "exact": "exact (without loss)",
}
MODELS = {
    "gpt": "o", "gpt-short": "^", "llama": "D", "resnet": "s", "bert": "v", "moe": "P", "lstm": "X", "vit": "*",
    "finetune": "<",
}


class Point(NamedTuple):
    """A system on a recorded run, within one bound.

    Attributes:
        part: What is counted, `WEIGHTS` or `STATE`.
        run: File, workload and seed; bounds of one run are joined.
        workload: Name of the workload.
        system: Name of the system.
        degradation: Mean relative rise of the held-out loss.
        ratio: Uncompressed bytes divided by compressed bytes.
    """

    part: str
    run: tuple[int, str]
    workload: str
    system: str
    degradation: float
    ratio: float


def points(documents: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Return what `offline` and `peers` measured on fp32 tensors; documents of other commands have nothing here."""
    result: list[Point] = []
    for number, document in enumerate(documents):
        for row in document["rows"]:
            if row.get("degradation_mean") is None:
                continue
            run = (number, row["run"])
            if document["measured"] == "offline":
                for part, key in ((WEIGHTS, "ratio_weights"), (STATE, "ratio_files")):
                    result.append(Point(part, run, row["workload"], row["system"], row["degradation_mean"], row[key]))
            elif row.get("sensitivity") is not None:  # another configuration of ours, which the tables have
                continue
            elif document["measured"] == "peers" and row["part"] in (WEIGHTS, STATE) and not row["lossless"]:
                system = REFINED if row["name"].startswith("dsq, refined") else row["peer"]
                result.append(Point(row["part"], run, row["workload"], system, row["degradation_mean"], row["ratio"]))
    return result


def draw(figure: Figure, all_points: Sequence[Point]) -> None:
    """Draw a panel of weights and one of the whole state, with one legend below."""
    from matplotlib.lines import Line2D

    axes = figure.subplots(1, 2, sharey=True)
    titles = ("weights", "weights and moments (published systems but ExCP keep moments bit for bit)")
    for axis, part, title in zip(axes, (WEIGHTS, STATE), titles, strict=True):
        _panel(axis, all_points, part, title)
    axes[0].set_ylabel("times smaller than fp32, whole run")
    colours, markers = _colours(all_points), _markers(all_points)
    handles = [Line2D([], [], marker="o", linestyle="", color=colour, label=PUBLISHED.get(name, name))
               for name, colour in colours.items()]
    handles += [Line2D([], [], marker=marker, linestyle="", color="black", fillstyle="none", label=f"on {name}")
                for name, marker in markers.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)


def _colours(all_points: Sequence[Point]) -> dict[str, str]:
    """Return the colour of each system that there is; those that are not known here come last."""
    return _styles([point.system for point in all_points], COLOURS, ("#b59a00", "#5a3fb5", "#3fb58c"))


def _markers(all_points: Sequence[Point]) -> dict[str, str]:
    """Return the marker of each workload that there is."""
    return _styles([point.workload for point in all_points], MODELS, (">", "p", "h", "8", "d"))


def _styles(names: Iterable[str], known: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    there = dict.fromkeys(names)
    others = zip((name for name in there if name not in known), itertools.cycle(more))
    return {name: style for name, style in known.items() if name in there} | dict(others)


def _panel(axis: Axes, all_points: Sequence[Point], part: str, title: str) -> None:
    """Draw each system's points; those of ours, with several bounds, joined within a run."""
    from matplotlib.ticker import FixedLocator

    markers = _markers(all_points)
    for name, colour in _colours(all_points).items():
        own = [point for point in all_points if point.system == name and point.part == part]
        for run in dict.fromkeys(point.run for point in own):
            curve = sorted((100 * point.degradation, point.ratio) for point in own if point.run == run)
            workload = next(point.workload for point in own if point.run == run)
            ours = name == OURS
            axis.plot(
                *zip(*curve, strict=True), color=colour, marker=markers[workload], markersize=5 if ours else 6,
                linewidth=0.9 if ours else 0, alpha=0.85, zorder=2 if ours else 3, markeredgecolor="white",
                markeredgewidth=0.4,
            )
    axis.axvline(5, color="grey", linewidth=0.8, linestyle="--")
    axis.annotate("usual bound of a\nsearch, 5 % per\ncheckpoint", (5, 0.985), xytext=(-3, 0), fontsize=7,
                  xycoords=("data", "axes fraction"), textcoords="offset points", color="dimgrey",
                  horizontalalignment="right", verticalalignment="top")
    axis.set(yscale="log", title=title, xlabel="mean rise of the held-out loss, % (to the right is worse)")
    axis.set_xscale("symlog", linthresh=5, linscale=2)
    axis.set_xlim(-4, 30)
    axis.xaxis.set_major_locator(FixedLocator([-3, -2, -1, 0, 1, 2, 3, 4, 5, 10, 20]))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_yticks([1, 2, 5, 10, 20, 50, 100, 200, 500])
