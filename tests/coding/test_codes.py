"""Codes and refinement symbols: every path gives those of the formulas, bit for bit, and refuses what has no entry."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from dsq_ckpt.coding.codes import RefinedCells, quantize
from dsq_ckpt.kernels.keys import FIRST_NORMAL, FULL, NON_FINITE, KeyWindow
from tests.helpers import reference_kernels

SIZES = (0, 1, 7, 8, 15, 16, 17, 4095, 4096, 4097, 20_003)
WINDOWS = (
    FULL, KeyWindow(7000, 7900), KeyWindow(8127, 8128), KeyWindow(FIRST_NORMAL, 8000), KeyWindow(8000, NON_FINITE)
)


def values(n, seed=0):
    """Values of some octaves, and among them any bit patterns, zeros, infinities and NaN of both kinds."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32) * np.exp2(rng.integers(-6, 6, n)).astype(np.float32)
    patterns = rng.integers(0, 1 << 32, n, np.uint32).view(np.float32)
    x = np.where(rng.random(n) < 0.2, patterns, x)
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001, 1, 0x80000001], np.uint32)
    places = rng.random(n) < 0.1
    x[places] = rng.choice(special, places.sum()).view(np.float32)
    return x


@cache
def table_of(window, codes, rows):
    """A table of any codes, which takes longer to make than to use."""
    return np.random.default_rng(codes).integers(0, codes, (rows, window.size), np.uint8)


def cells_of(codes, bits, log, rng):
    """Cells that most values lie in, some without a width."""
    low = rng.uniform(110, 135, codes) if log else rng.uniform(-2, 2, codes)
    inv_width = np.where(rng.random(codes) < 0.2, 0, 1 / rng.uniform(0.01, 3, codes))
    return RefinedCells(low, inv_width, bits, log)


def expected(x, parent, context, window, inv_scale, table, cells):
    codes, symbols = np.empty(x.size, np.uint8), np.empty(x.size, np.uint8)
    reference_kernels.quantize(x, parent, context, window.lo, window.hi, inv_scale, table, codes)
    if cells is None:
        return codes, None
    reference_kernels.refine(
        x, codes, inv_scale, cells.low, cells.inv_width, cells.bits, cells.log_domain, symbols)
    return codes, reference_kernels.pack(symbols, cells.bits)


@pytest.mark.parametrize("n", SIZES)
def test_formulas(path, n):
    for number, window in enumerate(WINDOWS):
        for codes, rows in ((2, 3), (16, 17), (17, 1), (32, 5), (33, 2), (256, 256 if window is not FULL else 2)):
            rng = np.random.default_rng(number * 300 + codes)
            x, table = values(n, codes), table_of(window, codes, rows)
            parent = rng.integers(0, rows, n).astype(np.uint8)
            bits = int(rng.integers(1, 9))
            for before, cells, inv_scale in (
                (parent, cells_of(codes, bits, False, rng), 1.0),
                (parent, cells_of(codes, 9 - bits, True, rng), 2.0**-3),
                (None, cells_of(codes, bits, True, rng), 1.0),
                (None, cells_of(codes, 9 - bits, False, rng), float(np.float32(0.7))),
                (parent, None, 3.0),
            ):
                space = np.full(n + 33, 7, np.uint8)
                out = space[1 : n + 1]
                packed = quantize(x, before, rows - 1, window, inv_scale, table, out, cells)
                right, stream = expected(x, before, rows - 1, window, inv_scale, table, cells)
                assert (out == right).all(), (window, codes, inv_scale)
                assert (packed is None) == (stream is None) and (stream is None or (packed == stream).all())
                assert space[0] == 7 and (space[n + 1 :] == 7).all()


@pytest.mark.parametrize("start", [1, 2, 3])
@pytest.mark.parametrize("inv_scale", [1.0, 0.5])
def test_values_at_any_address(path, start, inv_scale):
    x, window, rng = values(9000), KeyWindow(8000, 8200), np.random.default_rng(start)
    table, codes = rng.integers(0, 20, (1, window.size)).astype(np.uint8), np.empty(9000, np.uint8)
    given = np.frombuffer(bytes(start) + x.tobytes(), np.float32, 9000, start)
    assert not given.flags.aligned
    cells = cells_of(20, 4, True, rng)
    packed = quantize(given, None, 0, window, inv_scale, table, codes, cells)
    right, stream = expected(x, None, 0, window, inv_scale, table, cells)
    assert (codes == right).all() and (packed == stream).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("log", [False, True])
