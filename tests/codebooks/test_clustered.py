"""Levels that follow the values (GOBO, LC-Checkpoint), against their definitions written out for raw values."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt.codebooks.exponent import exponent_buckets
from dsq_ckpt.codebooks.gobo import gobo_outliers, l1_kmeans
from dsq_ckpt.kernels.keys import ALPHA, FULL
from tests.codebooks.histograms import degenerate, histograms, normal, sketched


def l1_norm(values, counts, levels):
    return math.fsum(c * min(abs(v - level) for level in levels) for v, c in zip(values, counts, strict=True))


# GOBO


@given(histograms(most=1000), st.floats(-20, 5))
def test_outliers_by_formula(histogram, threshold):
    values, counts = histogram
    x = np.repeat(values, counts)
    deviation = float(np.std(x / np.abs(x).max())) * np.abs(x).max() if len(values) > 1 else 0.0
    outliers = gobo_outliers(values, counts, threshold)
    assert outliers.shape == values.shape and outliers.dtype == np.bool_
    if not deviation:
        assert not outliers.any()
        return
    for value, outlier in zip(values, outliers, strict=True):
        z = (value - math.fsum(x) / len(x)) / deviation
        log_density = math.log(1 / (deviation * math.sqrt(2 * math.pi))) - z * z / 2
        assert outlier == (log_density < threshold) or abs(log_density - threshold) < 1e-6


@pytest.mark.parametrize("seed", [0, 1])
def test_outliers_of_raw_values(seed):
    """Normal weights: past (2 (4 - ln(s sqrt(2 pi))))**0.5 = 3.74 standard deviations, 0.02 % of them."""
    x = np.append(normal(seed, 200_000), np.float32([0.2, -0.3]))
    values, counts, *_ = sketched(x)
    out = gobo_outliers(values, counts)
    assert out[0] and out[-1] and counts[out].sum() / len(x) == pytest.approx(1.9e-4, rel=0.4)
    edge = x.std() * math.sqrt(2 * (4 - math.log(x.std() * math.sqrt(2 * math.pi))))
    assert np.abs(values[out]).min() == pytest.approx(edge, rel=0.02)


def test_outliers_depend_on_units():
    values, counts = np.linspace(-1, 1, 101), np.ones(101, int)
    assert not gobo_outliers(values, counts).any()
    assert gobo_outliers(values * 100, counts).all(), "no density is above e**-4"
    assert not gobo_outliers(values * 2.0**-126, counts).any()
    for value in np.random.default_rng(0).uniform(1e37, 1e38, 20):
        assert not gobo_outliers([value], [7]).any(), "equal elements are none, whatever the rounding of their mean"


def raw_gobo(x, bins):
    """GOBO on the elements themselves: first centroids, and those of the smallest L1 norm on the way down."""
    x = np.sort(x)
    cuts = [j * len(x) // bins for j in range(bins + 1)]
    first = np.unique([x[a:b].mean() for a, b in pairwise(cuts)])
    best, best_norm, centroids = first, np.inf, first
    while True:
        distance = np.abs(x[:, None] - centroids)
        own, norm = distance.argmin(1), distance.min(1).sum()
        if norm >= best_norm:
            return first, best, best_norm
        best, best_norm = centroids, norm
        centroids = np.array([x[own == j].mean() if (own == j).any() else centroids[j] for j in range(len(centroids))])


@pytest.mark.parametrize("bins", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_kmeans_matches_raw_elements(seed, bins):
    rng = np.random.default_rng(seed)
    values = np.sort(rng.standard_normal(30) * 10.0 ** rng.integers(-6, 6)) + (seed == 5) * 1e3
    counts = rng.integers(1, 40, 30)
    first, best, norm = raw_gobo(np.repeat(values, counts), bins)
    np.testing.assert_allclose(l1_kmeans(values, counts, bins, 0), first, rtol=1e-9)
    levels = l1_kmeans(values, counts, bins, tolerance=0.0)
    np.testing.assert_allclose(levels, best, rtol=1e-9)
    assert l1_norm(values, counts, levels) == pytest.approx(norm, rel=1e-9)


@settings(deadline=None)
@given(histograms(largest=9), st.integers(1, 6))
def test_l1_never_rises_and_is_no_better_than_the_best(histogram, bins):
    values, counts = histogram
    norms = [l1_norm(values, counts, l1_kmeans(values, counts, bins, n, 0.0)) for n in (0, 1, 2, 3, 1000)]
    noise = 1e-12 * np.abs(values).max() * counts.sum()
    assert all(later <= earlier + noise for earlier, later in pairwise(norms))
    # The best of all: intervals about their medians.
    optimum = np.inf
    for cuts in combinations(range(1, len(values)), min(bins, len(values)) - 1):
        medians = [np.median(np.repeat(values[part], counts[part])) for part in np.split(np.arange(len(values)), cuts)]
        optimum = min(optimum, l1_norm(values, counts, medians))
    assert norms[-1] >= optimum - noise
    soft = l1_norm(values, counts, l1_kmeans(values, counts, bins))
    assert norms[-1] - noise <= soft <= norms[0] + noise


def test_soft_termination_costs_little():
    values, counts, *_ = sketched(normal(3, 100_000))
    first, exact, soft = (
        l1_norm(values, counts, l1_kmeans(values, counts, 16, iterations, tolerance))
        for iterations, tolerance in ((0, 0.0), (1000, 0.0), (1000, 1e-3))
    )
    assert exact < soft <= 1.01 * exact < 0.97 * first
    assert l1_norm(values, counts, l1_kmeans(values, counts, 16)) <= 1.001 * exact


@pytest.mark.parametrize("seed", [0, 1])
def test_kmeans_of_raw_values(seed):
    x = normal(seed, 5000)
    values, counts, *_ = sketched(x)
    levels = l1_kmeans(values, counts, 8, tolerance=0.0)
    norms = [np.abs(x[:, None] - lv).min(1).sum() for lv in (levels, raw_gobo(x.astype(np.float64), 8)[1])]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


@degenerate
def test_kmeans_of_degenerate_layers(histogram):
    values, counts = np.array(histogram[0]), np.array(histogram[1])
    assert not gobo_outliers(values[:1], counts[:1]).any()
    for bins in (1, 2, 3, 254):
        levels = l1_kmeans(values, counts, bins)
        assert len(levels) <= bins and (np.diff(levels) > 0).all()
        assert values[0] <= levels[0] and levels[-1] <= values[-1]
        np.testing.assert_array_equal(levels, l1_kmeans(values, counts, bins))
        if bins >= len(values):
            np.testing.assert_array_equal(levels, values)
    for wrong in ((0,), (8, -1), (8, 1, -1.0), (8, 1, np.nan)):
        with pytest.raises(ValueError, match=r"bins|max_iterations"):
            l1_kmeans(values, counts, *wrong)


def test_first_centroids_lie_within_their_groups():
    values = [-(2.0**127), 1.0, 2.0, 3.0, 2.0**127]  # next to which sums forget the rest
    assert l1_kmeans(values, [1] * 5, 4, 0).tolist() == [-(2.0**127), 1.0, 2.0, 2.0**126]


def test_groups_within_one_value_share_a_centroid():
    assert l1_kmeans([0.0, 1.0, 2.0, 3.0], [1000, 1, 1, 1], 3).tolist() == pytest.approx([0.0, 2.0])


# Exponent


def raw_buckets(x, bits):
    """LC-Checkpoint on the elements themselves: (sign, exponent) -> level, for the buckets kept."""
    buckets = {}
    for value in x:
        if value:
            buckets.setdefault((1 if value > 0 else -1, math.frexp(value)[1] - 1), []).append(value)
    first = sorted(buckets, key=lambda b: (-b[1], -len(buckets[b]), -b[0]))[: 2**bits - 1]
    return {bucket: (min(buckets[bucket]) + max(buckets[bucket])) / 2 for bucket in first}


def decoded(x, buckets):
    return [buckets.get((1 if v > 0 else -1, math.frexp(v)[1] - 1), 0.0) if v else 0.0 for v in x]


@given(histograms(largest=30), st.integers(1, 7))
def test_buckets_by_definition(histogram, bits):
    values, counts = histogram
    levels, codes = exponent_buckets(values, values, values, counts, bits)
    assert codes.dtype == np.uint8 and codes.shape == values.shape and len(levels) <= 2**bits - 1
    assert (np.diff(levels) > 0).all() and (levels != 0).all() and (codes[values == 0] == 0).all()
    assert set(codes) - {0} == set(range(1, len(levels) + 1)), "no code without a value"
    buckets = raw_buckets(np.repeat(values, counts).tolist(), bits)
    np.testing.assert_array_equal(np.append(0.0, levels)[codes], decoded(values.tolist(), buckets))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_buckets_of_raw_values(seed, bits):
    x = np.append(normal(seed, 4000), np.zeros(50, np.float32))
    values, counts, low, high = sketched(x)
    levels, codes = exponent_buckets(values, low, high, counts, bits)
    bin_of = np.searchsorted(low, x.astype(np.float64), side="right") - 1
    bin_of[x < 0] = np.searchsorted(high, x[x < 0].astype(np.float64), side="left")
    expected = np.array(decoded(x.tolist(), raw_buckets(x.astype(np.float64).tolist(), bits)))
    result = np.append(0.0, levels)[codes[bin_of]]
    np.testing.assert_allclose(result, expected, rtol=2 * ALPHA, atol=0)
    coded = codes[bin_of] > 0
    assert (result[coded] / x[coded] > 0.5).all() and (result[coded] / x[coded] < 2).all()


def test_ties_of_one_exponent():
    values = np.array([-4.0, -1.5, -1.0, 1.0, 1.25])
    assert exponent_buckets(values, values, values, np.array([1, 1, 1, 1, 1]), 1)[1].tolist() == [1, 0, 0, 0, 0]
    for counts, expected in (
        ([1, 1], [0, 1]),  # equally many: the positive one
        ([2, 1], [1, 0]),  # more elements first
        ([1, 2], [0, 1]),
    ):
        pair = np.array([-1.0, 1.0])
        assert exponent_buckets(pair, pair, pair, np.array(counts), 1)[1].tolist() == expected
    levels, codes = exponent_buckets(values, values, values, np.array([1, 1, 2, 1, 1]), 2)
    assert levels.tolist() == [-4.0, -1.25, 1.125] and codes.tolist() == [1, 2, 2, 3, 3]


@degenerate
def test_buckets_of_degenerate_layers(histogram):
    values, counts = np.array(histogram[0]), np.array(histogram[1])
    for bits in (1, 3, 7):
        levels, codes = exponent_buckets(values, values, values, counts, bits)
        again = exponent_buckets(values, values, values, counts, bits)
        np.testing.assert_array_equal(levels, again[0])
        np.testing.assert_array_equal(codes, again[1])
        assert len(levels) == min(len({(v > 0, math.frexp(v)[1]) for v in values if v}), 2**bits - 1)
        assert (codes[values == 0] == 0).all()
    if not values.any():
        assert levels.size == 0 and not codes.any()


def test_edges_are_checked():
    one = np.array([1])
    exponent_buckets([1.5], [1.0], [2.0], one, 3)
    exponent_buckets([-1.5], [-2.0], [-1.0], one, 3)
    exponent_buckets([0.0], [-(2.0**-126)], [2.0**-126], one, 3)
    values, (low, high) = FULL.values(), FULL.edges()
    order = np.argsort(values)[2:-2]  # all but over and non-finite bins
    order = order[np.unique(values[order], return_index=True)[1]]
    levels, _ = exponent_buckets(values[order], low[order], high[order], np.ones(len(order), int), 7)
    assert len(levels) == 127 and np.abs(levels).max() == pytest.approx(1.5 * 2.0**127, rel=ALPHA)
    for low_edge, high_edge, message in (
        (0.5, 2.0, "exponent"), (1.0, 3.0, "exponent"), (0.0, 2.0, "exponent"), (1.6, 2.0, "outside"),
    ):
        with pytest.raises(ValueError, match=message):
            exponent_buckets([1.5], [low_edge], [high_edge], one, 3)
    with pytest.raises(ValueError, match="long"):
        exponent_buckets([1.5], [1.0, 1.0], [2.0], one, 3)
    for bits in (0, 8):
        with pytest.raises(ValueError, match="bits"):
            exponent_buckets([1.5], [1.5], [1.5], one, bits)
