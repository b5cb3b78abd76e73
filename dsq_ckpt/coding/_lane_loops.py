"""Blocks of the 32-lane coder encoded and decoded by Numba, where there is no compiled library.

`native/lanes.c` has the same, and gives the same bytes; its header explains the tables. The caller has checked that
codes and previous codes are in range.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsq_ckpt.core.arrays import Array
from dsq_ckpt.kernels.jit import jit

TRUNCATED, IMPOSSIBLE, LEFT, BAD_STATE, BAD_SIZE, BAD_TABLES, UNKNOWN = -1, -2, -3, -4, -5, -6, -7
LANES, SINGLE = 32, 32768
EMPTY = 0xFFFF
_TAIL_WORDS, _MAX_TAIL = 30, 4096
_HEAD = 2 + 4 * LANES
_LOW = 65536
_ESCAPE = 255

_i64: Any = np.int64  # typed Any, as kernels turn it into a plain int for their callers


@jit
def _load(block: Array, at: int, size: int) -> int:
    value = _i64(0)
    for i in range(size):
        value |= _i64(block[at + i]) << (8 * i)
    return value


@jit
def _refill(x: int, block: Array, at: int) -> tuple[int, int]:
    """Return a state after a step, and the place of the next word, or an error in its place."""
    if x >= _LOW:
        return x, at
    if at + 2 > block.size:
        return x, TRUNCATED
    return x << 16 | _load(block, at, 2), at + 2


@jit
def _decode_group(
    tables: Any, parent: Array, out: Array, first: int, count: int, states: Array, block: Array, at: int
) -> int:
    """Decode a code of each of `count` lanes from out[first] on; return the place of the next word, or an error."""
    rows, counts, escaped, entries = tables
    escapes = False
    for j in range(count):
        row = _i64(parent[first + j]) if parent.size else _i64(0)
        info = _i64(rows[row])
        bits, left, x = info & 15, info >> 4 & 0xFFF, states[j]
        q = x >> bits
        slot = x - (q << bits)
        place = min(slot, left)
        entry = _i64(entries[(info >> 16 << 4) + place])
        freq = (_i64(1) << bits) - left if place == left else entry >> 8 & 0xFFF
        x = freq * q + slot - (entry >> 20)
        states[j], at = _refill(x, block, at)
        if at < 0:
            return at
        out[first + j] = entry & 0xFF
        escapes |= (entry & 0xFF) == _ESCAPE
    if not escapes:
        return at
    for j in range(count):
        row = _i64(parent[first + j]) if parent.size else _i64(0)
        n_escaped = _i64(counts[row])
        if out[first + j] != _ESCAPE or n_escaped == 0:
            continue
        if n_escaped == EMPTY:
            return IMPOSSIBLE
        bits, x = _i64(rows[row]) & 15, states[j]
        share, q = (_i64(1) << bits) // n_escaped, x >> bits
        slot = x - (q << bits)
        number = slot // share
        if number >= n_escaped:
            return IMPOSSIBLE
        out[first + j] = escaped[row * 256 + number]
        x = share * q + slot - number * share
        states[j], at = _refill(x, block, at)
        if at < 0:
            return at
    return at


@jit
def _decode_single(tables: Any, parent: Array, out: Array, first: int, states: Array, block: Array, at: int) -> int:
    if states[0] < _LOW:
        return BAD_STATE
    for i in range(first, out.size):
        at = _decode_group(tables, parent, out, i, 1, states, block, at)
        if at < 0:
            return at
    return at if states[0] == _LOW else LEFT


@jit
def _decode(tables: Any, parent: Array, out: Array, block: Array) -> int:
    n, states = out.size, np.empty(LANES, np.int64)
    if n < SINGLE:
        if block.size < 4 or block.size % 2:
            return BAD_SIZE
        states[0] = _load(block, 0, 4)
        at = _decode_single(tables, parent, out, 0, states, block, 4)
        return at if at < 0 else 0 if at == block.size else LEFT
    if block.size < _HEAD or block.size % 2:
        return BAD_SIZE
    start = n - _load(block, 0, 2)
    if start < 0:
        return BAD_SIZE
    for j in range(LANES):
        states[j] = _load(block, 2 + 4 * j, 4)
        if states[j] < _LOW:
            return BAD_STATE
    at = _i64(_HEAD)
    for first in range(0, start, LANES):
        at = _decode_group(tables, parent, out, first, min(start - first, LANES), states, block, at)
        if at < 0:
            return at
    if at != block.size:
        return LEFT
    words = np.empty(2 * LANES, np.uint8)
    for j in range(LANES):
        if states[j] >> 16 != 1:
            return LEFT
        words[2 * j], words[2 * j + 1] = states[j] & 0xFF, states[j] >> 8 & 0xFF
    states[0] = _load(words, 0, 4)
    at = _decode_single(tables, parent, out, start, states, words, 4)
    return at if at < 0 else LEFT if words[at:].any() else 0


@jit(error_model="numpy")
def _encode_step(states: Array, j: int, freq: int, start: int, bits: int, buffer: Array, at: int) -> int:
    x = states[j]
    if x >= freq << (32 - bits):
        at -= 2
        buffer[at], buffer[at + 1] = x & 0xFF, x >> 8 & 0xFF
        x >>= 16
    quotient = _i64(np.float64(x) / np.float64(freq))  # exact, and faster than a division of integers
    states[j] = x + quotient * ((_i64(1) << bits) - freq) + start
    return at


@jit
def _encode_group(
    tables: Any, shift: int, parent: Array, codes: Array, first: int, count: int, states: Array, buffer: Array, at: int
) -> int:
    table, escapes, counts = tables
    entries = np.empty(LANES, np.int64)
    for j in range(count - 1, -1, -1):
        row = _i64(parent[first + j]) if parent.size else _i64(0)
        entry = _i64(table[row << shift | codes[first + j]])
        if entry >> 16 == 0:
            number, bits = entry >> 4, entry & 15
            if number == 0:
                return UNKNOWN
            share = (_i64(1) << bits) // counts[row]
            at = _encode_step(states, j, share, (number - 1) * share, bits, buffer, at)
            entry = _i64(escapes[row])
        entries[j] = entry
    for j in range(count - 1, -1, -1):
        entry = entries[j]
        at = _encode_step(states, j, entry >> 16, entry >> 4 & 0xFFF, entry & 15, buffer, at)
    return at


@jit
def _encode(tables: Any, shift: int, parent: Array, codes: Array, buffer: Array) -> int:
    n, end = codes.size, buffer.size
    at, states, x = end, np.full(LANES, _LOW, np.int64), np.full(1, _LOW, np.int64)
    if n < SINGLE:
        for i in range(n - 1, -1, -1):
            at = _encode_group(tables, shift, parent, codes, i, 1, x, buffer, at)
            if at < 0:
                return at
        if at == end and x[0] == _LOW:
            return 0
        at -= 4
        for i in range(4):
            buffer[at + i] = x[0] >> (8 * i) & 0xFF
        return end - at
    words, tail = np.zeros(2 * _TAIL_WORDS, np.uint8), 0
    place, most = words.size, min(max(n // 64, _MAX_TAIL), 65535)
    while tail < most and place >= 4:
        tail += 1
        place = _encode_group(tables, shift, parent, codes, n - tail, 1, x, words, place)
        if place < 0:
            return place
    certain = place == words.size and x[0] == _LOW
    states[0], states[1] = _LOW + (x[0] & 0xFFFF), _LOW + (x[0] >> 16)
    for j in range(2, LANES):
        if place < words.size:
            states[j] = _LOW + _load(words, place, 2)
            place += 2
    seed, start = states.copy(), n - tail
    for first in range((start - 1) // LANES * LANES, -1, -LANES):
        at = _encode_group(tables, shift, parent, codes, first, min(start - first, LANES), states, buffer, at)
        if at < 0:
            return at
    if certain and at == end and (states == seed).all():
        return 0
    at -= _HEAD
    buffer[at], buffer[at + 1] = tail & 0xFF, tail >> 8
    for j in range(LANES):
        for i in range(4):
            buffer[at + 2 + 4 * j + i] = states[j] >> (8 * i) & 0xFF
    return end - at


_NONE = np.empty(0, np.uint8)


def decode(rows: Array, counts: Array, escaped: Array, entries: Array, parent: Array | None, out: Array,
           block: Array) -> int:
    """Decode a block; see `dsq_decode` in native/lanes.c."""
    result: int = _decode((rows, counts, escaped, entries), _NONE if parent is None else parent, out, block)
    return result


def encode(table: Array, escapes: Array, counts: Array, shift: int, parent: Array | None, codes: Array,
           buffer: Array) -> int:
    """Encode a block; see `dsq_encode` in native/lanes.c."""
    if int(codes.max()) >> shift:
        return UNKNOWN
    result: int = _encode((table, escapes, counts), shift, _NONE if parent is None else parent, codes, buffer)
    return result
