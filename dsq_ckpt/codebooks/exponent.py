"""Buckets by sign and exponent, the largest kept: LC-Checkpoint, for comparison.

Chen, Liu, Ren and Jin, "On Efficient Construction of Checkpoints", ICML 2020, section 3.1.1: exponent-based
quantization and x-bit priority promotion. The paper quantizes differences of successive states; these functions
take the histogram of whatever is to be quantized.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dsq_ckpt.codebooks.base import NOTHING, CodebookConfig, LevelFit
from dsq_ckpt.codebooks.histogram import Histogram, as_histogram
from dsq_ckpt.codebooks.registry import register_codebook
from dsq_ckpt.core.arrays import F64, I64, U8, Integers, Mask

MAX_BITS = 7
"""2**8 - 1 levels, zero and the code of protected elements do not fit one byte."""


@register_codebook
class Exponent(CodebookConfig):
    """LC-Checkpoint: one level per sign and power of two; the largest powers of two are kept, the rest is zero."""

    fit: Literal["exponent"] = "exponent"
    bits: int = Field(2, ge=1, le=MAX_BITS, description="priority promotion: 2**bits - 1 buckets besides zero")

    def propose(self, histogram: Histogram) -> LevelFit:
        """Return the levels and codes of `exponent_buckets`."""
        occupied = histogram.occupied
        low, high = (edge[occupied] for edge in histogram.window.edges())
        zeros_as_one = histogram.values[occupied] + 0.0
        values, first, inverse = np.unique(zeros_as_one, return_index=True, return_inverse=True)
        if not len(values):
            return NOTHING
        counts = np.bincount(inverse, weights=histogram.counts[occupied]).astype(np.int64)
        levels, codes = exponent_buckets(values, low[first], high[first], counts, self.bits)
        if not len(levels):
            return NOTHING
        codes_by_bin = np.zeros(histogram.window.size, np.uint8)
        codes_by_bin[occupied] = codes[inverse]
        return LevelFit(levels, codes=codes_by_bin)


def exponent_buckets(
    values: npt.ArrayLike, low_edges: npt.ArrayLike, high_edges: npt.ArrayLike, counts: npt.ArrayLike, bits: int
) -> tuple[F64, U8]:
    """Return LC-Checkpoint's levels and the code of every bin.

    A bucket holds values of one sign and one exponent, floor(log2 |x|). It represents the average of its smallest and
    largest values; here these are the representatives of its outermost occupied bins, each within `keys.ALPHA` of
    the value itself. Priority promotion keeps the 2**bits - 1 buckets of largest exponent, whatever their sign.
    The paper does not define which of two buckets of one exponent goes first, and with an odd number of them kept
    this often matters: here the one with more elements, and with equally many the positive one. All other
    buckets become zero, as zero itself is.

    Args:
        values, counts: the histogram, see `as_histogram`.
        low_edges, high_edges: [n], the real interval of each bin, low <= value <= high (`KeyWindow.edges`). A
            bin other than that of zero must lie in one bucket; the edge away from zero may be the next power of two,
            which is excluded. Leave out bins of values over a window, which span several buckets.
        bits: width of an index, 1 to `MAX_BITS`.

    Returns:
        Levels, float64[k], ascending and not zero, k < 2**bits; and codes, uint8[n]: 0 for the value 0, j for
        `levels[j - 1]`. No level if all values are 0.

    Raises:
        ValueError: an argument is not as above.
    """
    v, c = as_histogram(values, counts)
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits is {bits}, expected 1 to {MAX_BITS}")
    exponent = np.frexp(v)[1] - 1
    _check_edges(v, np.asarray(low_edges, np.float64), np.asarray(high_edges, np.float64), exponent)
    sign = np.sign(v).astype(np.int64)
    # Values ascend, so a bucket is a run of bins.
    starts = np.flatnonzero(np.diff(sign, prepend=2) | np.diff(exponent, prepend=exponent[0]))
    ends = np.append(starts[1:], len(v))
    kept = _promote_buckets(sign[starts], exponent[starts], np.add.reduceat(c, starts), 2**bits - 1)
    smallest, largest = v[starts], v[ends - 1]
    levels = (smallest + (largest - smallest) / 2)[kept]
    codes = np.where(kept, np.cumsum(kept), 0).astype(np.uint8)
    return levels, np.repeat(codes, ends - starts)


def _promote_buckets(sign: I64, exponent: Integers, population: I64, max_buckets: int) -> Mask:
    """Return the buckets that are kept, bool[buckets]: by exponent, then population, then positive first."""
    order = np.lexsort((-sign, -population, -exponent))
    order = order[sign[order] != 0]
    kept = np.zeros(len(sign), bool)
    kept[order[:max_buckets]] = True
    return kept


def _check_edges(values: F64, low: F64, high: F64, exponent: Integers) -> None:
    """Raise ValueError unless every bin holds its value and, but for that of zero, lies in its value's bucket."""
    if low.shape != values.shape or high.shape != values.shape:
        raise ValueError(f"edges must be as long as values: {low.shape}, {high.shape} and {values.shape}")
    if not ((low <= values) & (values <= high)).all():
        raise ValueError("a value lies outside the edges of its bin")
    inner, outer = np.where(values > 0, (low, high), (-high, -low))
    within = (inner >= np.ldexp(1.0, exponent)) & (outer <= np.ldexp(1.0, exponent + 1))
    wide = np.flatnonzero(~within & (values != 0))
    if len(wide):
        raise ValueError(f"bin [{low[wide[0]]}, {high[wide[0]]}] spans more than one exponent")
