"""Charts as SVG paths: series over the checkpoints of a run, with the ticks of their axes.

A chart stretches with the page. The browser scales paths from a box of `WIDTH` x `HEIGHT` in both directions, and keeps
the width of strokes. Labels are outside of the box, positioned in percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dsq_ckpt.core import figures

WIDTH, HEIGHT = 1000, 300
SeriesValues = Sequence[float | None]
Unit = Literal["bytes", "seconds", "share", "bits", "count", "metric"]
_MAX_DOTS = 60  # largest number of checkpoints for which lines have dots
_MARGIN = 1.15  # factor between the largest value and the end of a logarithmic axis
_MIN_MAGNITUDE = 1e-280  # smaller magnitudes count as zero, since a manifest may have any number
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class Series(NamedTuple):
    """A value of each checkpoint, oldest first; None for a checkpoint without a value.

    Attributes:
        name: name in the legend.
        values: values.
        tone: letter of the colour in `style.css`.
        style: style; bars are stacked in the order of the series, and dashed lines are bounds.
    """

    name: str
    values: SeriesValues
    tone: str
    style: Literal["line", "dashed", "dots", "bar"] = "line"


class Tick(NamedTuple):
    """A label of an axis, and its position from 0 to 1."""

    at: float
    label: str


class Mark(NamedTuple):
    """An SVG path, and its classes in `style.css`."""

    classes: str
    path: str


@dataclass
class Chart:
    """A chart of series with one axis.

    Attributes:
        key: key in the page's data.
        title: heading.
        note: sentence about the meaning of the values.
        unit: unit of all values.
        series: series, at least one.
        log: True for a logarithmic axis, without zeros.
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
        self.series = [series._replace(values=[_clamp(value) for value in series.values]) for series in self.series]
        bars = [series for series in self.series if series.style == "bar"]
        stacked = [sum(value or 0.0 for value in values) for values in zip(*(s.values for s in bars), strict=True)]
        shown = [value for series in self.series for value in series.values if value is not None] + stacked
        scale, self.ticks = _log_axis(shown, self.unit) if self.log else _linear_axis(shown, self.unit)
        self.marks = _bar_marks(bars, scale)
        for series in self.series:
            if series.style != "bar":
                self.marks += _line_marks(series, scale)

    @property
    def legend(self) -> list[tuple[Series, str]]:
        """Each series, with its newest value as text."""
        newest = [next((value for value in reversed(s.values) if value is not None), None) for s in self.series]
        return [
            (series, "" if value is None or self.unit == "count" else format_with_unit(value, self.unit))
            for series, value in zip(self.series, newest, strict=True)
        ]


Scale = Callable[[float], float]
"""A function that maps a value to its position on an axis: 0 to 1, or beyond for values outside of the axis."""


def format_with_unit(value: float, unit: Unit) -> str:
    """Format a value with its unit."""
    if unit == "bytes":
        return figures.size(round(value))
    if unit == "seconds":
        return figures.seconds(value)
    if unit == "share":
        return figures.percent(value)
    return f"{value:.3g}" if unit in ("bits", "metric") else f"{value:g}"


def _clamp(value: float | None) -> float | None:
    """Return a value that an axis can show: None for a huge or non-finite value, and zero for a tiny value."""
    if value is None or not abs(value) < 1 / _MIN_MAGNITUDE:
        return None
    return value if abs(value) > _MIN_MAGNITUDE else 0


def _x_position(index: int, count: int) -> float:
    return WIDTH * (index + 0.5) / count


def _line_marks(series: Series, scale: Scale) -> list[Mark]:
    count, path, dots, drawn = len(series.values), [], [], False
    for index, value in enumerate(series.values):
        position = None if value is None else scale(value)
        if position is None or not math.isfinite(position):
            drawn = False
            continue
        point = f"{_x_position(index, count):.1f} {HEIGHT * (1 - min(max(position, -0.02), 1.02)):.1f}"
        path.append(f"{'L' if drawn else 'M'}{point}")
        dots.append(f"M{point}h0")
        drawn = True
    marks = [] if series.style == "dots" else [Mark(f"{series.style} t-{series.tone}", "".join(path))]
    if series.style == "dots" or (series.style == "line" and count <= _MAX_DOTS):
        marks.append(Mark(f"dots t-{series.tone}", "".join(dots)))
    return [mark for mark in marks if mark.path]


def _bar_marks(bars: list[Series], scale: Scale) -> list[Mark]:
    if not bars:
        return []
    count = len(bars[0].values)
    width = WIDTH / count * (0.7 if count <= _MAX_DOTS else 1.0)
    bottoms, marks = [0.0] * count, []
    for series in bars:
        path = []
        for index, value in enumerate(series.values):
            if not value or value < 0:
                continue
            low, high = scale(bottoms[index]), scale(bottoms[index] + value)
            bottoms[index] += value
            start, height = _x_position(index, count) - width / 2, HEIGHT * (high - low)
            path.append(f"M{start:.1f} {HEIGHT * (1 - low):.1f}h{width:.1f}v{-height:.1f}h{-width:.1f}z")
        marks.append(Mark(f"bar t-{series.tone}", "".join(path)))
    return [mark for mark in marks if mark.path]


def _linear_axis(values: Sequence[float], unit: Unit) -> tuple[Scale, list[Tick]]:
    """Return an axis that begins at zero, or at the smallest value if that is negative or a metric."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = (min(finite), max(finite)) if unit == "metric" else (min(0.0, *finite), max(0.0, *finite))
    if high <= low:
        low, high = low - (abs(low) or 1.0) * (unit == "metric"), high + (abs(high) or 1.0)
    index = min(int(math.log(max(high, 1.0), 1024)), len(_UNITS) - 1) if unit == "bytes" else 0
    size = 1024.0**index
    step = _round_step((high - low) / size / 4) * size
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    low, high = first * step, last * step
    texts = [
        f"{n * step / size:.4g} {_UNITS[index]}" if unit == "bytes" else _format_tick(n * step, unit)
        for n in range(first, last + 1)
    ]
    ticks = [Tick((n * step - low) / (high - low), text) for n, text in enumerate(texts, first)]
    return lambda value: (value - low) / (high - low), ticks


def _log_axis(values: Sequence[float], unit: Unit) -> tuple[Scale, list[Tick]]:
    positive = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    base, steps = (2.0, (1, 2, 5, 10, 20)) if unit == "bytes" else (10.0, (1, 2, 5, 10, 20, 50))
    low, high = (math.log(value, base) for value in (min(positive) / _MARGIN, max(positive) * _MARGIN))
    step = next((step for step in steps if (high - low) / step <= 5), math.ceil((high - low) / 5))
    ticks = [
        Tick((n * step - low) / (high - low), _format_tick(base ** (n * step), unit))
        for n in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]
    return lambda value: (math.log(value, base) - low) / (high - low) if value > 0 else math.nan, ticks


def _round_step(rough: float) -> float:
    """Round a step up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _format_tick(value: float, unit: Unit) -> str:
    if unit == "bytes":
        index = 0 if value < 1 else min(int(math.log2(value) / 10 + 1e-9), len(_UNITS) - 1)
        return f"{value / 1024 ** index:.4g} {_UNITS[index]}"
    if unit == "share":
        return f"{100 * value:.4g} %"
    return f"{value:.4g}{' s' if unit == 'seconds' else ''}"
