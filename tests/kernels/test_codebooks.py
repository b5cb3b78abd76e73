"""The codebooks of the published systems need no kernels of their own: each is a table, and quantizing one lookup."""

import numpy as np
import pytest

from dsq_ckpt import kernels
from dsq_ckpt.codebooks.adaptive import Adaptive
from dsq_ckpt.codebooks.exponent import Exponent, exponent_buckets
from dsq_ckpt.codebooks.gobo import Gobo
from dsq_ckpt.codebooks.kmeans import KMeans
from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.codebooks.uniform import Uniform, uniform_levels
from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization.codebook import GroupSketch, fit_group


def values():
    """Weights with some zeros, and their full sketch."""
    rng = np.random.default_rng(0)
    x = (0.02 * rng.standard_normal(2000)).astype(np.float32)
    x[::50] = 0.0
    counts = np.zeros((1, FULL.size), np.int64)
    kernels.sketch(x, FULL.lo, FULL.hi, 1.0, counts[0])
    return x, counts


def quantized(subject, x, table):
    result = subject.empty(x.size)
    subject.backend.quantize(subject(x), None, 0, FULL.lo, FULL.hi, 1.0, subject(table), result)
    return result.cpu().numpy()


@pytest.mark.parametrize(
    "config", [Lattice(), KMeans(bins=8), Uniform(), Adaptive(), Gobo(), Exponent(bits=3)], ids=lambda c: c.fit
)
def test_fitted_codebooks(subject, config):
    """As many elements get each code as the fit has counted."""
    x, counts = values()
    fitted = fit_group(GroupSketch(counts, FULL), config, None)
    result = quantized(subject, x, fitted.table)
    np.testing.assert_array_equal(np.bincount(result, minlength=fitted.counts.shape[1]), fitted.counts[0])


def test_uniform_levels(subject):
    """A table of nearest levels: off by half a step, and by the width of a key at most."""
    x, _ = values()
    levels = uniform_levels(float(x.min()), float(x.max()), 16)
    nearest = np.abs(FULL.values()[:, None] - levels).argmin(1).astype(np.uint8)
    error = np.abs(x - levels[quantized(subject, x, nearest[None])])
    assert error.max() <= (levels[1] - levels[0]) / 2 + np.abs(x).max() / 64


def test_exponent_buckets(subject):
    """A table of sign and exponent: kept elements get a level with both of theirs."""
    x, counts = values()
    (low, high), centres = FULL.edges(), FULL.values()
    held = np.flatnonzero(counts[0])
    held = held[np.argsort(centres[held])]
    levels, codes = exponent_buckets(centres[held], low[held], high[held], counts[0][held], 4)
    table = np.zeros((1, FULL.size), np.uint8)
    table[0, held] = codes
    code = quantized(subject, x, table)
    coded = code > 0
    decoded = levels[code[coded] - 1]
    np.testing.assert_array_equal(np.frexp(x[coded])[1], np.frexp(decoded)[1])
    np.testing.assert_array_equal(np.sign(x[coded]), np.sign(decoded))
    assert np.abs(x[~coded]).max() < np.abs(decoded).min()
