"""The configuration cube: axes of values ordered from most aggressive to most conservative, and variants beside it.

Inshrinkerator, section 5 ("Search Space", Table 2, Figure 8): quality must rise along every axis. A choice without
such an order, as the papers' pruning metric, is not an axis but a variant: each variant has a cube of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from numbers import Real
from typing import Any

Point = tuple[int, ...]
"""One index per axis: 0 is the most aggressive value (smallest, most lossy), the last the most conservative."""

VARIANT = "variant"  # key of the variant's name in what `Space.describe` returns


@dataclass(frozen=True)
class Axis:
    """A searched setting: a name, the dotted configuration keys it sets, and its values, most aggressive first."""

    name: str
    path: tuple[str, ...]
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        """Refuse an axis that has no value or sets no key."""
        if not self.values:
            raise ValueError(f"axis '{self.name}' has no values: give at least one")
        if not self.path:
            raise ValueError(f"axis '{self.name}' sets no configuration key: give at least one in path")
        _distinct(f"axis '{self.name}': configuration key", self.path)


@dataclass(frozen=True)
class Variant:
    """One of several cubes with the same axes: a name, and what it sets (dotted key -> value)."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)  # a dict has no hash; the name tells them apart


@dataclass(frozen=True)
class Space:
    """Every configuration that may be chosen: a point on the axes, and a variant."""

    axes: tuple[Axis, ...]
    variants: tuple[Variant, ...] = (Variant("default"),)

    def __post_init__(self) -> None:
        """Refuse empty spaces, and names or keys that are given twice."""
        if not self.axes:
            raise ValueError("a space needs at least one axis")
        if not self.variants:
            raise ValueError("a space needs at least one variant")
        _distinct("axis", [VARIANT, *(axis.name for axis in self.axes)])
        _distinct("variant", [variant.name for variant in self.variants])
        of_axes = [key for axis in self.axes for key in axis.path]
        for variant in self.variants:
            _distinct(f"variant '{variant.name}': configuration key", [*of_axes, *variant.values])

    @property
    def shape(self) -> tuple[int, ...]:
        """Values per axis."""
        return tuple(len(axis.values) for axis in self.axes)

    @property
    def most_conservative(self) -> Point:
        """The point of highest quality."""
        return tuple(side - 1 for side in self.shape)

    def points(self) -> Iterator[Point]:
        """Yield every point, most aggressive first, the last axis fastest."""
        return product(*map(range, self.shape))

    def __contains__(self, point: object) -> bool:
        """Return True if `point` has one index per axis, each within its axis (no negative indices)."""
        return (
            isinstance(point, tuple)
            and len(point) == len(self.axes)
            and all(isinstance(index, int) and 0 <= index < side for index, side in zip(point, self.shape, strict=True))
        )

    def values(self, point: Point, variant: Variant) -> dict[str, Any]:
        """Return the values at a point by dotted configuration key, as `DSQConfig.with_values` takes them."""
        pairs = zip(self.axes, self._checked(point), strict=True)
        return {**variant.values, **{key: axis.values[index] for axis, index in pairs for key in axis.path}}

    def describe(self, point: Point, variant: Variant) -> dict[str, Any]:
        """Return the values at a point by name of axis, and the variant's name, for people."""
        pairs = zip(self.axes, self._checked(point), strict=True)
        return {VARIANT: variant.name, **{axis.name: axis.values[index] for axis, index in pairs}}

    def nearest(self, values: Mapping[str, Any]) -> Point:
        """Return the point closest to a configuration given by dotted key; other keys do not matter.

        Numbers are compared by difference, anything else by equality. Of two values as close, and where nothing can be
        compared, the more conservative one is taken: a start that is too conservative costs ratio, one that is too
        aggressive quality.
        """
        return tuple(_nearest(axis, values) for axis in self.axes)

    def _checked(self, point: Point) -> Point:
        if point not in self:
            raise ValueError(f"{point!r} is no point of a space of shape {self.shape}")
        return point


def _nearest(axis: Axis, values: Mapping[str, Any]) -> int:
    current = [values[key] for key in axis.path if key in values]
    distances = [sum(_distance(value, current_value) for current_value in current) for value in axis.values]
    return min(range(len(distances)), key=lambda index: (distances[index], -index))


def _distance(value: Any, other: Any) -> float:
    if value == other:
        return 0.0
    if not (isinstance(value, Real) and isinstance(other, Real)):
        return math.inf
    difference = abs(float(value) - float(other))
    return math.inf if math.isnan(difference) else difference


def _distinct(what: str, names: Iterable[str]) -> None:
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise ValueError(f"{what} '{duplicates[0]}' is given twice")
