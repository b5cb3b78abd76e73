"""Pictures along a run that failed: its loss, what its restores changed, and the size of what it saved."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from evaluation.workloads import NOISE_FLOOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
FP32 = 32


def panels(rows: Sequence[Row]) -> list[Callable[[Axes], None]]:
    """Return the panels of one run, or none where something else says more.

    Losses along the run are drawn where they were measured, and no system was tried at several bounds: bounds are
    compared by the loss at the end.
    """
    known = [row for row in rows if row.get("reference_losses")]
    if not known or len({(row["name"], row["failures"]) for row in rows}) < len(rows):
        return []
    names = Counter(row["name"] for row in known)
    known = [
        {**row, "label": f"{row['name']}, {row['failures']} restores" if names[row["name"]] > 1 else row["name"]}
        for row in known
    ]
    drawings: list[Callable[[Axes], None]] = [partial(_losses, rows=known), partial(_differences, rows=known)]
    if save_rows := [row for row in known if "ratio_written" in row]:
        drawings += [partial(_sizes, rows=save_rows), partial(_bytes, rows=save_rows)]
    return drawings


def _reference(row: Row) -> dict[int, float]:
    """Return the losses of the run without failures, by step."""
    losses = row["reference_losses"]
    return {losses["every"] * (place + 1): loss for place, loss in enumerate(losses["values"])}


def _colour(row: Row, number: int) -> str:
    return ("0.6", "0.35", "0.75")[number % 3] if row["name"] == NOISE_FLOOR else f"C{number}"


def _losses(axis: Axes, rows: Sequence[Row]) -> None:
    reference = _reference(rows[0])
    axis.plot([*reference], [*reference.values()], color="black", linewidth=2, label="no failures")
    for number, row in enumerate(rows):
        steps, losses = zip(*((save["step"], save["loss"]) for save in row["checkpoints"]), strict=True)
        axis.plot(steps, losses, color=_colour(row, number), linewidth=0.9, label=row["label"])
        if row["name"] != NOISE_FLOOR:
            axis.plot(
                [restore["step"] for restore in row["restores"]], [restore["after"] for restore in row["restores"]],
                linestyle="", marker="v", markersize=5, color=_colour(row, number), label=f"{row['label']}, restored",
            )
    axis.set(xlabel="step", ylabel="held-out loss", title="{workload}, seed {seed}: loss".format(**rows[0]))
    axis.legend(fontsize=7)


def _differences(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw the difference to the run without failures at the steps at which both were evaluated, and its means."""
    reference = _reference(rows[0])
    limits = [0, *(restore["step"] for restore in rows[0]["restores"]), rows[0]["checkpoints"][-1]["step"]]
    for number, row in enumerate(rows):
        points = [(save["step"], 100 * (save["loss"] / reference[save["step"]] - 1))
                  for save in row["checkpoints"] if save["step"] in reference and save["loss"] is not None]
        if not points:
            continue
        colour = _colour(row, number)
        axis.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, alpha=0.4, label=row["label"])
        means = [
            ((first + last) / 2, statistics.fmean(own)) for first, last in pairwise(limits)
            if (own := [value for step, value in points if first < step <= last])
        ]
        axis.plot(*zip(*means, strict=True), color=colour, marker="o", markersize=3,
                  label=f"{row['label']}, mean from restore to restore")
    for step in limits[1:-1]:
        axis.axvline(step, color="black", linewidth=0.5, alpha=0.25)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(xlabel="step (vertical lines: restores)", ylabel="loss above that without failures, %",
             title="difference to the run without failures")
    axis.legend(fontsize=7)


def _sizes(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw the bits of each checkpoint per element: of weights in its base layer, and of all that was written."""
    for number, row in enumerate(rows):
        saves = row["checkpoints"]
        for keyframe, marker in ((False, "."), (True, "s")):
            own = [save for save in saves if save["keyframe"] == keyframe]
            label = f"{row['label']}, {'keyframes' if keyframe else 'deltas'}"
            axis.plot([save["step"] for save in own], [FP32 / save["ratio_written"] for save in own], marker,
                      color=f"C{number}", markersize=4, alpha=0.4, label=f"{label}: all that was written")
            weights = [(save["step"], FP32 / save["ratio_weights"]) for save in own if save["ratio_weights"]]
            axis.plot(*zip(*weights, strict=True), marker, color=f"C{number}", markersize=4,
                      label=f"{label}: weights, base layer")
    axis.set(yscale="log", xlabel="step", ylabel="bits per element (fp32: 32)", title="size of each checkpoint")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(fontsize=7)


def _bytes(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw the bytes of all checkpoints so far, written; the last point is what is kept in the end."""
    first = rows[0]
    plain = first["bytes"]["logical"] / len(first["checkpoints"]) / 1e6
    steps = [save["step"] for save in first["checkpoints"]]
    axis.plot(steps, [plain * (place + 1) for place in range(len(steps))], color="dimgrey", label="plain checkpoints")
    for number, row in enumerate(rows):
        total, sums = 0.0, []
        for save in row["checkpoints"]:
            total += plain / save["ratio_written"]
            sums.append(total)
        axis.plot([save["step"] for save in row["checkpoints"]], sums, color=f"C{number}",
                  label=f"{row['label']}, written")
        axis.plot([row["checkpoints"][-1]["step"]], [row["bytes"]["kept"] / 1e6], "o", color=f"C{number}",
                  label=f"{row['label']}, kept in the end")
    axis.set(yscale="log", xlabel="step", ylabel="MB", title="all checkpoints so far")
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.legend(fontsize=7)
