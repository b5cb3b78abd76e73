"""Exact weighted k-means in one dimension, for every number of clusters at once.

On a line the clusters of an optimal k-means are intervals, so the best split of the first j points into k
intervals follows from the best splits into k - 1 (Wang and Song, "Ckmeans.1d.dp", The R Journal 2011):

    D[k, j] = min over i of  D[k - 1, i - 1] + cost(i, j)

where `cost(i, j)` is the weighted sum of squared distances of points i..j to their mean, read in constant
time from prefix sums. The best i grows with j, so the row is filled by divide and conquer over j in
O(n log n) (Gronlund, Larsen, Mathiasen and Nielsen, "Fast exact k-means, k-medians and Bregman divergence
clustering in 1D", 2017). Deterministic: no seeds, no restarts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsq_ckpt import native
from dsq_ckpt.core.arrays import F64, I32, I64
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import codebooks


@jit(error_model="numpy")
def _cost(w, wx, wxx, i, j):  # type: ignore[no-untyped-def]
    """Return the weighted sum of squared distances of points i..j to their mean, from prefix sums."""
    weight = w[j + 1] - w[i]
    if weight <= 0.0:  # weights below the last digit of the sum before them
        return 0.0
    first = wx[j + 1] - wx[i]
    spread = (wxx[j + 1] - wxx[i]) - first * first / weight
    return spread if spread > 0.0 else 0.0


@jit(error_model="numpy")
def _fill_row(w, wx, wxx, k, previous_row, row, starts):  # type: ignore[no-untyped-def]
    """Fill row k (0-based: k + 1 clusters) of the dynamic program, and the starts of its last clusters."""
    n = row.size
    # Halving a range that starts with n entries leaves at most two pending ranges per level.
    stack = np.empty((128, 4), np.int64)
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = k, n - 1, k, n - 1
    depth = 1
    while depth:
        depth -= 1
        left, right, i_low, i_high = stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3]
        j = (left + right) // 2
        best, best_i = np.inf, i_low
        for i in range(i_low, min(i_high, j) + 1):
            candidate = previous_row[i - 1] + _cost(w, wx, wxx, i, j)
            if candidate < best:
                best, best_i = candidate, i
        row[j], starts[j] = best, best_i
        if left < j:
            stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = left, j - 1, i_low, best_i
            depth += 1
        if j < right:
            stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = j + 1, right, best_i, i_high
            depth += 1


@jit(error_model="numpy")
def _solve(points, weights, k_max):  # type: ignore[no-untyped-def]
    """Return the start of the last cluster for every (clusters - 1, last point), int32[k_max, n]."""
    n = points.size
    w, wx, wxx = np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1)
    for i in range(n):
        w[i + 1] = w[i] + weights[i]
        wx[i + 1] = wx[i] + weights[i] * points[i]
        wxx[i + 1] = wxx[i] + weights[i] * points[i] * points[i]
    starts = np.zeros((k_max, n), np.int32)
    previous_row = np.empty(n)
    for j in range(n):
        previous_row[j] = _cost(w, wx, wxx, 0, j)
    row = np.empty(n)
    for k in range(1, k_max):
        _fill_row(w, wx, wxx, k, previous_row, row, starts[k])
        previous_row, row = row, previous_row
    return starts


@dataclass(frozen=True)
class KMeansPath:
    """The optimal clusterings for 1, 2, ..., `k_max` clusters."""

    points: F64
    """float64[n]: the points of positive weight, ascending."""
    weights: F64
    """float64[n], positive."""
    k_max: int
    """Largest number of clusters: at most the number requested, and at most the number of points."""
    _starts: I32

    def starts(self, k: int) -> I64:
        """Return the index into `points` of the first point of each of the k clusters, int64[k].

        Raises:
            ValueError: `k` is not in 1..k_max.
        """
        if not 1 <= k <= self.k_max:
            raise ValueError(f"k is {k}, this path has 1..{self.k_max}")
        starts = np.empty(k, np.int64)
        last = self.points.size - 1
        for cluster in range(k - 1, -1, -1):
            starts[cluster] = self._starts[cluster, last]
            last = int(starts[cluster]) - 1
        return starts

    def levels(self, k: int) -> F64:
        """Return the weighted means of the k clusters, float64[k], ascending; raises as `starts`."""
        starts = self.starts(k)
        # Offsets from each cluster's first point keep their precision far from zero.
        origin = self.points[starts]
        offsets = self.points - np.repeat(origin, np.diff(np.append(starts, self.points.size)))
        weight = np.add.reduceat(self.weights, starts)
        return origin + np.add.reduceat(self.weights * offsets, starts) / weight

    def cost(self, k: int) -> float:
        """Return the weighted sum of squared distances to the level of each point's cluster; raises as `starts`."""
        starts = self.starts(k)
        point_levels = np.repeat(self.levels(k), np.diff(np.append(starts, self.points.size)))
        return float(np.sum(self.weights * (self.points - point_levels) ** 2))


def exact_kmeans(points: npt.ArrayLike, weights: npt.ArrayLike, k_max: int) -> KMeansPath:
    """Solve weighted 1-D k-means exactly for every k up to `k_max`.

    Args:
        points: float64[n], finite, strictly ascending.
        weights: float64[n], finite, >= 0; points of weight 0 are left out.
        k_max: largest number of clusters wanted, >= 1.

    Returns:
        The path; its `k_max` is smaller than requested if fewer points have weight.

    Raises:
        ValueError: the arguments are not as above, or no point has weight.
    """
    p, w = np.asarray(points, np.float64), np.asarray(weights, np.float64)
    if p.ndim != 1 or p.shape != w.shape:
        raise ValueError(f"points and weights must be vectors of one length, got {p.shape} and {w.shape}")
    if not np.isfinite(p).all() or (np.diff(p) <= 0).any():
        raise ValueError("points must be finite and strictly ascending")
    if not np.isfinite(w).all() or (w < 0).any():
        raise ValueError("weights must be finite and not negative")
    if k_max < 1:
        raise ValueError(f"k_max is {k_max}, expected at least 1")
    p, w = p[w > 0], w[w > 0]
    if p.size == 0:
        raise ValueError("no point has weight: there is nothing to cluster")
    # Differences of prefix sums lose precision when the points lie far from zero, and products of weights and
    # squares may overflow fp64: center the points, and normalize points and weights.
    centred = p - np.average(p, weights=w / w.max())
    unit = np.abs(centred).max()
    k, path = min(k_max, p.size), native.path_index()
    x, y = centred / unit if unit > 0 else centred, w / w.max()
    return KMeansPath(p, w, k, _solve(x, y, k) if path < 0 else codebooks.solve_kmeans(path, x, y, k))
