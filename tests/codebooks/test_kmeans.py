"""One-dimensional k-means: exact against independent solvers, Lloyd against exact."""

from itertools import combinations, pairwise

import kmeans1d
import numpy as np
import pytest

from dsq_ckpt.codebooks.algorithms.exact_kmeans import exact_kmeans
from dsq_ckpt.codebooks.algorithms.lloyd import lloyd_kmeans, sample_weights, seed_levels
from dsq_ckpt.kernels.keys import FULL, KeyWindow
from dsq_ckpt.quantization.sketch import Sketch
from tests.helpers.windows import tight_window

DATASETS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "far from zero": lambda rng, n: 1e6 + rng.standard_normal(n),
    "tiny": lambda rng, n: 1e-20 * rng.standard_normal(n),
    "lognormal": lambda rng, n: rng.lognormal(0.0, 3.0, n),
    "clumps": lambda rng, n: rng.integers(0, 7, n) + 0.01 * rng.standard_normal(n),
}


def distinct(name: str, n: int, seed: int) -> np.ndarray:
    return np.unique(DATASETS[name](np.random.default_rng(seed), n))


def cost_of_levels(points, weights, levels) -> float:
    return float(weights @ np.min((points[:, None] - levels[None, :]) ** 2, axis=1))


def histogram(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bins and counts of the sketch of Gaussian weights, ascending."""
    x = (0.02 * np.random.default_rng(seed).standard_normal(300_000)).astype(np.float32)
    window = tight_window(x)
    window = KeyWindow(max(window.lo, window.hi - 700), window.hi)
    counts, values = Sketch.of(x, window).counts, window.values()
    order = np.argsort(values, kind="stable")
    order = order[np.isfinite(values[order])]
    points, first = np.unique(values[order], return_index=True)  # both signs of "under" are zero
    return points, np.add.reduceat(counts[order], first).astype(np.float64)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 10, 400])
@pytest.mark.parametrize("name", DATASETS)
def test_unweighted_matches_kmeans1d(name, n, seed):
    points = distinct(name, n, seed)
    path = exact_kmeans(points, np.ones_like(points), 20)
    assert path.k_max == min(20, points.size)
    scale = path.cost(1) + np.finfo(float).tiny
    for k in range(1, path.k_max + 1):
        _, levels = kmeans1d.cluster(points.tolist(), k)
        peer_cost = cost_of_levels(points, np.ones_like(points), np.asarray(levels))
        assert path.cost(k) <= peer_cost * (1 + 1e-6) + 1e-11 * scale
        assert path.cost(k) == pytest.approx(
            cost_of_levels(points, np.ones_like(points), path.levels(k)), rel=1e-9, abs=1e-14 * scale
        )


@pytest.mark.parametrize("seed", range(20))
def test_weighted_matches_brute_force(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 10))
    points = np.sort(rng.standard_normal(n))
    weights = rng.lognormal(0.0, 3.0, n)
    path = exact_kmeans(points, weights, n)
    for k in range(1, n + 1):
        best = np.inf
        for cuts in combinations(range(1, n), k - 1):
            cost = 0.0
            for members in np.split(np.arange(n), cuts):
                mean = np.average(points[members], weights=weights[members])
                cost += weights[members] @ (points[members] - mean) ** 2
            best = min(best, cost)
        assert path.cost(k) == pytest.approx(best, rel=1e-9, abs=1e-13 * path.cost(1))


@pytest.mark.parametrize("seed", [3, 4])
def test_cost_falls_with_k_and_beats_lloyd_on_a_histogram(seed):
    points, frequency = histogram(seed)
    for weights in (frequency, sample_weights(frequency, points)):
        path = exact_kmeans(points, weights, 32)
        costs = [path.cost(k) for k in range(1, 33)]
        assert all(a >= b for a, b in pairwise(costs))
        for k in (2, 5, 8, 16, 32):
            lloyd = lloyd_kmeans(points, weights, k, seed=seed)
            assert path.cost(k) <= cost_of_levels(points, weights, lloyd) * (1 + 1e-12)


@pytest.mark.parametrize("k", [1, 2, 7, 16])
def test_clusters_are_consistent(k):
    points, weights = histogram(5)
    path = exact_kmeans(points, weights, 16)
    starts, levels = path.starts(k), path.levels(k)
    boundaries = 0.5 * (levels[:-1] + levels[1:])
    assert starts[0] == 0 and (np.diff(starts) > 0).all() and (np.diff(levels) > 0).all()
    assert boundaries.shape == (k - 1,)
    # In an optimal clustering every point is in the cluster of its nearest level.
    owner = np.searchsorted(boundaries, path.points)
    np.testing.assert_array_equal(np.flatnonzero(np.diff(owner)) + 1, starts[1:])


def test_points_without_weight_do_not_count():
    points, weights = np.arange(10.0), np.zeros(10)
    weights[[2, 5, 9]] = [1.0, 1e-9, 1e9]
    path = exact_kmeans(points, weights, 8)
    assert path.k_max == 3
    np.testing.assert_array_equal(path.levels(3), [2.0, 5.0, 9.0])
    assert path.cost(3) == 0.0


def test_weights_too_small_for_the_sum_are_harmless():
    points, weights = np.arange(50.0), np.full(50, 1e-40)
    weights[[10, 30]] = 1e10
    path = exact_kmeans(points, weights, 8)
    for k in range(2, 9):
        assert path.cost(k) < 1e-30
        assert np.isfinite(path.levels(k)).all() and (np.diff(path.levels(k)) > 0).all()


def test_full_range_of_fp32_and_counts():
    """Values over the whole fp32 range, with counts of billions, neither overflow nor lose order."""
    values = FULL.values()[1 : FULL.n - 2 : 40]
    path = exact_kmeans(values, np.full(values.size, 4e9), 8)
    assert np.isfinite(path.cost(1)) and (np.diff(path.levels(8)) > 0).all()


@pytest.mark.parametrize(
    "points, weights, k",
    [
        ([0.0, 0.0], [1.0, 1.0], 1),
        ([1.0, 0.0], [1.0, 1.0], 1),
        ([0.0, np.inf], [1.0, 1.0], 1),
        ([0.0, 1.0], [1.0, -1.0], 1),
        ([0.0, 1.0], [1.0, np.nan], 1),
        ([0.0, 1.0], [0.0, 0.0], 1),
        ([0.0, 1.0], [1.0], 1),
        ([0.0, 1.0], [1.0, 1.0], 0),
    ],
)
def test_bad_input_is_refused(points, weights, k):
    with pytest.raises(ValueError):
        exact_kmeans(points, weights, k)


def test_k_outside_the_path_is_refused():
    path = exact_kmeans([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], 2)
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"k is {k}"):
            path.levels(k)


def test_sample_weights_combine_frequency_and_magnitude():
    weights = sample_weights([10, 0, 5, 1], [-0.5, 9.0, 1.0, 2.0], sigma=0.2)
    np.testing.assert_allclose(weights, [0.2 + 0.8 * 0.25, 0.0, 0.1 + 0.8 * 0.5, 0.02 + 0.8])
    np.testing.assert_array_equal(sample_weights([4, 2], [1.0, 3.0], sigma=1.0), [1.0, 0.5])
    np.testing.assert_array_equal(sample_weights([4], [0.0]), [0.2])
    with pytest.raises(ValueError, match="sigma"):
        sample_weights([1], [1.0], sigma=1.5)
    with pytest.raises(ValueError, match="one length"):
        sample_weights([1, 2], [1.0])


def test_lloyd_is_reproducible_and_bounded_by_the_points():
    points, weights = histogram(6)
    np.testing.assert_array_equal(
        lloyd_kmeans(points, weights, 8, seed=1), lloyd_kmeans(points, weights, 8, seed=1)
    )
    np.testing.assert_array_equal(lloyd_kmeans([0.0, 1.0, 5.0], [1.0, 1.0, 0.0], 4), [0.0, 1.0])
    for bad in (([0.0], [1.0, 2.0], 1), ([0.0], [0.0], 1), ([0.0], [1.0], 0)):
        with pytest.raises(ValueError):
            lloyd_kmeans(*bad)


@pytest.mark.parametrize("spread", [1.0, 1e-200])
def test_seeds_are_distinct_points(spread):
    points = spread * np.arange(12.0)
    levels = seed_levels(points, np.ones(12), 12, np.random.default_rng(7))
    np.testing.assert_array_equal(levels, points)
