"""K-means of the papers: weighted k-means++ seeding and Lloyd's iterations on a histogram.

Inshrinkerator, section 4.4, Algorithms 2 and 3. The algorithm finds a local optimum that depends on the seed;
`exact_kmeans` finds the global one. It is used for comparison with the papers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsq_ckpt.core.arrays import F64


def sample_weights(frequency: npt.ArrayLike, values: npt.ArrayLike, sigma: float = 0.2) -> F64:
    """Return the weight of each bucket: `sigma * frequency + (1 - sigma) * |value|`, both normalized (Algorithm 2).

    The paper does not define its `Normalize`. Here it divides by the maximum: both terms then have the
    range [0, 1] whatever the number of elements and the scale of the tensor, and more buckets do not change
    the balance. Buckets without elements, which the paper's histogram does not hold, get weight 0.

    Args:
        frequency: elements per bucket, [n], >= 0.
        values: representative of each bucket, [n], finite where the frequency is positive.
        sigma: weight of the frequency, in [0, 1].

    Returns:
        float64[n].

    Raises:
        ValueError: `sigma` is outside [0, 1], or the lengths differ.
    """
    f, magnitude = np.asarray(frequency, np.float64), np.abs(np.asarray(values, np.float64))
    if not 0.0 <= sigma <= 1.0:
        raise ValueError(f"sigma is {sigma}, expected a number in [0, 1]")
    if f.ndim != 1 or f.shape != magnitude.shape:
        raise ValueError(f"frequency and values must be vectors of one length: {f.shape}, {magnitude.shape}")
    used = f > 0
    weights = np.zeros_like(f)
    if used.any():
        largest = magnitude[used].max() or 1.0  # all values are zero
        weights[used] = sigma * f[used] / f.max() + (1.0 - sigma) * magnitude[used] / largest
    return weights


def seed_levels(points: F64, weights: F64, k: int, rng: np.random.Generator) -> F64:
    """Choose k of the points by weighted k-means++ seeding (Algorithm 3); ascending.

    Its `min_distance` is taken as the squared distance, as in the k-means++ it extends (Arthur and
    Vassilvitskii, SODA 2007), so that the expected cost keeps that bound.
    """
    chosen = [rng.choice(points.size, p=weights / weights.sum())]
    distance = (points - points[chosen[0]]) ** 2
    while len(chosen) < k:
        mass = distance * weights
        total = mass.sum()
        if not total > 0.0:  # distances too small to square: any point not yet chosen is as good
            mass = np.ones_like(points)
            mass[chosen] = 0.0
            total = mass.sum()
        chosen.append(rng.choice(points.size, p=mass / total))
        distance = np.minimum(distance, (points - points[chosen[-1]]) ** 2)
    return np.sort(points[chosen])


def lloyd_kmeans(
    points: npt.ArrayLike,
    weights: npt.ArrayLike,
    k: int,
    seed: int = 0,
    max_iterations: int = 100,
    tolerance: float = 1e-6,
) -> F64:
    """Cluster points by Lloyd's iterations from one weighted k-means++ seeding.

    Args:
        points: float64[n], finite, ascending.
        weights: float64[n], >= 0; points of weight 0 are left out.
        k: clusters wanted, >= 1.
        seed: seed of the random choice; the same seed gives the same levels.
        max_iterations: upper limit of iterations.
        tolerance: stop when no level moves by more than this part of the range of the points.

    Returns:
        Levels, float64[min(k, points of positive weight)], ascending.

    Raises:
        ValueError: the lengths differ, a weight is negative, no point has weight or `k` < 1.
    """
    p, w = np.asarray(points, np.float64), np.asarray(weights, np.float64)
    if p.ndim != 1 or p.shape != w.shape:
        raise ValueError(f"points and weights must be vectors of one length, got {p.shape} and {w.shape}")
    if not (w >= 0).all() or not (w > 0).any():
        raise ValueError("weights must not be negative, and one must be positive")
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    p, w = p[w > 0], w[w > 0]
    k = min(k, p.size)
    levels = seed_levels(p, w, k, np.random.default_rng(seed))
    min_shift = tolerance * (p[-1] - p[0])
    for _ in range(max_iterations):
        nearest = np.searchsorted(0.5 * (levels[:-1] + levels[1:]), p)
        mass = np.bincount(nearest, w, minlength=k)
        sums = np.bincount(nearest, w * p, minlength=k)
        # A cluster that lost all its points keeps its level.
        moved = np.where(mass > 0, sums / np.where(mass > 0, mass, 1.0), levels)
        shift = np.abs(moved - levels).max()
        levels = np.sort(moved)
        if shift <= min_shift:
            break
    return levels
