"""Levels at the middle of every octave in use: second moments, on a logarithmic grid that no fit has to choose."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np

from dsq_ckpt.codebooks.base import CodebookConfig, Coordinates, LevelFit, Measured
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.registry import register_codebook

CENTRE = 2.0**0.5
"""An octave's values are between 1 and 2 times a power of two, and decode to this many times it."""
_BIAS = 127


def _error_of_one(low: float, high: float) -> float:
    """Return the relative error of 1 in place of x, spread evenly over the logarithm: root mean squares."""
    span = math.log(high / low)
    mean, square = (high - low) / span, (high**2 - low**2) / (2 * span)
    return math.sqrt((square - 2 * mean + 1) / square)


ERROR = _error_of_one(2**-0.5, 2**0.5)
"""Relative error of `CENTRE` times a power of two for the values of its octave."""


@register_codebook
class Octaves(CodebookConfig):
    """Second moments by their power of two: one level per octave in use, given the parent's. Needs no refinement."""

    coordinates: ClassVar[Coordinates] = "octaves"

    fit: Literal["octaves"] = "octaves"

    def propose(self, histogram: Histogram) -> LevelFit:
        """Return the octaves that occur.

        The window is `moments.WINDOW`, with one bin for each octave, as `OctaveFrame` maps values. Negative values,
        which no second moment is, are protected.
        """
        held, window = histogram.counts, histogram.window
        exponents = np.arange(1, 255)
        places = exponents + 1  # bins of a sign: zero, then keys from FIRST_NORMAL on, whose octaves are exponents
        used = exponents[held[places] > 0]
        levels = CENTRE * np.exp2(used.astype(np.float64) - _BIAS) if used.size else np.array([1.0])
        codes = np.zeros(window.size, np.uint8)
        codes[used + 1] = np.arange(1, used.size + 1)
        forced = codes == 0
        forced[[0, window.n]] = False  # zero of either sign
        # Evenly spread over the logarithm, squares have 1.5 / (2 ln 2) of the square of the middle as their mean.
        energy = float((held[used + 1] * levels[: used.size] ** 2).sum()) * 1.5 / (2 * np.log(2))
        mean_square = energy / max(int(held.sum()), 1)
        return LevelFit(levels, forced, codes=codes, measured=Measured(mean_square, mean_square * ERROR**2))
