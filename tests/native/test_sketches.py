"""Counts, positions and bf16 in C: each path gives what Numba's kernels give, bit for bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from dsq_ckpt import kernels, native
from dsq_ckpt.coding.pairs import count_pairs
from dsq_ckpt.kernels import cpu
from dsq_ckpt.kernels.keys import FIRST_NORMAL, FULL, NON_FINITE, KeyWindow
from dsq_ckpt.native import sketches
from tests.helpers.coder_paths import by_numba_and
from tests.helpers.coder_paths import compiled_path as compiled_path

SIZES = (0, 1, 3, 7, 8, 9, 31, 63, 64, 65, 4095, 4096, 4097, 4 * cpu.KEYS - 1, 4 * cpu.KEYS + 5)
WINDOWS = (
    FULL, KeyWindow(FIRST_NORMAL, FIRST_NORMAL + 1), KeyWindow(8000, 8200), KeyWindow(FIRST_NORMAL, 8100),
    KeyWindow(8100, NON_FINITE),
)


def values(n, seed, start=0):
    """Half any bit patterns, with subnormals, infinities and NaN of both signs; `start` bytes from an aligned place."""
    rng = np.random.default_rng(seed)
    x = np.where(rng.random(n) < 0.5, 0.02 * rng.standard_normal(n), 0).astype(np.float32)
    x = np.where(rng.random(n) < 0.5, rng.integers(0, 1 << 32, n, np.uint32).view(np.float32), x)
    special = np.array([0, 1 << 31, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    x[::5] = rng.choice(special, x[::5].size).view(np.float32)
    return np.frombuffer(bytes(start) + x.tobytes(), np.float32, n, start)


def codes_of(n, below, seed, start=0):
    return np.random.default_rng(seed).integers(0, below, start + n).astype(np.uint8)[start:]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("inv_scale", [1.0, 0.3, 2.0**-130])
def test_sketches(compiled_path, n, inv_scale):
    for number, window in enumerate(WINDOWS):
        x, parent = values(n, number, number % 4), codes_of(n, 5, number, number)

        def sketch(x=x, window=window):
            counts = np.full(window.size, 3, np.int64)
            kernels.sketch(x, window.lo, window.hi, inv_scale, counts)
            return counts

        def joint(x=x, parent=parent, window=window):
            counts = np.full((5, window.size), 3, np.int64)
            kernels.joint_sketch(x, parent, 0, window.lo, window.hi, inv_scale, counts)
            return counts

        for work in (sketch, joint):
            expected, found = by_numba_and(compiled_path, work)
            assert (found == expected).all() and found.sum() == n + 3 * found.size


@pytest.mark.parametrize("n", SIZES)
def test_octaves(compiled_path, n):
    def count():
        counts = np.full(512, 3, np.int64)
        kernels.count_octaves(values(n, 1, n % 4), counts)
        return counts

    expected, found = by_numba_and(compiled_path, count)
    assert (found == expected).all() and found.sum() == n + 3 * 512


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("rows", "symbols"), [(1, 1), (2, 256), (65, 16), (256, 256)])
def test_pairs(compiled_path, n, rows, symbols):
    contexts, own = codes_of(n, rows, 0, 1), codes_of(n, symbols, 1, 3)
    expected, found = by_numba_and(compiled_path, lambda: count_pairs(contexts, own))
    assert (found == expected).all() and found.sum() == n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("below", [1, 2, 256])
def test_positions(compiled_path, n, below):
    for start in (0, 3):
        codes = codes_of(n, below, 0, start)
        for code in (-1, 0, 1, 255, 256):
            work = partial(kernels.find_positions, codes, code)
            expected, found = by_numba_and(compiled_path, work)
            assert found.dtype == np.int64 and np.array_equal(found, expected)
            assert np.array_equal(found, np.flatnonzero(codes == code))
            if 0 <= code < 256:
                assert sketches.count_code(native.path_index(), codes, code) == len(found)


def test_more_equal_codes_than_a_counter_of_eight_bits_holds(compiled_path):
    codes = np.full(64 * 700, 9, np.uint8)
    assert np.array_equal(kernels.find_positions(codes, 9), np.arange(codes.size))


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_bf16(compiled_path, start):
    """Each half with what follows it: ties, what is next to them, the largest numbers, and NaN that stay NaN."""
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    bits = (high | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1)
    bits = np.frombuffer(bytes(start) + bits.tobytes(), np.uint32, bits.size, start)
    for n in (0, 1, 7, 8, 31, bits.size):
        expected, found = by_numba_and(compiled_path, lambda n=n: kernels.to_bf16(bits[:n]))
        assert np.array_equal(found, expected)
    halves = np.frombuffer(bytes(start) + np.arange(1 << 16, dtype=np.uint16).tobytes(), np.uint16, 1 << 16, start)
    for n in (0, 1, 7, 8, 31, halves.size):
        expected, found = by_numba_and(compiled_path, lambda n=n: kernels.from_bf16(halves[:n]).view(np.uint32))
        assert np.array_equal(found, expected)


def test_large(compiled_path):
    """More elements than counters of 24 bits hold; most are equal."""
    n = (1 << 24) + 5
    x = np.full(n, 0.02, np.float32)
    x[::1000] = -1
    counts, octaves = np.zeros(FULL.size, np.int64), np.zeros(512, np.int64)
    kernels.sketch(x, FULL.lo, FULL.hi, 1.0, counts)
    kernels.count_octaves(x, octaves)
    rare = len(x[::1000])
    assert sorted(counts[counts > 0]) == sorted(octaves[octaves > 0]) == [rare, n - rare]


def test_what_does_not_fit_is_refused(compiled_path):
    """C checks once more what callers have checked."""
    number, x, codes = native.path_index(), np.zeros(9, np.float32), np.arange(9, dtype=np.uint8)
    one = np.float32(1)
    for arguments in ((8000, 8000, None), (0, 9, None), (8000, NON_FINITE + 1, None), (8000, 8001, codes)):
        with pytest.raises(ValueError, match="do not fit"):
            sketches.count_bins(number, x, one, *arguments, np.zeros((8, 8), np.int64))
    with pytest.raises(ValueError, match="do not fit"):
        sketches.count_keys(number, x, one, 9, 9, np.zeros(6, np.int64))
    for rows, bits in ((8, 4), (9, 3), (257, 8), (9, 9)):
        with pytest.raises(ValueError, match="do not fit"):
            sketches.count_pairs(number, codes, codes, rows, bits, np.zeros((256, 256), np.int64))
    with pytest.raises(ValueError, match="do not fit"):
        sketches.refine(number, x, one, codes, 4, False, np.zeros((256, 2)), 8, np.empty(9, np.uint8))
