"""Uniform quantization with a number of bins that follows the layer's entropy: QD-Compressor, for comparison.

Zhang et al., "QD-Compressor: a Quantization-based Delta Compression Framework for Deep Neural Networks", ICCD 2021,
and its journal version, Jin et al., IEEE TPDS 2023: quantizers follow each layer's own range, and their bit width
the layer's entropy. Inshrinkerator (section 8.2, "Uniform"; Table 10) compares with it, with a minimum and a
maximum number of bins for every layer. No paper has a formula for the bit width: see `entropy_bins`.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from dsq_ckpt.codebooks.base import NOTHING, CodebookConfig, LevelFit
from dsq_ckpt.codebooks.histogram import Histogram, as_histogram, nearest_index
from dsq_ckpt.codebooks.registry import register_codebook
from dsq_ckpt.core.arrays import F64


@register_codebook
class Uniform(CodebookConfig):
    """QD-Compressor: equal cells over the range of values, as many as their entropy needs."""

    fit: Literal["uniform"] = "uniform"
    min_bins: int = Field(8, ge=2, le=254, description="levels at least")
    max_bins: int = Field(254, ge=2, le=254, description="levels at most")

    @model_validator(mode="after")
    def _check_bin_bounds(self) -> Uniform:
        if self.min_bins > self.max_bins:
            raise ValueError(f"min_bins is {self.min_bins}, above max_bins, {self.max_bins}")
        return self

    def propose(self, histogram: Histogram) -> LevelFit:
        """Divide the range evenly."""
        values, counts = histogram.merged()
        if not len(values):
            return NOTHING
        bins = entropy_bins(values, counts, self.min_bins, self.max_bins)
        return LevelFit(uniform_levels(float(values[0]), float(values[-1]), bins), zero_is_level=False)


def uniform_levels(low: float, high: float, bins: int) -> F64:
    """Return levels at equal distances, the first at `low` and the last at `high`.

    The ends of the range are levels, so the step is `(high - low) / (bins - 1)`: this is the affine quantizer of
    Guan et al. 2019 as PyTorch has it (`choose_qparams_optimized`: scale = range / (2**bits - 1)), and what
    `adaptive_range` measures. Values in the range have an error of at most half a step.

    Args:
        low, high: ends of the range, finite, `low <= high`.
        bins: levels wanted, >= 1; a single one lies in the middle.

    Returns:
        float64[bins], strictly ascending. Fewer where the range does not contain that many distinct numbers: one
        if `low == high`.

    Raises:
        ValueError: the range or `bins` is not as above.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"range is [{low}, {high}], expected finite ends, the lower one first")
    if bins < 1:
        raise ValueError(f"bins is {bins}, expected at least 1")
    if bins == 1:
        return np.array([low + (high - low) / 2])
    return np.unique(np.linspace(low, high, bins))


def entropy_bins(values: npt.ArrayLike, counts: npt.ArrayLike, min_bins: int, max_bins: int) -> int:
    """Return the number of bins of a layer, from the entropy of its values quantized with `max_bins`.

    Only the abstracts of QD-Compressor's papers were available; they relate a layer's bit width to its entropy (that of
    2023: weighted entropy) without a formula. Ours: H bits per element need a code of ceil(H) bits, which has
    2**ceil(H) levels. So a layer gets `max_bins` only if H is above log2(max_bins) - 1, and a layer whose range is
    determined by a few outliers gets few.

    Args:
        values, counts: the layer's histogram, see `as_histogram`.
        min_bins, max_bins: bounds of the result, 1 <= `min_bins` <= `max_bins`.

    Returns:
        2**ceil(H), but no less than `min_bins` and no more than `max_bins`.

    Raises:
        ValueError: the histogram or the bounds are not as above.
    """
    v, c = as_histogram(values, counts)
    if not 1 <= min_bins <= max_bins:
        raise ValueError(f"min_bins is {min_bins} and max_bins {max_bins}, expected 1 <= min_bins <= max_bins")
    levels = uniform_levels(float(v[0]), float(v[-1]), max_bins)
    level_counts = np.bincount(nearest_index(v, levels), c, minlength=len(levels))
    shares = level_counts[level_counts > 0] / level_counts.sum()
    entropy = float(-(shares * np.log2(shares)).sum())
    return min(max(2 ** math.ceil(entropy), min_bins), max_bins)
