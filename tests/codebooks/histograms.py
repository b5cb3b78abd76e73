"""Histograms for the quantizers of the systems we compare with, and raw values as the sketch sees them."""

import math

import numpy as np
import pytest
from hypothesis import strategies as st

from dsq_ckpt.kernels.keys import FULL
from dsq_ckpt.quantization.sketch import Sketch

SCALES = st.sampled_from([1.0, 0.02, 2.0**-120, 2.0**120])  # what fp32 holds, with room for six octaves


@st.composite
def histograms(draw, largest=12, most=9):
    """Few bins of small integers, scaled, so that ties and equal distances are common."""
    values = draw(st.lists(st.integers(-50, 50), min_size=1, max_size=largest, unique=True))
    counts = draw(st.lists(st.integers(1, most), min_size=len(values), max_size=len(values)))
    return np.sort(np.array(values, np.float64)) * draw(SCALES), np.array(counts, np.int64)


DEGENERATE = {
    "one": ([0.25], [7]),
    "one element": ([0.25], [1]),
    "zero": ([0.0], [3]),
    "two": ([-1.0, 3.0], [1, 10**12]),
    "negative": ([-8.0, -3.0, -2.5, -0.1], [1, 2, 3, 4]),
    "huge": ([-(2.0**127), 1.0, 2.0**127], [1, 1, 1]),
    "tiny": ([-(2.0**-126), 0.0, 2.0**-126, 2.0**-125], [5, 1, 1, 9]),
    "far from zero": ([1e6, 1e6 + 1, 1e6 + 2], [2, 2, 2]),
    "neighbours": ([1.0, float(np.nextafter(1.0, 2.0))], [1, 2]),
    "many": ([1.0, 2.0, 3.0, 4.0], [2**60, 1, 2**60, 2**61]),
}
degenerate = pytest.mark.parametrize("histogram", DEGENERATE.values(), ids=DEGENERATE)


def normal(seed, count=20_000, scale=0.02):
    return (np.random.default_rng(seed).standard_normal(count) * scale).astype(np.float32)


def sketched(x):
    """Occupied bins of the full sketch, ascending: values, counts, low and high edges."""
    counts, values, (low, high) = Sketch.of(x).counts, FULL.values(), FULL.edges()
    bins = np.flatnonzero(counts)
    bins = bins[np.argsort(values[bins], kind="stable")]
    assert len(np.unique(values[bins])) == len(bins), "zero of one sign only"
    return values[bins], counts[bins], low[bins], high[bins]


def squared_error(values, counts, levels):
    return math.fsum(c * min((v - level) ** 2 for level in levels) for v, c in zip(values, counts, strict=True))