def test_symbols_at_the_edges_of_parts(path, bits, log):
    """Next to an edge a sum in another order, or a fused one, would give the neighbour's symbol."""
    window = KeyWindow(8100, 8200)
    table = np.full((1, window.size), 5, np.uint8)
    low, width = (126.7, 0.61) if log else (0.731, 0.5113)
    cells = RefinedCells(np.full(6, low), np.full(6, 1 / width), bits, log)
    edges = low + width * np.arange((1 << bits) + 1) / (1 << bits)
    x = (edges * 2.0**23).astype(np.uint32).view(np.float32) if log else edges.astype(np.float32)
    steps = np.arange(-3, 4, dtype=np.int32)[:, None]
    x = (x.view(np.int32)[None] + steps).astype(np.int32).view(np.float32).reshape(-1)
    codes = np.empty(x.size, np.uint8)
    packed = quantize(x, None, 0, window, 1.0, table, codes, cells)
    assert (packed == expected(x, None, 0, window, 1.0, table, cells)[1]).all()
    symbols = np.empty(x.size, np.uint8)
    reference_kernels.unpack(packed, bits, symbols)
    assert set(symbols) == set(range(1 << bits))


@pytest.mark.parametrize("place", [0, 4095, 4096, 4999])
def test_codes_without_an_entry_are_refused(path, place):
    rng = np.random.default_rng(0)
    x, window = values(5000), KeyWindow(8000, 8200)
    table, codes = rng.integers(0, 9, (4, window.size)).astype(np.uint8), np.empty(5000, np.uint8)
    parent = rng.integers(0, 4, 5000).astype(np.uint8)
    parent[place] = 4
    with pytest.raises(ValueError, match="parent: found 4, expected values below 4"):
        quantize(x, parent, 3, window, 1.0, table, codes)
    parent[place] = 3
    table[3], table[:3] = 9, 8
    parent[np.arange(5000) != place] = 0
    with pytest.raises(ValueError, match="codes: found 9, expected values below 9"):
        quantize(x, parent, 3, window, 1.0, table, codes, cells_of(9, 3, False, rng))


def test_arguments_that_do_not_fit(path):
    rng = np.random.default_rng(0)
    x, window = values(100), KeyWindow(8000, 8200)
    table, codes = np.zeros((4, window.size), np.uint8), np.empty(100, np.uint8)
    read_only = np.frombuffer(bytes(100), np.uint8)
    parent, cells = np.zeros(100, np.uint8), cells_of(9, 3, False, rng)
    for arguments in (
        (x.astype(np.float64), parent, 3, window, 1.0, table, codes),
        (x[::2], parent, 3, window, 1.0, table, codes),
        (x, parent[1:], 3, window, 1.0, table, codes),
        (x, parent.astype(np.int8), 3, window, 1.0, table, codes),
        (x, parent, 3, window, 1.0, table[:, 1:], codes),
        (x, parent, 3, window, 1.0, table[0], codes),
        (x, parent, 3, FULL, 1.0, table, codes),
        (x, parent, 3, window, 1.0, table, codes[1:]),
        (x, parent, 3, window, 1.0, table, read_only),
        (x, None, 4, window, 1.0, table, codes),
        (x, None, -1, window, 1.0, table, codes),
        (x, parent, 3, window, 0.0, table, codes),
        (x, parent, 3, window, float("nan"), table, codes),
        (x, parent, 3, window, 1.0, table, codes, RefinedCells(cells.low, cells.inv_width, 0, False)),
        (x, parent, 3, window, 1.0, table, codes, RefinedCells(cells.low, cells.inv_width, 9, False)),
    ):
        with pytest.raises(ValueError):
            quantize(*arguments)
