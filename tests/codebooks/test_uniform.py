"""Levels at equal distances (QD-Compressor, Check-N-Run), against their definitions written out for raw values."""

import itertools
import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsq_ckpt.codebooks.algorithms.greedy_range import adaptive_range
from dsq_ckpt.codebooks.exponent import exponent_buckets
from dsq_ckpt.codebooks.gobo import gobo_outliers, l1_kmeans
from dsq_ckpt.codebooks.histogram import as_histogram
from dsq_ckpt.codebooks.uniform import entropy_bins, uniform_levels
from tests.codebooks.histograms import SCALES, degenerate, histograms, normal, sketched, squared_error


@pytest.mark.parametrize("values, counts", [
    ([], []), ([1.0, 1.0], [1, 1]), ([2.0, 1.0], [1, 1]), ([1.0, np.inf], [1, 1]), ([np.nan], [1]), ([1.0], [0]),
    ([1.0, 2.0], [1]), ([[1.0]], [[1]]),
])
def test_counts_that_are_no_histogram_are_refused(values, counts):
    for function in (
        as_histogram, gobo_outliers, lambda v, c: entropy_bins(v, c, 8, 16), lambda v, c: l1_kmeans(v, c, 8),
        lambda v, c: adaptive_range(v, c, 8, 10, 0.1), lambda v, c: exponent_buckets(v, v, v, c, 3),
    ):
        with pytest.raises(ValueError, match=r"values|counts"):
            function(values, counts)


# Uniform


@given(st.integers(-1000, 1000), st.integers(0, 1000), st.integers(1, 254), SCALES, st.data())
def test_uniform_is_off_by_half_a_step_at_most(start, span, bins, scale, data):
    low, high = start * scale, (start + span) * scale
    levels = uniform_levels(low, high, bins)
    assert len(levels) == (bins if span else 1) and (np.diff(levels) > 0).all()
    if bins > 1:
        assert (levels[0], levels[-1]) == (low, high)
    x = data.draw(st.floats(low, high))
    step = (high - low) / max(bins - 1, 1)
    assert np.abs(levels - x).min() <= step / 2 + 1e-12 * max(abs(low), abs(high))


def test_uniform_where_there_is_no_room():
    up = float(np.nextafter(1.0, 2.0))
    assert uniform_levels(1.0, up, 16).tolist() == [1.0, up]
    assert uniform_levels(-3.0, -3.0, 16).tolist() == [-3.0]
    assert uniform_levels(-1.0, 3.0, 1).tolist() == [1.0]
    for low, high, bins in ((1.0, 0.0, 2), (0.0, np.inf, 2), (np.nan, 0.0, 2), (0.0, 1.0, 0)):
        with pytest.raises(ValueError, match=r"range|bins"):
            uniform_levels(low, high, bins)


@given(histograms(most=1000), st.integers(1, 64), st.integers(1, 64))
def test_entropy_bins_by_definition(histogram, one, other):
    values, counts = histogram
    min_bins, max_bins = sorted((one, other))
    low, high = values[0], values[-1]
    levels = np.linspace(low, high, max_bins) if max_bins > 1 else [low]
    choices = []
    for value in values:
        distances = [abs(value - level) for level in levels]
        closest = min(distances) + 1e-9 * (high - low)  # between two levels rounding decides
        choices.append([cell for cell, distance in enumerate(distances) if distance <= closest])
    allowed = set()
    for cells in itertools.product(*choices):
        held = Counter()
        for cell, count in zip(cells, counts, strict=True):
            held[cell] += int(count)
        entropy = -sum(n / counts.sum() * math.log2(n / counts.sum()) for n in held.values())
        assume(0.01 < entropy % 1 < 0.99 or entropy < 1e-12)
        allowed.add(min(max(2 ** math.ceil(round(entropy, 9)), min_bins), max_bins))
    assert entropy_bins(values, counts, min_bins, max_bins) in allowed


def test_entropy_of_known_layers():
    even = np.arange(64.0), np.full(64, 5)
    assert entropy_bins(*even, 8, 64) == 64, "six bits exactly"
    assert entropy_bins(*even, 8, 48) == 48 and entropy_bins(*even, 64, 256) == 64
    outliers = np.append(np.linspace(-1, 1, 999), 1e4), np.ones(1000, int)
    assert entropy_bins(*outliers, 8, 256) == 8 and entropy_bins(*outliers, 1, 256) == 2
    with pytest.raises(ValueError, match="min_bins"):
        entropy_bins(*even, 16, 8)


@pytest.mark.parametrize("seed", [0, 1])
def test_entropy_bins_of_raw_values(seed):
    x = normal(seed, 200_000)
    values, counts, *_ = sketched(x)
    raw = np.unique(x.astype(np.float64), return_counts=True)
    assert entropy_bins(values, counts, 8, 256) == entropy_bins(*raw, 8, 256) == 128


@degenerate
def test_entropy_bins_of_degenerate_layers(histogram):
    bins = entropy_bins(*histogram, 1, 256)
    assert 1 <= bins <= 2 ** math.ceil(math.log2(len(histogram[0])))
    assert bins == entropy_bins(*histogram, 1, 256) and entropy_bins(*histogram, 8, 256) == max(bins, 8)


