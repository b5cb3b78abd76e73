"""Numba functions that fit, write and read models of the 32-lane coder, used without the compiled library.

`native/model.c` has the same code line by line and makes the same models; its comments apply here too.
"""

from __future__ import annotations

import numpy as np

from dsq_ckpt.coding import _bits
from dsq_ckpt.core.arrays import Array
from dsq_ckpt.kernels.jit import jit

MIN_BITS, MAX_BITS = 10, 15
ESCAPE = 255
MAX_LEFT = 4095
_NEVER = (1 << 63) - 1
FIRST, MAX_GRID, WIDTH = 127, 103, 7


@jit
def _grid_index(freq: int) -> int:
    shift = 0
    while freq >> shift >= 16:
        shift += 1
    return 8 * shift + (freq >> shift)


@jit
def grid_value(index: int) -> int:
    return index if index < 16 else (8 + (index & 7)) << ((index >> 3) - 1)


@jit
def _share(counts: Array, first: int, bits: int, freqs: Array) -> None:
    slots = 1 << bits
    least = max(slots - MAX_LEFT, 1)
    total = counts.sum()
    rest = slots
    for s in range(counts.size):
        freqs[s] = 0
        if counts[s] > 0 and s != first:
            freqs[s] = grid_value(_grid_index(max(1, counts[s] * slots // total)))
            rest -= freqs[s]
    while rest < least:
        most = int(np.argmax(freqs))
        below = grid_value(_grid_index(freqs[most]) - 1)
        rest += freqs[most] - below
        freqs[most] = below
    for near in (True, False):
        for s in range(counts.size):
            if freqs[s] == 0:
                continue
            above = grid_value(_grid_index(freqs[s]) + 1)
            left = rest - (above - freqs[s])
            if near:
                wanted = 2 * counts[s] * slots >= (freqs[s] + above) * total
                affordable = 16 * left * total >= 15 * counts[first] * slots
            else:
                wanted = counts[s] * slots > freqs[s] * total
                affordable = left * total >= counts[first] * slots
            if wanted and affordable and left >= least:
                freqs[s] = above
                rest = left
    freqs[first] = rest


@jit
def _cost(counts: Array, freqs: Array, bits: int, shift: int, log2s: Array) -> int:
    cost = 0
    for s in range(counts.size):
        if counts[s] > 0:
            cost += (counts[s] >> shift) * ((bits << 24) - log2s[freqs[s]])
    return cost


@jit
def _fit_row(counts: Array, first: int, bits: int, log2s: Array, freqs: Array, escape_freqs: Array) -> int:
    symbols = counts.size
    slots, total = 1 << bits, counts.sum()
    merged, trial = np.empty(symbols + 1, np.int64), np.empty(symbols + 1, np.int64)
    best, tried, shift = -1, -1, 0
    while total >> shift >> 33 > 0:
        shift += 1
    for quarters in (0, 1, 2, 4, 8, 16):
        escaped = 0
        merged[symbols] = 0
        for s in range(symbols):
            merged[s] = counts[s]
            if counts[s] > 0 and 4 * counts[s] * slots < quarters * total and s != first:
                merged[s] = 0
                merged[symbols] += counts[s]
                escaped += 1
        if escaped > 0 and symbols > ESCAPE and merged[ESCAPE] > 0:
            merged[symbols] += merged[ESCAPE]
            merged[ESCAPE] = 0
            escaped += 1
        if escaped == tried or escaped == 1 or (escaped > 0 and first == ESCAPE):
            continue
        tried = escaped
        _share(merged, first, bits, trial)
        cost = _cost(merged, trial, bits, shift, log2s)
        if escaped > 0:
            cost += (merged[symbols] >> shift) * ((bits << 24) - log2s[slots // escaped])
        if best < 0 or cost < best:
            best = cost
            escape_freqs[0] = trial[symbols]
            for s in range(symbols):
                freqs[s] = -1 if merged[s] == 0 and counts[s] > 0 else trial[s]
    return best


@jit
def fit(counts: Array, log2s: Array, freqs: Array, firsts: Array, escape_freqs: Array, bits: Array) -> None:
    """Fit a model; see `dsq_fit` in native/model.c."""
    costs = np.empty(MAX_BITS + 1, np.int64)
    trial, escape = np.empty(counts.shape[1], np.int32), np.empty(1, np.int32)
    for r in range(counts.shape[0]):
        first = int(np.argmax(counts[r]))
        total = counts[r].sum()
        if total == 0:
            continue
        firsts[r] = first
        best = _NEVER
        for b in range(MIN_BITS, MAX_BITS + 1):
            costs[b] = _NEVER
            if b <= 12 or (total - counts[r, first]) << b <= (MAX_LEFT + 1) * total:
                costs[b] = _fit_row(counts[r], first, b, log2s, trial, escape)
            best = min(best, costs[b])
        bits[r] = MIN_BITS
        while costs[bits[r]] > best + best // 2000:
            bits[r] += 1
        _fit_row(counts[r], first, np.int64(bits[r]), log2s, freqs[r], escape_freqs[r : r + 1])


@jit
def write_rows(freqs: Array, firsts: Array, escape_freqs: Array, bits: Array, data: Array) -> int:
    """Write the rows of a model; see `dsq_write_rows` in native/model.c."""
    at = 0
    for r in range(freqs.shape[0]):
        count = int(np.count_nonzero(freqs[r]))
        at = _bits.write_number(data, at, count)
        if count > 0:
            at = _bits.write_bits(data, at, bits[r] - MIN_BITS, 3)
        previous = -1
        for s in range(freqs.shape[1]):
            if freqs[r, s] == 0:
                continue
            at = _bits.write_number(data, at, s - previous - 1)
            previous = s
            v = FIRST if s == firsts[r] else 0 if freqs[r, s] < 0 else _grid_index(freqs[r, s])
            at = _bits.write_bits(data, at, v, WIDTH)
        if escape_freqs[r] > 0:
            at = _bits.write_bits(data, at, _grid_index(escape_freqs[r]), WIDTH)
    return (at + 7) // 8


def read_rows(data: Array, freqs: Array, firsts: Array, escape_freqs: Array, bits: Array) -> bool:
    """Read the rows of a model; see `dsq_read_rows` in native/model.c."""
    padded = _bits.pad(data)
    at: int = _read_rows(padded, freqs, firsts, escape_freqs, bits)
    return at >= 0 and _bits.is_end(padded, at)


@jit
def _read_rows(data: Array, freqs: Array, firsts: Array, escape_freqs: Array, bits: Array) -> int:
    at = 0
    symbols = freqs.shape[1]
    for r in range(freqs.shape[0]):
        count, at = _bits.read_number(data, at)
        if count < 0 or count > symbols:
            return -1
        if count == 0:
            continue
        bits[r] = _bits.read_bits(data, at, 3) + MIN_BITS
        at += 3
        if bits[r] > MAX_BITS:
            return -1
        symbol, left, escaped = -1, 0, 0
        for _ in range(count):
            gap, at = _bits.read_number(data, at)
            v = _bits.read_bits(data, at, WIDTH)
            at += WIDTH
            symbol += gap + 1
            if gap < 0 or symbol >= symbols:
                return -1
            if v == FIRST and firsts[r] < 0:
                firsts[r] = symbol
            elif v == 0:
                freqs[r, symbol] = -1
                escaped += 1
            elif v <= MAX_GRID:
                freqs[r, symbol] = grid_value(v)
                left += freqs[r, symbol]
            else:
                return -1
        if escaped > 0:
            v = _bits.read_bits(data, at, WIDTH)
            at += WIDTH
            if v == 0 or v > MAX_GRID:
                return -1
            escape_freqs[r] = grid_value(v)
            left += escape_freqs[r]
        if firsts[r] < 0 or left > MAX_LEFT or left >= 1 << bits[r]:
            return -1
        freqs[r, firsts[r]] = (1 << bits[r]) - left
        if escaped > 0 and symbols > ESCAPE and freqs[r, ESCAPE] > 0:
            return -1
    return at
