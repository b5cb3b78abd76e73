"""Passes over Adam's moments have the same results, bit for bit, on every path of the compiled code and by Numba."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsq_ckpt import native
from dsq_ckpt.coding import scales
from dsq_ckpt.coding.scales import FACTORS, ONE
from dsq_ckpt.quantization import matrix_scales, moments, restored_values, step_lengths
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from tests.helpers.coder_paths import path as path

SIZES = (0, 1, 7, 8, 15, 16, 31, 33, 1000, 1024, 1025, 4099, 40_000)
EDGES = np.float32([
    0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, -1.1754944e-38, 3.4028235e38,
    -3.4028235e38, 1.0, -1.0, 2.0**-126, 2.0**127, 1e-40, 3e-39,
])
NONE = np.empty(0, np.int16)


def unaligned(array):
    """A copy that begins at an odd byte."""
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    copied = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def numbers(n, seed, positive=False):
    """Any patterns of bits, numbers of usual sizes, and edges; no NaN with a payload but quiet ones."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << 32, n, np.uint32).view(np.float32)
    usual = np.exp2(rng.uniform(-40, 3, n)).astype(np.float32)
    values = np.where(rng.random(n) < 0.2, values, usual * (1 if positive else rng.choice([-1, 1], n)))
    values = np.where(rng.random(n) < 0.02, rng.choice(EDGES, n), values).astype(np.float32)
    values[np.isnan(values)] = np.nan
    return values


def same(one, other):
    one, other = np.asarray(one), np.asarray(other)
    assert one.dtype == other.dtype and one.shape == other.shape
    as_bits = f"u{one.dtype.itemsize}"
    differ = np.flatnonzero(np.ravel(one).view(as_bits) != np.ravel(other).view(as_bits))
    assert not differ.size, (differ[:5], np.ravel(one)[differ[:5]], np.ravel(other)[differ[:5]])


def in_numba(work):
    """Return the result of `work` by Numba."""
    used = native.path()
    native.force("numba")
    try:
        return work()
    finally:
        native.force(used)


