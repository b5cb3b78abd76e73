"""Fitting a group: counts are exact, tables nearest or better, cells hold their values, windows grow with the data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt import kernels
from dsq_ckpt.codebooks.kmeans import KMeans
from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.kernels.keys import ALPHA, FULL
from dsq_ckpt.quantization.codebook import Codebook, GroupSketch, fit_group
from dsq_ckpt.quantization.codebook.table import code_bits, entropy_bits

CONFIGS = [
    Lattice(step=0.5), Lattice(step=0.2, rate_distortion=0.0), Lattice(step=1.5, bins=4),
    KMeans(bins=2), KMeans(bins=16, prune=0.2), KMeans(bins=254, protect=0.0),
    KMeans(fit="lloyd", bins=8, prune=0.2, protect=0.005, sigma=0.2, rate_distortion=0.0),
]
LOG = KMeans(bins=6, protect=0.0, domain="log")


def sketched(x, parent=None, book=None):
    if book is None:
        counts = np.zeros((1, FULL.size), np.int64)
        kernels.sketch(x, FULL.lo, FULL.hi, 1.0, counts[0])
        return GroupSketch(counts, FULL)
    counts = np.zeros((book.symbols + 1, book.window.size), np.int64)
    kernels.joint_sketch(x, parent, book.symbols, book.window.lo, book.window.hi, 1.0, counts)
    return GroupSketch(counts, book.window)


def quantized(x, fitted, parent=None):
    codes = np.empty(x.size, np.uint8)
    window = fitted.window
    kernels.quantize(
        x, parent if fitted.uses_parent else None, fitted.table.shape[0] - 1, window.lo, window.hi, 1.0, fitted.table,
        codes,
    )
    return codes


def weights(seed, count=20_000):
    return np.random.default_rng(seed).standard_t(4, count).astype(np.float32) * np.float32(0.02)


@pytest.mark.parametrize("config", [*CONFIGS, LOG], ids=lambda c: f"{c.fit}{c.bins}")
@pytest.mark.parametrize("seed", [0, 1])
def test_a_chain_of_two(config, seed):
    first = weights(seed)
    second = first + np.random.default_rng(seed + 9).normal(0, 0.002, first.size).astype(np.float32)
    if config is LOG:
        first, second = np.square(first), np.square(second)
    one = fit_group(sketched(first), config, None)
    codes = quantized(first, one)
    assert (np.bincount(codes, minlength=one.codebook.symbols) == one.counts[0]).all(), "counts are exact"
    two = fit_group(sketched(second, codes, one.codebook), config, one.codebook)
    later = quantized(second, two, codes)
    joint = np.zeros_like(two.counts)
    np.add.at(joint, (codes if two.uses_parent else np.zeros_like(codes), later), 1)
    assert (joint == two.counts).all()
    assert two.bits == pytest.approx(entropy_bits(joint))
    assert two.bits <= one.bits
    for x, c, fitted in ((first, codes, one), (second, later, two)):
        book = fitted.codebook
        plain = c != book.protected
        value = np.abs(x).view(np.uint32) / 2.0**23 if book.domain == "log" else x.astype(np.float64)
        inside = plain & ((c > 0) | (book.domain == "linear"))
        assert (value[inside] >= book.cell_low[c[inside]]).all() and (value[inside] <= book.cell_high[c[inside]]).all()
        measured = np.mean((x[plain] - book.levels[c[plain]]) ** 2)
        assert measured == pytest.approx(fitted.error, rel=0.1), "the error is known without a pass over the data"
        assert fitted.mean_square == pytest.approx(np.mean(np.square(x, dtype=np.float64)), rel=0.02)


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5])
def test_fractions_are_bounds(fraction):
    x = weights(3)
    config = KMeans(bins=8, prune=fraction, protect=0.01, rate_distortion=0.0)
    fitted = fit_group(sketched(x), config, None)
    codes = quantized(x, fitted)
    assert fraction - 0.02 <= np.mean(codes == 0) <= fraction + 0.02
    assert np.mean(codes == fitted.codebook.protected) <= 0.01
    protected = codes == fitted.codebook.protected
    assert np.abs(x[protected]).min() >= np.abs(x[~protected]).max() / (1 + 2 * ALPHA), "but for one bin"


def test_rate_distortion_lowers_its_own_cost():
    """Each table minimises distortion + lambda * bits, so its cost is never above that of nearest levels."""
    x = weights(5)
    costs = {}
    for price in (0.0, 0.1):
        fitted = fit_group(sketched(x), Lattice(step=0.5, rate_distortion=price), None)
        step = fitted.codebook.step
        costs[price] = fitted.error * x.size + 0.1 * step**2 * fitted.bits
    assert costs[0.1] < costs[0.0]


def test_a_lattice_keeps_its_step_until_the_weights_have_moved_on():
    x = weights(7)
    config = Lattice(step=0.5)
    first = fit_group(sketched(x), config, None)
    codes = quantized(x, first)
    grown = fit_group(sketched((x * 1.1).astype(np.float32), codes, first.codebook), config, first.codebook)
    assert grown.codebook.step == first.codebook.step
    doubled = fit_group(sketched((x * 2).astype(np.float32), codes, first.codebook), config, first.codebook)
    assert doubled.codebook.step == pytest.approx(2 * first.codebook.step, rel=0.05)


def test_values_beyond_the_window_are_protected():
    x = weights(11)
    first = fit_group(sketched(x), Lattice(step=0.5), None)
    codes = quantized(x, first)
    wild = x.copy()
    wild[:5] = [1e30, -1e30, 3e38, 50.0, -50.0]
    second = fit_group(sketched(wild, codes, first.codebook), Lattice(step=0.5), first.codebook)
    assert (quantized(wild, second, codes)[:5] == second.codebook.protected).all()


@pytest.mark.parametrize("config", [*CONFIGS, LOG], ids=lambda c: f"{c.fit}{c.bins}")
@pytest.mark.parametrize("x", [
    np.zeros(10, np.float32), np.full(10, 3.5, np.float32), np.float32([1, 2]), np.float32([1e-44, 0, 3e38]),
    np.empty(0, np.float32),
], ids=["zeros", "constant", "two", "extreme", "empty"])
def test_degenerate_groups(config, x):
    fitted = fit_group(sketched(x), config, None)
    codes = quantized(x, fitted)
    lossy = codes != fitted.codebook.protected
    assert np.isfinite(fitted.codebook.levels[codes[lossy]]).all()
    if x.size and (x == x[0]).all():
        assert np.abs(fitted.codebook.levels[codes[lossy]] - x[lossy]).max() <= max(fitted.codebook.step / 2, 0.03)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 20), st.integers(2, 20), st.integers(0, 2**32 - 1))
def test_bits_of_codes(rows, symbols, seed):
    counts = np.random.default_rng(seed).integers(0, 50, (rows, symbols))
    assert entropy_bits(counts) <= (counts * code_bits(counts)).sum() + 1e-6


def test_a_codebook_survives_json():
    book = fit_group(sketched(weights(1)), Lattice(), None).codebook
    again = Codebook.from_json(book.to_json())
    assert (again.levels == book.levels).all() and (again.cell_high == book.cell_high).all()
    assert (again.window, again.step, again.domain) == (book.window, book.step, book.domain)
    for broken in ({}, {**book.to_json(), "levels": []}, {**book.to_json(), "domain": "cubic"},
                   {**book.to_json(), "window": [5, 2]}, {**book.to_json(), "levels": [float("nan")]}):
        with pytest.raises(CorruptCheckpoint):
            Codebook.from_json(broken)
