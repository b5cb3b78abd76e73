"""Levels at powers of two: second moments, on a logarithmic grid that no fit has to choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from dsq_ckpt.codebooks.base import CodebookConfig, Coordinates, LevelFit, RefinementFit
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.registry import register_codebook

_LEAST, _MOST = 2.0, 253.0  # on the axis of bits: normal and finite, also half an octave away


@register_codebook
class Octaves(CodebookConfig):
    """Second moments over scales of their rows and columns, by the nearest power of two in use, given the parent's."""

    coordinates: ClassVar[Coordinates] = "octaves"

    fit: Literal["octaves"] = "octaves"
    rate_distortion: float = Field(
        0.2, ge=0, le=2, description="lambda: squared octaves of distortion that one bit is worth"
    )

    def propose(self, histogram: Histogram) -> LevelFit:
        """Return the powers of two that are nearest to some value, to be moved to the middle of their values.

        Negative values, which no second moment is, are protected.
        """
        n, size = histogram.window.n, histogram.window.size
        zero, forced = np.zeros(size, bool), np.zeros(size, bool)
        zero[[0, n]] = True
        forced[n + 1 :] = True
        held = (histogram.counts > 0) & ~histogram.beyond & ~zero & ~forced
        levels = np.unique(np.rint(histogram.window.bit_values()[held]).clip(_LEAST, _MOST))
        return LevelFit(levels if levels.size else np.array([127.0]), forced, pruned=zero, step=1.0, centred=True)

    @property
    def logarithmic(self) -> bool:
        """Always."""
        return True

    @property
    def price(self) -> float:
        """As configured."""
        return self.rate_distortion

    def refinement(self, most: int, squared_error: Callable[[int, float], float]) -> RefinementFit:
        """Return none: a first moment goes by the root of what history keeps, and both are to fit each other."""
        return RefinementFit(0)
