"""Importance, thresholds and classes against NumPy and against sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsq_ckpt import kernels
from dsq_ckpt.kernels.importance import NORMAL, PROTECT, PRUNE, classify, compute_importance, importance_thresholds
from dsq_ckpt.kernels.keys import FULL, KeyWindow

SIZES = [0, 1, 3, 64, 4097, 100_003]
EDGE = 2.0**128


def floats(seed: int, n: int) -> np.ndarray:
    """Ordinary values and random bit patterns: subnormals, infinities, NaN, both zeros."""
    rng = np.random.default_rng(seed)
    wild = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    return np.where(rng.random(n) < 0.7, (0.02 * rng.standard_normal(n)).astype(np.float32), wild)


def counts_of(values: np.ndarray) -> np.ndarray:
    counts = np.zeros(FULL.size, np.int64)
    kernels.sketch(values, FULL.lo, FULL.hi, 1.0, counts)
    return counts


def reference_classes(values: np.ndarray, prune_below: float, protect_from: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = values.astype(np.float64)
    classes = np.where(wide < prune_below, PRUNE, NORMAL)
    if protect_from < math.inf:
        classes[wide >= protect_from] = PROTECT
    return classes.astype(np.uint8)


def by_bins(values: np.ndarray, protect: float, prune: float) -> np.ndarray:
    """Classes from the bins themselves, one after the other from either end, as far as the fractions go."""
    bins = FULL.bin_of(np.abs(values))
    classes = np.zeros(values.size, np.uint8)
    for number in np.unique(bins):
        if np.count_nonzero(bins <= number) > prune * values.size or number > FULL.n - 3:
            break
        classes[bins == number] = PRUNE
    beyond = np.count_nonzero(bins > FULL.n - 3)
    for number in np.unique(bins)[::-1]:
        if beyond > protect * values.size or np.count_nonzero(bins >= number) > protect * values.size:
            break
        classes[bins == number] = PROTECT
    classes[np.isnan(values)] = NORMAL
    return classes


@pytest.mark.parametrize("n", SIZES)
def test_importance(n):
    weight, average = floats(1, n), floats(2, n)
    with np.errstate(all="ignore"):
        expected = np.abs(weight * average)
    importance = compute_importance(weight, average)
    assert importance.dtype == np.float32
    np.testing.assert_array_equal(importance, expected)
    assert not np.signbit(importance[~np.isnan(importance)]).any()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("limits", [
    (0.0, math.inf), (0.01, 0.03), (EDGE, math.inf), (math.inf, math.inf), (0.0, EDGE), (0.02, 0.01), (1 / 3, 2 / 3),
    (1e-45, 1e-40), (2.0**-126, 3.3e38), (1e300, 1e300),
])
def test_classes(n, limits):
    values = np.abs(floats(3, n))
    classes = classify(values, *limits)
    assert classes.dtype == np.uint8
    np.testing.assert_array_equal(classes, reference_classes(values, *limits))


def test_thresholds_between_two_fp32_numbers():
    """A threshold is not rounded to fp32 before it is compared."""
    before, after = np.float32(0.1), np.nextafter(np.float32(0.1), np.float32(1))
    values = np.array([before, after], np.float32)
    for part in (0.25, 0.75):
        between = (1 - part) * float(before) + part * float(after)
        assert classify(values, between, math.inf).tolist() == [PRUNE, NORMAL]
        assert classify(values, 0.0, between).tolist() == [NORMAL, PROTECT]
    assert classify(values, float(before), float(after)).tolist() == [NORMAL, PROTECT]


FRACTIONS = st.tuples(
    st.sampled_from([0.0, 0.001, 0.005, 0.1, 0.3, 0.5, 1.0]) | st.floats(0, 1), st.floats(0, 1)
).map(lambda pair: (pair[0], (1 - pair[0]) * pair[1] * 0.999))
VALUES = hnp.arrays(np.float32, st.integers(0, 200), elements=st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, 1.01, -1.0, 0.5, 1e-40, math.inf, math.nan, 3.4e38]),
))


@settings(max_examples=75, deadline=None)
@given(VALUES, FRACTIONS, st.booleans())
def test_thresholds(values, fractions, swap):
    check_thresholds(values, fractions, swap)


@pytest.mark.campaign
@settings(max_examples=2000, deadline=None)
@given(VALUES, FRACTIONS, st.booleans())
def test_many_thresholds(values, fractions, swap):
    check_thresholds(values, fractions, swap)


def check_thresholds(values, fractions, swap):
    protect, prune = fractions[::-1] if swap else fractions
    counts = counts_of(values)
    prune_below, protect_from = importance_thresholds(counts, protect, prune)
    magnitudes = np.abs(values)
    classes = classify(magnitudes, prune_below, protect_from)
    np.testing.assert_array_equal(classes, by_bins(values, protect, prune))
    assert np.count_nonzero(classes == PRUNE) <= prune * values.size
    assert np.count_nonzero(classes == PROTECT) <= protect * values.size
    # An edge: all elements of a bin are of one class, unless it is that of infinities and NaN.
    bins = FULL.bin_of(magnitudes)
    for number in np.unique(bins[np.isfinite(values)]):
        assert len(set(classes[bins == number])) == 1
    assert (prune_below == 0.0) == (not (classes == PRUNE).any())
    assert np.isnan(values).any() or (protect_from == math.inf) == (not (classes == PROTECT).any())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("protect, prune", [(0.0005, 0.1), (0.005, 0.4), (0.1, 0.9), (0.0, 0.5), (0.5, 0.0)])
def test_thresholds_are_quantiles(protect, prune, seed):
    """The fractions but for less than a bin, 0.3 % of such data at most; parts and signs do not matter."""
    rng = np.random.default_rng(seed)
    values = np.abs(rng.lognormal(0, 3, 50_000) * rng.standard_normal(50_000)).astype(np.float32)
    signed = values * np.where(rng.random(values.size) < 0.5, -1, 1).astype(np.float32)
    counts = sum(counts_of(part) for part in np.array_split(values, 7))
    limits = importance_thresholds(counts, protect, prune)
    assert limits == importance_thresholds(counts_of(signed), protect, prune)
    np.testing.assert_array_equal(classify(values, *limits), by_bins(values, protect, prune))
    assert prune - 0.003 < np.mean(values < limits[0]) <= prune
    assert protect - 0.003 < np.mean(values >= limits[1]) <= protect
    assert math.isclose(limits[0], np.quantile(values, prune), rel_tol=2 / 64, abs_tol=values.min())
    assert protect < 0.01 or math.isclose(limits[1], np.quantile(values, 1 - protect), rel_tol=2 / 64)


def test_thresholds_at_the_extremes():
    values = np.array([0.0, 1e-3, 2.0, 3.4e38], np.float32)
    assert importance_thresholds(counts_of(values), 0.0, 1.0) == (EDGE, math.inf)
    assert importance_thresholds(counts_of(values), 1.0, 0.0) == (0.0, 0.0)
    assert importance_thresholds(counts_of(values[:0]), 0.5, 0.5) == (0.0, math.inf)
    infinite = np.array([math.inf, 1.0, 1.0, 1.0], np.float32)
    assert importance_thresholds(counts_of(infinite), 0.3, 0.0) == (0.0, EDGE)
    assert importance_thresholds(counts_of(infinite), 0.2, 0.0) == (0.0, math.inf)


def test_wrong_arguments():
    good = np.zeros(FULL.size, np.int64)
    values = np.ones(4, np.float32)
    for fractions in [(-0.1, 0.0), (0.0, 1.1), (0.6, 0.6), (math.nan, 0.0)]:
        with pytest.raises(ValueError, match="fractions"):
            importance_thresholds(good, *fractions)
    for bad in (good[:-1], good.astype(np.int32), np.zeros(KeyWindow(64, 65).size, np.int64)):
        with pytest.raises(ValueError, match="counts"):
            importance_thresholds(bad, 0.1, 0.1)
    with pytest.raises(ValueError, match="average"):
        compute_importance(values, values[:3])
    with pytest.raises(ValueError, match="weight"):
        compute_importance(values.astype(np.float64), values)
    with pytest.raises(ValueError, match="importance"):
        classify(values[::2], 0.0, 1.0)
    with pytest.raises(ValueError, match="not numbers"):
        classify(values, math.nan, 1.0)