@pytest.mark.parametrize("shape", [(40, 100), (3, 5001), (700, 33), (20, 8), (5000, 1), (1, 3000), (2, 7)])
@pytest.mark.parametrize("reach", [30, 900, 32767])
def test_quotients_of_values_and_scales(path, shape, reach):
    """From any element on, by scales past both ends of the table."""
    rows, columns = shape
    values = numbers(rows * columns, 0)
    for seed, (by_row, by_column) in enumerate([(True, True), (True, False), (False, True)]):
        rng = np.random.default_rng(seed)
        row, column = (
            rng.integers(-reach, reach + 1, size if has else 1).astype(np.int16)
            for size, has in ((rows, by_row), (columns, by_column))
        )
        number = (ONE + row[:, None].astype(int) + column).clip(0, 2047) + np.zeros(shape, int)
        for start, stop in ((0, rows * columns), (1, 2), (columns // 2, rows * columns - 3), (5, 5)):
            part = unaligned(values[start:stop])
            with np.errstate(all="ignore"):
                wanted = part / FACTORS[number].reshape(-1)[start:stop]
            wanted[np.abs(part) < scales.TINY] = 0
            got = scales.divide(part, start, columns, row, column)
            same(got, wanted)
            same(got, in_numba(lambda: scales.divide(part.copy(), start, columns, row, column)))  # noqa: B023


def test_values_past_the_last_row_have_no_scales(path):
    for values in (np.ones(100), np.ones((2, 50), np.float32), np.ones(200, np.float32)[::2]):
        with pytest.raises(ValueError, match="values: expected"):
            scales.divide(values, 0, 100, np.zeros(40, np.int16), np.zeros(100, np.int16))
    read_only = np.ones(3, np.float32)
    read_only.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        scales.multiply(read_only, 0, 3, np.zeros(1, np.int16), np.zeros(1, np.int16))
    for work in (scales.divide, scales.multiply):
        with pytest.raises(ValueError, match="3 values from 3998 on are not all of 40 rows"):
            work(np.ones(3, np.float32), 3998, 100, np.zeros(40, np.int16), np.zeros(100, np.int16))
        with pytest.raises(ValueError, match="99 numbers of columns, expected 1 or 100"):
            work(np.ones(3, np.float32), 0, 100, np.zeros(40, np.int16), np.zeros(99, np.int16))
        for numbers_of in ((np.zeros(40), NONE), (np.zeros(80, np.int16)[::2], NONE)):
            with pytest.raises(ValueError, match="by_row: expected C-contiguous int16"):
                work(np.ones(3, np.float32), 0, 100, *numbers_of)


@pytest.mark.parametrize("n", SIZES)
def test_first_moments_over_roots_and_back(path, n):
    for seed in range(3):
        m, v = numbers(n, seed), numbers(n, seed + 10, positive=seed > 0)
        divided = moments._divide_by_roots(unaligned(m), unaligned(v))
        same(divided, in_numba(lambda: moments._divide_by_roots(m, v)))  # noqa: B023
        m[np.isnan(v)] = 1  # of a product of two NaN either is right
        for multiply in (moments.multiply_by_roots, moments.multiply_by_octave_units):
            got, wanted = unaligned(m), m.copy()
            multiply(got, unaligned(v))
            in_numba(lambda: multiply(wanted, v))  # noqa: B023
            same(got, wanted)


def test_first_moments_that_do_not_fit(path):
    m, v = np.ones(9, np.float32), np.ones(9, np.float32)
    read_only = m.copy()
    read_only.setflags(write=False)
    for multiply in (moments.multiply_by_roots, moments.multiply_by_octave_units):
        for values, squares in ((m, v[:8]), (m[:8], v), (m.astype(float), v), (m[::2], v[:5]), (read_only, v)):
            with pytest.raises(ValueError, match=r"values|squares"):
                multiply(values, squares)
    for values, squares in ((m, v[:8]), (m.astype(float), v), (m[::2], v[:5])):
        with pytest.raises(ValueError, match=r"values|squares"):
            moments._divide_by_roots(values, squares)


def test_units_of_octaves_are_powers_of_two_times_the_first_ones():
    """So that C needs two of them."""
    powers = np.exp2(np.arange(128.0)).astype(np.float32)
    same(moments.OCTAVE_UNITS, (moments.OCTAVE_UNITS[:2] * powers[:, None]).reshape(-1))


def scales_of(rows, columns, by_row, by_column):
    return MatrixScales(columns, np.zeros(rows * by_row, np.int16), np.zeros(columns * by_column, np.int16))


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 33, 1000, 1024, 1040, 5003])
def test_step_lengths(path, columns):
    """Blocks that begin and end within rows, or lie within one; rows and columns with and without sums."""
    rows = 4 + 5000 // columns
    values = numbers(rows * columns, columns)
    values[: 2 * columns] = np.abs(numbers(2 * columns, 1, positive=True)).clip(1e-30, 1e30)
    rng = np.random.default_rng(columns)
    for levels in (3, 20, 255):
        book = np.append(0.0, np.sort(np.exp2(rng.uniform(-10, 10, levels - 1))))
        codes = rng.integers(1, 1 + levels, values.size).clip(0, 255).astype(np.uint8)
        codes[2 * columns :][rng.random(values.size - 2 * columns) < 0.1] = 0
        for by_row, by_column in ((True, True), (True, False), (False, True), (False, False)):
            own = scales_of(rows, columns, by_row, by_column)
            for start, stop in ((0, values.size), (columns // 2, values.size - 3), (3, 3), (0, 2 * columns), (1, 3),
                                (max(0, columns - 5), columns + 20)):
                block = unaligned(values[start:stop]), codes[start:stop], book, own, start
                got, wanted = step_lengths.sum_step_lengths(*block), in_numba(
                    lambda: step_lengths.sum_step_lengths(block[0].copy(), *block[1:]))  # noqa: B023
                assert (got.row, got.column) == (wanted.row, wanted.column)
                same(got.rows, wanted.rows)
                same(got.columns, wanted.columns)


def test_step_lengths_of_arrays_that_do_not_fit(path):
    for values, codes in ((np.ones(9), np.ones(9, np.uint8)), (np.ones(9, np.float32), np.ones(8, np.uint8))):
        with pytest.raises(ValueError, match=r"values|codes"):
            step_lengths.sum_step_lengths(values, codes, np.ones(4), MatrixScales(9, NONE, NONE), 0)


def test_step_lengths_that_c_refuses_are_no_sums(monkeypatch):
    """Nor with `python -O`, which has no assertions."""
    if len(native.available()) == 1:
        pytest.skip("there is no compiled library")
    monkeypatch.setattr(native.library(), "dsq_step_lengths", lambda *arguments: -6)
    with pytest.raises(ValueError, match="sums"):
        step_lengths.sum_step_lengths(np.ones(9, np.float32), np.ones(9, np.uint8), np.ones(4),
                                      MatrixScales(9, NONE, NONE), 0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 15), (40, 16), (33, 33), (5, 1000), (64, 1025), (2, 70_001), (0, 5)])
