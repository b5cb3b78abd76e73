"""What Inshrinkerator (appendix A.3; DynaQuant: A.2) proves of clustering on the bins of a sketch holds for ours.

Points X lie in [0, 1]; their twins, the representatives of the bins that they fall into, are within alpha of them,
relatively. Optimal clusterings are found without this package: by kmeans1d, or by trying all partitions.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import kmeans1d
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dsq_ckpt.codebooks.algorithms.lloyd import seed_levels
from dsq_ckpt.core.arrays import F64
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization.sketch import Sketch

ALPHA = (1 + 1e-6) / 129  # with the rounding of fp32
points_strategy = arrays(
    np.float32, st.integers(3, 40), elements=st.one_of(st.floats(2.0**-20, 1, width=32), st.just(np.float32(0.5)))
)


def twins(x: F64) -> F64:
    """Return the representative of the bin of every point, as a codebook's fit sees them."""
    values = FULL.values()
    own = np.array([values[np.flatnonzero(Sketch.of(np.array([point], np.float32)).counts)[0]] for point in x])
    assert (np.abs(own - x) <= ALPHA * x).all()
    return own


def partitions(x: F64, k: int) -> list[list[F64]]:
    """Return all partitions of ascending points into k runs; the optimum in one dimension is one of them."""
    cuts = combinations(range(1, len(x)), k - 1)
    return [[x[a:b] for a, b in pairwise((0, *cut, len(x)))] for cut in cuts]


def optimal_median_loss(x: F64, k: int) -> float:
    """Return the mean distance to the nearest of k centers, for the best centers: equation 1's L(M*)."""
    best = min(sum(np.abs(run - np.median(run)).sum() for run in runs) for runs in partitions(np.sort(x), k))
    return float(best) / len(x)


def optimal_squared_loss(x: F64, k: int) -> float:
    """Return the mean squared distance to the nearest of k centers, for the best centers: phi(M*)."""
    labels, centers = kmeans1d.cluster(x.tolist(), k)
    return float(np.mean((x - np.asarray(centers)[labels]) ** 2))


@given(points_strategy, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_proposition_1_the_optimal_losses_differ_by_alpha_at_most(points, k):
    x = points.astype(np.float64)
    assert abs(optimal_median_loss(x, k) - optimal_median_loss(twins(x), k)) <= ALPHA


@given(points_strategy, st.integers(2, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_proposition_2_seeding_on_bins_is_competitive_with_the_points(points, k, seed):
    """The expectation of the loss is the mean of 60 seedings, with three standard errors."""
    x = points.astype(np.float64)
    q, weights = np.unique(twins(x), return_counts=True)
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(60):
        levels = seed_levels(q, weights.astype(np.float64), min(k, len(q)), rng)
        losses.append(float(weights @ np.min((q[:, None] - levels) ** 2, axis=1)) / len(x))
    bound = 16 * (math.log(k) + 2) * (optimal_squared_loss(x, min(k, len(np.unique(x)))) + ALPHA**2)
    assert np.mean(losses) - 3 * np.std(losses) / math.sqrt(len(losses)) <= bound


@pytest.mark.parametrize("seed", range(30))
def test_separable_clusters_are_the_same_on_bins(seed):
    """Split > width, and alpha below (split - width) / 4: definition A.1 and what follows lemma A.1."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 5))
    width = 0.2 / k
    centers = (np.arange(k) + 0.5) / k
    x = np.sort(np.concatenate([c + rng.uniform(-width / 2, width / 2, rng.integers(2, 30)) for c in centers]))
    x = x.astype(np.float32).astype(np.float64)
    clusters = np.floor(x * k).astype(int)
    runs = [x[clusters == number] for number in range(k)]
    widest = max(run[-1] - run[0] for run in runs)
    split = min(right[0] - left[-1] for left, right in pairwise(runs))
    assert split > widest and (split - widest) / 4 > ALPHA, "the clusters of this test are separable"
    for values in (x, twins(x)):
        labels, _ = kmeans1d.cluster(values.tolist(), k)
        assert np.array_equal(labels, clusters)
