"""Values of codes: every path gives those of the formula, bit for bit, and refuses what has no entry."""

from __future__ import annotations

import numpy as np
import pytest

from dsq_ckpt import kernels
from dsq_ckpt.coding.values import look_up_values
from dsq_ckpt.kernels import unpack
from tests.helpers import reference_kernels

SIZES = (0, 1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 20_003)


def given(n, rows, bits, seed=0):
    """A table of any bit patterns, NaN among them, codes and symbols."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 1 << 32, (rows, 1 << bits), np.uint32).view(np.float32)
    return table, rng.integers(0, rows, n).astype(np.uint8), rng.integers(0, 1 << bits, n).astype(np.uint8)


@pytest.mark.parametrize("n", SIZES)
def test_entries(path, n):
    for rows in (1, 3, 64, 65, 256):
        for bits in range(9):
            table, codes, symbols = given(n, rows, bits)
            forms = [(symbols, False), (reference_kernels.pack(symbols, bits), True)] if bits else [(None, False)]
            for form, packed in forms:
                for last in (False, True):
                    space = np.full(n + 33, 7, np.float32)
                    for start in (0, 1, 16):  # nothing is written beside the values, wherever they begin
                        out = space[start : start + n]
                        count = look_up_values(table, codes, form, packed, rows - 1, out, last)
                        assert count == (codes == rows - 1).sum()
                        assert (out.view(np.uint32) == table[codes, symbols].view(np.uint32)).all(), (rows, bits)
                        assert (space[:start] == 7).all() and (space[start + n :] == 7).all()
                        space[:] = 7


@pytest.mark.parametrize("log", [False, True])
def test_formula(path, log):
    """The table has the values of the kernels' formula, which readers of any kind are compared to."""
    rng = np.random.default_rng(1)
    rows, n = 40, 5000
    low, width = np.zeros(256), np.zeros(256)
    low[:rows], width[:rows] = rng.uniform(100, 130, rows), rng.uniform(0, 2, rows) * (rng.random(rows) > 0.2)
    sign, levels = np.where(rng.random(256) < 0.5, -1.0, 1.0), rng.normal(size=rows).astype(np.float32)
    for bits in (1, 4, 7):
        _, codes, symbols = given(n, rows, bits, 2)
        expected, result, none = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(0, np.float32)
        reference_kernels.dequantize_refined(
            codes, symbols, bits, low, width, sign, levels, 0.7, -1, none, log, expected)
        table = kernels.refined_value_table(bits, low[:rows], width[:rows], sign[:rows], levels, 0.7, log)
        look_up_values(table, codes, reference_kernels.pack(symbols, bits), True, 255, result)
        assert (result.view(np.uint32) == expected.view(np.uint32)).all()
    reference_kernels.dequantize(codes, levels, 0.7, -1, none, expected)
    look_up_values(kernels.value_table(levels, 0.7)[:, None], codes, None, False, 255, result)
    assert (result.view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize("place", [0, 4095, 4096, 4999])
def test_codes_without_an_entry_are_refused(path, place):
    table, codes, symbols = given(5000, 40, 3)
    out = np.empty(5000, np.float32)
    wrong = codes.copy()
    wrong[place] = 40
    with pytest.raises(ValueError, match="codes: found 40, expected values below 40"):
        look_up_values(table, wrong, symbols, False, 0, out)
    wrong = symbols.copy()
    wrong[place] = 8
    with pytest.raises(ValueError, match="refinement: found 8, expected values below 8"):
        look_up_values(table, codes, wrong, False, 0, out)


def test_arrays_that_do_not_fit(path):
    table, codes, symbols = given(100, 40, 3)
    out, packed = np.empty(100, np.float32), reference_kernels.pack(symbols, 3)
    for arguments in (
        (table, codes, packed[:-1], True, 0, out),
        (table, codes, symbols[:-1], False, 0, out),
        (table, codes, None, False, 0, out),
        (table[:, :1].copy(), codes, symbols, False, 0, out),
        (table, codes, symbols, False, 256, out),
        (table, codes, symbols, False, -1, out),
        (table, codes, symbols, False, 0, out[1:]),
        (table, codes.astype(np.int16), symbols, False, 0, out),
        (table[:, :7].copy(), codes, symbols, False, 0, out),
        (table.T, codes, symbols, False, 0, out),
        (table, codes, symbols, False, 0, out.astype(np.float64)),
        (table, codes, symbols, False, 0, np.frombuffer(bytes(400), np.float32)),
    ):
        with pytest.raises(ValueError):
            look_up_values(*arguments)


@pytest.mark.parametrize("n", SIZES)
def test_unpacking(path, n):
    rng = np.random.default_rng(n)
    for bits in range(1, 9):
        symbols, space = rng.integers(0, 1 << bits, n).astype(np.uint8), np.full(n + 65, 7, np.uint8)
        out = space[1 : n + 1]
        unpack(reference_kernels.pack(symbols, bits), bits, out)
        assert (out == symbols).all() and space[0] == 7 and (space[n + 1 :] == 7).all()


def test_unpacking_of_another_size(path):
    packed, out = np.zeros(30, np.uint8), np.empty(80, np.uint8)
    for arguments in ((packed[:-1], 3, out), (packed, 0, out), (packed, 9, out), (packed, 3, out[:-8]),
                      (packed.astype(np.int8), 3, out), (packed, 3, out.astype(np.int32)), (packed, 3, out[::2]),
                      (packed, 3, np.frombuffer(bytes(80), np.uint8))):
        with pytest.raises(ValueError):
            unpack(*arguments)
