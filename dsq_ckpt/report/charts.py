"""Charts as SVG paths: series over the checkpoints of a run, with the ticks of their axes.

A chart stretches with the page: paths are in a box of `WIDTH` x `HEIGHT` that the browser scales in both directions,
strokes keep their width, and texts lie beside the box at percentages of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dsq_ckpt.core import figures

WIDTH, HEIGHT = 1000, 300
Values = Sequence[float | None]
Unit = Literal["bytes", "seconds", "share", "bits", "count", "metric"]
_DOTTED = 60  # checkpoints up to which each point of a line has a dot
_ROOM = 1.15  # of a logarithmic axis beyond the outermost values
_LEAST = 1e-280  # size of a figure that is not zero; a manifest may have any
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class Series(NamedTuple):
    """A figure of each checkpoint, oldest first; None where a checkpoint has none.

    Attributes:
        name: for the legend.
        values: the figures.
        tone: letter of its colour in `style.css`.
        style: bars are stacked in the order of the series; dashes are for bounds.
    """

    name: str
    values: Values
    tone: str
    style: Literal["line", "dashed", "dots", "bar"] = "line"


class Tick(NamedTuple):
    """A label, at a share of the axis from its beginning."""

    at: float
    label: str


class Mark(NamedTuple):
    """A path of the picture, and the classes that `style.css` draws it by."""

    classes: str
    path: str


@dataclass
class Chart:
    """Series with one axis.

    Attributes:
        key: what the page's data call it.
        title: a heading.
        note: the meaning of the figures, in a sentence.
        unit: unit of all figures.
        series: one at least.
        log: whether the axis is logarithmic; zeros are left out then.
    """

    key: str
    title: str
    note: str
    unit: Unit
    series: list[Series]
    log: bool = False
    ticks: list[Tick] = field(init=False)
    marks: list[Mark] = field(init=False)

    def __post_init__(self) -> None:
        self.series = [one._replace(values=[_drawable(value) for value in one.values]) for one in self.series]
        bars = [series for series in self.series if series.style == "bar"]
        stacked = [sum(value or 0.0 for value in values) for values in zip(*(s.values for s in bars), strict=True)]
        shown = [value for series in self.series for value in series.values if value is not None] + stacked
        scale, self.ticks = _logarithmic(shown, self.unit) if self.log else _linear(shown, self.unit)
        self.marks = _bars(bars, scale)
        for series in self.series:
            if series.style != "bar":
                self.marks += _lines(series, scale)

    @property
    def legend(self) -> list[tuple[Series, str]]:
        """Each series, with its newest figure as text."""
        newest = [next((value for value in reversed(s.values) if value is not None), None) for s in self.series]
        return [
            (series, "" if value is None or self.unit == "count" else text(value, self.unit))
            for series, value in zip(self.series, newest, strict=True)
        ]


Scale = Callable[[float], float]
"""Gives the share of an axis at which a figure lies; above 1 or below 0 outside of it."""


def text(value: float, unit: Unit) -> str:
    """Format a figure with its unit."""
    if unit == "bytes":
        return figures.size(round(value))
    if unit == "seconds":
        return figures.seconds(value)
    if unit == "share":
        return figures.percent(value)
    return f"{value:.3g}" if unit in ("bits", "metric") else f"{value:g}"


def _drawable(value: float | None) -> float | None:
    """Return a figure that an axis can have: None for one that is as good as infinite, zero for one next to it."""
    if value is None or not abs(value) < 1 / _LEAST:
        return None
    return value if abs(value) > _LEAST else 0


def _x(place: float, count: int) -> float:
    return WIDTH * (place + 0.5) / count


def _lines(series: Series, scale: Scale) -> list[Mark]:
    count, path, dots, drawn = len(series.values), [], [], False
    for place, value in enumerate(series.values):
        at = None if value is None else scale(value)
        if at is None or not math.isfinite(at):
            drawn = False
            continue
        point = f"{_x(place, count):.1f} {HEIGHT * (1 - min(max(at, -0.02), 1.02)):.1f}"
        path.append(f"{'L' if drawn else 'M'}{point}")
        dots.append(f"M{point}h0")
        drawn = True
    marks = [] if series.style == "dots" else [Mark(f"{series.style} t-{series.tone}", "".join(path))]
    if series.style == "dots" or (series.style == "line" and count <= _DOTTED):
        marks.append(Mark(f"dots t-{series.tone}", "".join(dots)))
    return [mark for mark in marks if mark.path]


def _bars(bars: list[Series], scale: Scale) -> list[Mark]:
    if not bars:
        return []
    count = len(bars[0].values)
    width = WIDTH / count * (0.7 if count <= _DOTTED else 1.0)
    bottoms, marks = [0.0] * count, []
    for series in bars:
        path = []
        for place, value in enumerate(series.values):
            if not value or value < 0:
                continue
            low, high = scale(bottoms[place]), scale(bottoms[place] + value)
            bottoms[place] += value
            left, height = _x(place, count) - width / 2, HEIGHT * (high - low)
            path.append(f"M{left:.1f} {HEIGHT * (1 - low):.1f}h{width:.1f}v{-height:.1f}h{-width:.1f}z")
        marks.append(Mark(f"bar t-{series.tone}", "".join(path)))
    return [mark for mark in marks if mark.path]


def _linear(values: Sequence[float], unit: Unit) -> tuple[Scale, list[Tick]]:
    """Return an axis that begins at zero, or at the least value where that is negative or a metric."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = (min(finite), max(finite)) if unit == "metric" else (min(0.0, *finite), max(0.0, *finite))
    if high <= low:
        low, high = low - (abs(low) or 1.0) * (unit == "metric"), high + (abs(high) or 1.0)
    size = 1024.0 ** int(math.log(max(high, 1.0), 1024)) if unit == "bytes" else 1.0
    step = _round((high - low) / size / 4) * size
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    low, high = first * step, last * step
    ticks = [Tick((n * step - low) / (high - low), _tick(n * step, unit)) for n in range(first, last + 1)]
    return lambda value: (value - low) / (high - low), ticks


def _logarithmic(values: Sequence[float], unit: Unit) -> tuple[Scale, list[Tick]]:
    positive = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    base, steps = (2.0, (1, 2, 5, 10, 20)) if unit == "bytes" else (10.0, (1, 2, 5, 10, 20, 50))
    low, high = (math.log(value, base) for value in (min(positive) / _ROOM, max(positive) * _ROOM))
    step = next((step for step in steps if (high - low) / step <= 5), math.ceil((high - low) / 5))
    ticks = [
        Tick((n * step - low) / (high - low), _tick(base ** (n * step), unit))
        for n in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]
    return lambda value: (math.log(value, base) - low) / (high - low) if value > 0 else math.nan, ticks


def _round(rough: float) -> float:
    """Return the least of 1, 2 and 5 times a power of ten that is not below a number."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _tick(value: float, unit: Unit) -> str:
    if unit == "bytes":
        place = 0 if value < 1 else min(int(math.log2(value) / 10 + 1e-9), len(_UNITS) - 1)
        return f"{value / 1024 ** place:.4g} {_UNITS[place]}"
    if unit == "share":
        return f"{100 * value:.4g} %"
    return f"{value:.4g}{' s' if unit == 'seconds' else ''}"