def test_sums_of_rows(path, shape):
    for seed in range(4):
        values = numbers(shape[0] * shape[1], seed, positive=seed > 0).reshape(shape)
        if seed == 3 and shape[0]:
            values[:-1] = np.abs(values[:-1]).clip(1e-30, 1e30)  # rows in which all count
            values[-1] = 0  # and one in which none does
        tensor = torch.from_numpy(values)
        for by_row, by_column in ((True, True), (True, False), (False, True), (False, False)):
            def work():
                return matrix_scales._sum_on_host(tensor, by_row, by_column)  # noqa: B023

            for got, wanted in zip(work(), in_numba(work), strict=True):
                same(got, wanted)


def test_one_over_scales_is_exact_for_powers_of_two():
    same(matrix_scales._INVERSES[::8], 2.0 ** (127.0 - np.arange(256)))
    np.testing.assert_allclose(matrix_scales._INVERSES[8:-8] * FACTORS[8:-8], 1, rtol=1e-7)


@pytest.mark.parametrize("parts", [1, 2, 4, 256])
@pytest.mark.parametrize("n", [0, 1, 31, 5000])
def test_waves_of_parts(path, parts, n):
    rng = np.random.default_rng(n)
    codes = rng.integers(0, 256, n, np.uint8)
    low, steps = np.arange(256.0) - 128, np.full(256, float(parts))
    low[[3, 4]], steps[[5, 6, 7]] = (np.nan, -np.inf), (0, np.inf, np.nan)
    values = (low[codes] + rng.random(n)).astype(np.float32)
    for given in (values, numbers(n, 1), np.float32(2) * values):
        for inverse in (1.0, 0.5):
            def work():
                return restored_values.measure_part_waves(
                    unaligned(given), codes, inverse, low, steps, parts, restored_values._WAVES)  # noqa: B023

            same(work(), in_numba(work))


def test_waves_of_arrays_that_do_not_fit(path):
    right = [np.ones(9, np.float32), np.ones(9, np.uint8), 1.0, np.ones(256), np.ones(256), 4, restored_values._WAVES]
    assert restored_values.measure_part_waves(*right).shape == (3,)
    for place, wrong in ((0, np.ones(9)), (1, np.ones(8, np.uint8)), (3, np.ones(255)), (4, np.ones(2)),
                         (6, np.ones((3, 4)))):
        with pytest.raises(ValueError, match="expected"):
            restored_values.measure_part_waves(*right[:place], wrong, *right[place + 1 :])
    if path != "numba":
        with pytest.raises(ValueError, match="cells have 257 parts, expected 1 to 256"):
            restored_values.measure_part_waves(*right[:5], 257, right[6])


def test_large_blocks(path):
    """Half a million elements, once."""
    n = 1 << 19
    v, m = np.abs(numbers(n, 1, positive=True)), numbers(n, 2)
    v[~np.isfinite(v)] = 1
    scaled = MatrixScales.fit(torch.from_numpy(v.reshape(512, -1)))

    def work():
        ratios = scaled.divide(torch.from_numpy(v), 0).numpy()
        codes = (np.arange(n) % 20).astype(np.uint8)
        steps = step_lengths.sum_step_lengths(ratios, codes, np.exp2(np.arange(20.0) - 10), scaled, 0)
        return ratios, steps.rows, steps.columns, moments._divide_by_roots(m, v)

    for got, wanted in zip(work(), in_numba(work), strict=True):
        same(got, wanted)
