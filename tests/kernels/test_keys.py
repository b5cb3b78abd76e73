"""The key space: bins, representatives, edges and windows."""

import numpy as np
import pytest

from dsq_ckpt.kernels.keys import ALPHA, FULL, KeyWindow

NARROW = KeyWindow(8000, 8200)
SPECIALS = np.array([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, np.inf, -np.inf, np.nan], np.float32)


def random_bits(seed: int, n: int) -> np.ndarray:
    """fp32 of random bit patterns: every exponent, NaN included."""
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("lo, hi", [(63, 100), (100, 100), (101, 100), (64, 16321)])
def test_window_outside_the_normal_numbers_is_refused(lo, hi):
    with pytest.raises(ValueError, match="key window"):
        KeyWindow(lo, hi)


def test_alpha_is_inside_the_papers_one_percent():
    assert ALPHA == 1 / 129


@pytest.mark.parametrize("window", [FULL, NARROW, KeyWindow(64, 65), KeyWindow(16319, 16320)], ids=str)
def test_bins_of_special_values(window):
    over = window.n - 2
    expected = [0, window.n, 0, window.n, 0, over + 1, window.n + over + 1, over + 1]
    np.testing.assert_array_equal(window.bin_of(SPECIALS), expected)


@pytest.mark.parametrize("window", [FULL, NARROW], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_value_lies_in_the_edges_of_its_bin(window, seed):
    x = random_bits(seed, 100_000)
    x = np.concatenate((x[~np.isnan(x)], SPECIALS[:-1]))
    bins = window.bin_of(x)
    low, high = (edge[bins] for edge in window.edges())
    positive = ~np.signbit(x)
    finite = np.isfinite(x)
    assert (low <= x).all() and (x <= high).all()
    assert (x[positive & finite] < high[positive & finite]).all()
    # Negative bins are mirrored, so they leave out the lower edge.
    assert (low[~positive & finite] < x[~positive & finite]).all()


@pytest.mark.parametrize("seed", [3, 4])
def test_representative_is_within_alpha(seed):
    x = random_bits(seed, 200_000)
    x = x[np.isfinite(x) & (np.abs(x) >= np.finfo(np.float32).tiny)].astype(np.float64)
    estimate = FULL.values()[FULL.bin_of(x.astype(np.float32))]
    assert (np.abs(estimate - x) <= ALPHA * np.abs(x) * (1 + 1e-12)).all()


def test_representative_is_within_alpha_at_both_ends_of_every_bin():
    low, high = (edge[1 : FULL.n - 2] for edge in FULL.edges())
    value = FULL.values()[1 : FULL.n - 2]
    assert (np.abs(value - low) <= ALPHA * low * (1 + 1e-12)).all()
    assert (np.abs(value - high) <= ALPHA * high * (1 + 1e-12)).all()


@pytest.mark.parametrize("window", [FULL, NARROW], ids=str)
def test_bins_of_either_sign_ascend_by_magnitude(window):
    """Fits go through bins by magnitude without sorting them."""
    positive, negative = np.arange(window.size).reshape(2, -1)
    order = np.stack((positive, negative), 1).reshape(-1)
    np.testing.assert_array_equal(np.argsort(np.abs(window.values()), kind="stable"), order)


@pytest.mark.parametrize("window", [FULL, NARROW], ids=str)
def test_arrays_of_a_window_are_shared_and_cannot_be_changed(window):
    for array in (window.values(), *window.edges(), window.bit_values()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
    assert KeyWindow(window.lo, window.hi).values() is window.values()


def test_values_of_the_shared_bins():
    positive, negative = NARROW.values().reshape(2, -1)
    np.testing.assert_array_equal(positive, -negative)
    assert positive[0] == 0.0 and positive[-1] == np.inf
    assert positive[-2] == NARROW.edges()[0][NARROW.n - 2] == NARROW.edges()[1][NARROW.n - 3]


@pytest.mark.parametrize("window", [FULL, NARROW], ids=str)
def test_bit_values_are_the_bits_in_the_middle_of_the_bin(window):
    resolved = slice(1, window.n - 2)
    centre = (window.bit_values()[resolved] * 2**23).astype(np.uint32)
    x = centre.view(np.float32)
    np.testing.assert_array_equal(window.bin_of(x), np.arange(window.n)[resolved])
    np.testing.assert_array_equal(window.bin_of(-x), window.n + np.arange(window.n)[resolved])
    np.testing.assert_array_equal(centre & 0x1FFFF, 0x10000)


def test_bin_of_keeps_shape_and_refuses_other_dtypes():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(FULL.bin_of(x.T), FULL.bin_of(x).T)
    with pytest.raises(TypeError, match="float64"):
        FULL.bin_of(x.astype(np.float64))
