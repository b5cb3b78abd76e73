"""Histograms of groups, the input of every fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dsq_ckpt.core.arrays import F64, I64, Mask

if TYPE_CHECKING:  # it imports Numba, which is not needed to read a configuration
    from dsq_ckpt.kernels.keys import KeyWindow



@dataclass(frozen=True)
class Histogram:
    """The values of one group over all ranks, counted by bin.

    Attributes:
        counts: int64[window.size], elements by bin; 0 in bins of infinities and NaN.
        window: Maps values to bins (`KeyWindow`): `window.values()` are the representatives, `window.edges()` the real
            interval of each bin, `window.bit_values()` the representatives on the logarithmic axis.
        unit: Unit of steps if tensors are scaled by their gradients; 0: the root mean square of the group.
        parent_step: Step of the parent checkpoint's codebook; 0 if it has none.
        rest: `counts` without elements that are pruned or protected by sensitivity; None if there are none.
    """

    counts: I64
    window: KeyWindow
    unit: float = 0.0
    parent_step: float = 0.0
    rest: I64 | None = None

    @cached_property
    def values(self) -> F64:
        """Return the representative of every bin, float64[window.size], read-only; infinite for infinities and NaN."""
        return self.window.values()

    @cached_property
    def beyond(self) -> Mask:
        """Mask of bins past the window, whose values are always protected."""
        n = self.window.n
        beyond = np.zeros(self.window.size, bool)
        beyond[[n - 2, n - 1, 2 * n - 2, 2 * n - 1]] = True
        return beyond

    @cached_property
    def occupied(self) -> I64:
        """Return the bins within the window that hold elements, in ascending order of their values."""
        bins = np.flatnonzero(~self.beyond & (self.counts > 0))
        return bins[np.argsort(self.values[bins], kind="stable")]

    def merged(self) -> tuple[F64, I64]:
        """Return the values of occupied bins, ascending, and their counts, with zeros of both signs as one."""
        values, inverse = np.unique(self.values[self.occupied] + 0.0, return_inverse=True)
        return values, np.bincount(inverse, weights=self.counts[self.occupied]).astype(np.int64)


def as_histogram(values: npt.ArrayLike, counts: npt.ArrayLike) -> tuple[F64, I64]:
    """Check a histogram of values and return it as arrays.

    Args:
        values: [n], representatives of the occupied bins, signed, ascending; magnitudes up to 2**128, as fp32 has.
        counts: [n], elements per bin, > 0.

    Returns:
        `values` as float64[n] and `counts` as int64[n].

    Raises:
        ValueError: there is no bin, the lengths differ, a value is not finite, values do not ascend, or a count is
            not positive.
    """
    v, c = np.asarray(values, np.float64), np.asarray(counts, np.int64)
    if v.ndim != 1 or v.shape != c.shape or not v.size:
        raise ValueError(f"values and counts must be vectors of one length, at least 1: got {v.shape} and {c.shape}")
    if not np.isfinite(v).all() or (np.diff(v) <= 0).any():
        raise ValueError("values must be finite and strictly ascending")
    if (c <= 0).any():
        raise ValueError("counts must be positive: leave out bins that hold nothing")
    return v, c


def nearest_index(points: F64, levels: F64) -> I64:
    """Return the index of the nearest of the ascending `levels` for every point; ties go to the lower one."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, points, side="left")


def top_mask(counts: I64, fraction: float) -> Mask:
    """Return a mask of the last bins that together hold at most `fraction` of all elements."""
    from_top = np.cumsum(counts[::-1])[::-1]
    return (from_top <= fraction * max(int(counts.sum()), 1)) & (counts > 0)
