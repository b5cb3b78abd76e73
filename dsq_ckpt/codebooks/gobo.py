"""GOBO: outliers stored exactly, other values quantized by k-means with the L1 norm; for comparison.

Zadeh, Edo, Awad and Moshovos, "GOBO: Quantizing Attention-Based NLP Models for Low Latency and Energy Efficient
Inference", MICRO 2020: weights that are improbable under the layer's own normal distribution are stored as they are,
all others share a few centroids. Inshrinkerator (section 8.2, "KMeans"; appendix A.2; Table 12) compares with it:
outlier threshold -4, at most 1000 iterations, and a soft termination of its own. GOBO's full text was not
available: equal populations, the stop by the L1 norm and the natural logarithm were not checked against it.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dsq_ckpt.codebooks.base import NOTHING, CodebookConfig, LevelFit
from dsq_ckpt.codebooks.histogram import Histogram, as_histogram, nearest_index
from dsq_ckpt.codebooks.registry import register_codebook
from dsq_ckpt.core.arrays import F64, I64, Mask


@register_codebook
class Gobo(CodebookConfig):
    """GOBO: outliers of a normal distribution kept in bf16, other values clustered by k-means with the L1 norm."""

    fit: Literal["gobo"] = "gobo"
    bins: int = Field(16, ge=2, le=254, description="levels")
    outlier_threshold: float = Field(-4.0, le=0, description="log density below which a value is an outlier")
    max_iterations: int = Field(1000, ge=1, description="of k-means, which stops early when it gains nothing")

    def propose(self, histogram: Histogram) -> LevelFit:
        """Protect outliers, and cluster the rest."""
        values, counts = histogram.merged()
        if not len(values):
            return NOTHING
        outliers = gobo_outliers(values, counts, self.outlier_threshold)
        if outliers.all():
            outliers[:] = False
        occupied = histogram.occupied
        forced = histogram.beyond.copy()
        forced[occupied] = outliers[np.searchsorted(values, histogram.values[occupied] + 0.0)]
        levels = l1_kmeans(values[~outliers], counts[~outliers], self.bins, self.max_iterations)
        return LevelFit(levels, forced, zero_is_level=False)


def gobo_outliers(
    values: npt.ArrayLike, counts: npt.ArrayLike, log_threshold: float = -4.0
) -> Mask:
    """Return the outlier bins: log density under the layer's normal distribution below the threshold.

        ln N(x; m, s) = -((x - m) / s)**2 / 2 - ln(s) - ln(2 pi) / 2 < log_threshold

    with the mean m and the standard deviation s of all the layer's elements (of the population: s**2 is the mean
    square). The logarithm is natural. A density has the unit 1 / x, so this depends on the layer's units: pass
    values as they are in the tensor. With s = 0.02 values past 3.7 s are outliers; from s = 21.8 on all are.

    Args:
        values, counts: the layer's histogram, see `as_histogram`.
        log_threshold: natural logarithm of a density.

    Returns:
        bool[n]. There are no outliers if all elements are equal, since their density is unbounded.

    Raises:
        ValueError: the histogram is not valid for `as_histogram`.
    """
    v, c = as_histogram(values, counts)
    offsets = v - v[0]  # from one of the values, so that equal elements have exactly no deviation
    offsets -= (c * offsets).sum() / c.sum()
    deviation = math.sqrt((c * np.square(offsets)).sum() / c.sum())
    if deviation == 0.0:
        return np.zeros(len(v), bool)
    log_density = -0.5 * np.square(offsets / deviation) - math.log(deviation) - 0.5 * math.log(2.0 * math.pi)
    outliers: Mask = log_density < log_threshold
    return outliers


def l1_kmeans(
    values: npt.ArrayLike, counts: npt.ArrayLike, bins: int, max_iterations: int = 1000, tolerance: float = 1e-4
) -> F64:
    """Return GOBO's centroids: equal populations, then nearest assignment and means while the L1 norm falls.

    The sorted elements are cut into `bins` groups of equal population, whose means are the first centroids. Then
    every value goes to the nearest centroid (L1 and L2 agree on a line; ties go to the lower) and every centroid to
    the mean of its values. Iterations stop by the L1 norm, the sum of distances: means minimize squares, so it
    may rise, and the result is the centroids before the rise. The soft termination that Inshrinkerator adds
    without saying how (appendix A.2) is `tolerance`; 0 is GOBO without it.

    Args:
        values, counts: the layer's histogram without outliers, see `as_histogram`.
        bins: centroids wanted, >= 1.
        max_iterations: upper limit of iterations, >= 0; 0 for the first centroids.
        tolerance: stop when an iteration lowers the L1 norm by less than this part of it, >= 0.

    Returns:
        Centroids, float64, strictly ascending: `bins` of them, or fewer where groups consist of the same value.
        The values themselves if there are no more than `bins`.

    Raises:
        ValueError: an argument is not as above.
    """
    v, c = as_histogram(values, counts)
    if bins < 1:
        raise ValueError(f"bins is {bins}, expected at least 1")
    if max_iterations < 0 or not tolerance >= 0.0:
        raise ValueError(f"max_iterations is {max_iterations} and tolerance {tolerance}, expected none below 0")
    if len(v) <= bins:
        return v.copy()
    levels = _equal_population_means(v, c, bins)
    norm, moved = _lloyd_step(v, c, levels)
    for _ in range(max_iterations):
        candidate, (next_norm, next_moved) = moved, _lloyd_step(v, c, moved)
        if next_norm >= norm:
            break
        small = norm - next_norm < tolerance * norm
        levels, norm, moved = candidate, next_norm, next_moved
        if small:
            break
    return np.unique(levels)


def _equal_population_means(values: F64, counts: I64, bins: int) -> F64:
    """Return the means of groups of equal population: element ranks [j N / bins, (j + 1) N / bins), rounded down.

    A histogram bin may be divided among groups, as its elements would be. There must be at least `bins` elements.
    The result is float64, strictly ascending; fewer than `bins` where groups have the same mean.
    """
    cumulative = np.concatenate([[0], np.cumsum(counts)])
    origin = values[np.searchsorted(cumulative, cumulative[-1] // 2, side="right") - 1]
    sums = np.concatenate([[0.0], np.cumsum(counts * (values - origin))])
    # Python's integers: the product of a rank and a count may not fit 64 bits.
    ranks = np.array([j * int(cumulative[-1]) // bins for j in range(bins + 1)], np.int64)
    start_bins = np.minimum(np.searchsorted(cumulative, ranks, side="right") - 1, len(values) - 1)
    cumulative_sums = sums[start_bins] + (ranks - cumulative[start_bins]) * (values[start_bins] - origin)
    means = origin + np.diff(cumulative_sums) / np.diff(ranks)
    # Differences of sums are inexact, but a mean lies between the first and the last element of its group.
    last_bins = np.searchsorted(cumulative, ranks[1:] - 1, side="right") - 1
    return np.unique(np.clip(means, values[start_bins[:-1]], values[last_bins]))


def _lloyd_step(values: F64, counts: I64, levels: F64) -> tuple[float, F64]:
    """Return the L1 norm of nearest assignment to `levels`, and the means of the values assigned to each.

    A level that is nearest to no value is unchanged.
    """
    assignment = nearest_index(values, levels)
    gaps = counts * (values - levels[assignment])
    mass = np.bincount(assignment, counts, minlength=len(levels))
    shift = np.bincount(assignment, gaps, minlength=len(levels)) / np.maximum(mass, 1.0)
    return float(np.abs(gaps).sum()), levels + shift