# Adaptive


def plain_greedy(values, counts, bins, step_bins, search_range):
    """The search on explicit levels; also how close the closest of its decisions was, relative to the errors."""
    first, last = values[0], values[-1]
    stride = (last - first) / step_bins

    def error(below, above):
        return squared_error(values, counts, np.linspace(first + below * stride, last - above * stride, bins))

    below = above = 0
    seen, margin = [error(0, 0)], np.inf
    while (below + above) < search_range * step_bins - 1e-9 and below + above < step_bins - 1:
        without_low, without_high = error(below + 1, above), error(below, above + 1)
        top = max(without_low, without_high)
        margin = min(margin, abs(without_low - without_high) / top) if top else 0.0
        below, above = (below + 1, above) if without_low < without_high else (below, above + 1)
        seen.append(min(without_low, without_high))
    return min(seen), margin


@settings(deadline=None)
@given(histograms(), st.integers(2, 6), st.integers(1, 12), st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 0.99]))
def test_adaptive_matches_plain_greedy(histogram, bins, step_bins, search_range):
    low, high = adaptive_range(*histogram, bins, step_bins, search_range)
    assert histogram[0][0] <= low <= high <= histogram[0][-1]
    error = squared_error(*histogram, uniform_levels(low, high, bins))
    full = squared_error(*histogram, uniform_levels(histogram[0][0], histogram[0][-1], bins))
    unit = np.abs(histogram[0]).max() ** 2 * 1e-13
    assert error <= full * (1 + 1e-9) + unit, "never worse than the full range"
    expected, margin = plain_greedy(*histogram, bins, step_bins, search_range)
    if margin > 1e-9:
        assert error == pytest.approx(expected, rel=1e-9, abs=unit)


def test_adaptive_ties_give_up_the_upper_end():
    values, counts = np.array([-4.0, -1.0, 1.0, 4.0]), np.array([1, 500, 500, 1])
    assert adaptive_range(values, counts, 2, 8, 0.1) == (-4.0, 3.0)
    assert adaptive_range(values, counts, 2, 8, 0.25) == (-3.0, 3.0)
    assert adaptive_range(values, counts, 2, 8, 0.0) == (-4.0, 4.0)
    assert adaptive_range(values, counts, 2, 1, 0.5) == (-4.0, 4.0), "one stride is always left"
    assert adaptive_range([0.0, 2.0, 4.0], [1, 1, 1], 2, 2, 0.5) == (0.0, 4.0), "no better: the wider range"


def test_adaptive_gives_up_whole_strides():
    values, counts = [0.0, 40.0, 100.0], [1000, 1000, 1]
    for search_range, low in ((0.07, 7.0), (0.071, 8.0), (0.2, 20.0), (0.5, 20.0)):  # 0.07 * 100 is above 7
        assert adaptive_range(values, counts, 2, 100, search_range)[0] == low


def test_adaptive_gives_up_outliers():
    values = np.append(np.linspace(-1, 1, 1001), 1.9)
    low, high = adaptive_range(values, np.append(np.full(1001, 50), 1), 8, 100, 0.5)
    assert -1.0 <= low < -0.8 and 0.8 < high < 1.1


@pytest.mark.parametrize("seed", [0, 1])
def test_adaptive_of_raw_values(seed):
    x = normal(seed, 3000)
    raw = np.unique(x.astype(np.float64), return_counts=True)
    values, counts, *_ = sketched(x)
    errors = [
        squared_error(*raw, uniform_levels(*adaptive_range(*histogram, 16, 25, 0.5), 16))
        for histogram in (raw, (values, counts))
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.1)
    assert errors[1] < squared_error(*raw, uniform_levels(raw[0][0], raw[0][-1], 16))


def test_adaptive_is_fast():
    rng = np.random.default_rng(0)
    values, counts = np.sort(rng.standard_normal(30_000)), rng.integers(1, 1000, 30_000)
    adaptive_range(values[:2], counts[:2], 8, 10, 0.5)
    taken = []
    for _ in range(5):
        start = time.thread_time()
        adaptive_range(values, counts, 254, 100, 0.5)
        taken.append(time.thread_time() - start)
    assert min(taken) < 0.05


@degenerate
def test_adaptive_of_degenerate_layers(histogram):
    values, counts = histogram
    for step_bins, search_range in ((10, 0.5), (100, 0.99), (1, 0.0)):
        low, high = adaptive_range(values, counts, 8, step_bins, search_range)
        assert (low < high or len(values) == 1) and values[0] <= low <= high <= values[-1]
        assert (low, high) == adaptive_range(values, counts, 8, step_bins, search_range)
    for wrong in ((1, 10, 0.5), (8, 0, 0.5), (8, 10, 1.0), (8, 10, -0.1), (8, 10, np.nan)):
        with pytest.raises(ValueError, match=r"bins|search_range"):
            adaptive_range(values, counts, *wrong)
