"""Levels at powers of two and between them, for second moments: a fixed logarithmic grid, which needs no fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from dsq_ckpt.codebooks.base import MAX_LEVELS, CodebookConfig, Coordinates, LevelFit, RefinementFit
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.registry import register_codebook
from dsq_ckpt.core.arrays import F64

_COARSER_PRICE_FACTOR = 4.0  # factor of the price of a bit with one level per octave
_MIN_POINT, _MAX_POINT = 2.0, 253.0  # on the axis of bits; half an octave further is still normal and finite


@register_codebook
class Octaves(CodebookConfig):
    """Second moments over scales of their rows and columns, by levels of a logarithmic grid."""

    coordinates: ClassVar[Coordinates] = "octaves"

    fit: Literal["octaves"] = "octaves"
    per_octave: int = Field(
        2, ge=1, le=4, description="levels per octave; fewer where 254 levels do not suffice, one in deltas where most "
        "second moments change their level, and an error is forgotten as fast"
    )
    rate_distortion: float = Field(
        0.05, ge=0, le=2, description="lambda: squared distances of levels of distortion that one bit is worth"
    )

    def propose(self, histogram: Histogram) -> LevelFit:
        """Return the levels that are nearest to some value; they then move to the means of their values.

        Negative values, which cannot be second moments, are protected.
        """
        n, size = histogram.window.n, histogram.window.size
        zero, forced = np.zeros(size, bool), np.zeros(size, bool)
        zero[[0, n]] = True
        forced[n + 1 :] = True
        occupied = (histogram.counts > 0) & ~histogram.beyond & ~zero & ~forced
        points = histogram.window.bit_values()[occupied]
        per_octave, levels = self.per_octave, self._grid_levels(points, self.per_octave)
        while len(levels) > MAX_LEVELS:
            per_octave -= 1
            levels = self._grid_levels(points, per_octave)
        return LevelFit(levels, forced, pruned=zero, step=1 / per_octave, centred=True)

    @staticmethod
    def _grid_levels(points: F64, per_octave: int) -> F64:
        levels = np.unique((np.rint(points * per_octave) / per_octave).clip(_MIN_POINT, _MAX_POINT))
        return levels if levels.size else np.array([127.0])

    @property
    def coarser(self) -> Octaves | None:
        """One level per octave, for chains whose second moments are mostly renewed between checkpoints.

        Previous codes then predict little, and training soon forgets the error of a restore.
        """
        if self.per_octave == 1:
            return None
        rate_distortion = min(_COARSER_PRICE_FACTOR * self.rate_distortion, 2.0)
        return self.model_copy(update={"per_octave": 1, "rate_distortion": rate_distortion})

    @property
    def logarithmic(self) -> bool:
        """True: distance is measured on the logarithmic axis."""
        return True

    @property
    def price(self) -> float:
        """Value of `rate_distortion`."""
        return self.rate_distortion

    def refinement(self, most: int, squared_error: Callable[[int, float], float]) -> RefinementFit:
        """Return no refinement: first moments are decoded with base layers of second moments, and must match them."""
        return RefinementFit(0)
