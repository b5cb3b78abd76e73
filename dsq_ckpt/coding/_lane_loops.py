"""Numba implementation of the 32-lane coder, used without the compiled library.

`native/lanes.c` implements the same and writes the same bytes; its header explains the tables. The caller checks that
codes and previous codes are in range.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsq_ckpt.core.arrays import Array
from dsq_ckpt.kernels.jit import jit

TRUNCATED, IMPOSSIBLE, LEFT, BAD_STATE, BAD_SIZE, BAD_TABLES, UNKNOWN, NO_MEMORY = range(-1, -9, -1)
LANES, SINGLE = 32, 32768
EMPTY = 0xFFFF
_TAIL_WORDS, _MAX_TAIL = 30, 4096
HEAD = 2 + 4 * LANES
LOW = 65536
_ESCAPE = 255

_i64: Any = np.int64  # typed Any, as kernels turn it into a plain int for their callers


@jit
def load_integer(block: Array, at: int, size: int) -> int:
    """Return an integer of `size` bytes."""
    value = _i64(0)
    for i in range(size):
        value |= _i64(block[at + i]) << (8 * i)
    return value


@jit
def _refill(x: int, block: Array, at: int) -> tuple[int, int]:
    """Return a state after a step, and the position of the next word, or an error instead."""
    if x >= LOW:
        return x, at
    if at + 2 > block.size:
        return x, TRUNCATED
    return x << 16 | load_integer(block, at, 2), at + 2


@jit
def _decode_group(
    tables: Any, parent: Array, out: Array, first: int, count: int, states: Array, block: Array, at: int
) -> int:
    """Decode one code of each of `count` lanes to out[first:]; return the position of the next word, or an error."""
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
    if states[0] < LOW:
        return BAD_STATE
    for i in range(first, out.size):
        at = _decode_group(tables, parent, out, i, 1, states, block, at)
        if at < 0:
            return at
    return at if states[0] == LOW else LEFT


@jit
def decode_one(tables: Any, parent: Array, out: Array, n: int, states: Array, block: Array, at: int) -> int:
    """Decode the first n codes with the first lane; return the position of the next word, or an error."""
    for i in range(n):
        at = _decode_group(tables, parent, out, i, 1, states, block, at)
        if at < 0:
            return at
    return at


@jit
def decode_turns(tables: Any, parent: Array, out: Array, n: int, states: Array, block: Array, at: int) -> int:
    """Decode the first n codes with the lanes in turn; return the position of the next word, or an error."""
    for first in range(0, n, LANES):
        at = _decode_group(tables, parent, out, first, min(n - first, LANES), states, block, at)
        if at < 0:
            return at
    return at


@jit
def decode_tail(tables: Any, parent: Array, out: Array, start: int, states: Array) -> int:
    """Decode the codes from `start` on, which the final states of the lanes hold; return 0 or an error."""
    words = np.empty(2 * LANES, np.uint8)
    for j in range(LANES):
        if states[j] >> 16 != 1:
            return LEFT
        words[2 * j], words[2 * j + 1] = states[j] & 0xFF, states[j] >> 8 & 0xFF
    states[0] = load_integer(words, 0, 4)
    at = _decode_single(tables, parent, out, start, states, words, 4)
    if at < 0:
        return at
    for i in range(at, words.size):
        if words[i]:
            return LEFT
    return 0


@jit
def _decode(tables: Any, parent: Array, out: Array, block: Array) -> int:
    n, states = out.size, np.empty(LANES, np.int64)
    if n < SINGLE:
        if block.size < 4 or block.size % 2:
            return BAD_SIZE
        states[0] = load_integer(block, 0, 4)
        at = _decode_single(tables, parent, out, 0, states, block, 4)
        return at if at < 0 else 0 if at == block.size else LEFT
    if block.size < HEAD or block.size % 2:
        return BAD_SIZE
    start = n - load_integer(block, 0, 2)
    if start < 0:
        return BAD_SIZE
    for j in range(LANES):
        states[j] = load_integer(block, 2 + 4 * j, 4)
        if states[j] < LOW:
            return BAD_STATE
    at = decode_turns(tables, parent, out, start, states, block, _i64(HEAD))
    if at < 0:
        return at
    return LEFT if at != block.size else decode_tail(tables, parent, out, start, states)


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
def encode_tail(tables: Any, shift: int, parent: Array, codes: Array, n: int, states: Array) -> tuple[int, bool]:
    """Encode the last of n codes into states, LOW + a word each; return their number, and whether they are certain."""
    x = np.full(1, LOW, np.int64)
    words, tail = np.zeros(2 * _TAIL_WORDS, np.uint8), 0
    place, most = words.size, min(max(n // 64, _MAX_TAIL), 65535, n)
    while tail < most and place >= 4:
        tail += 1
        place = _encode_group(tables, shift, parent, codes, n - tail, 1, x, words, place)
        if place < 0:
            return place, False
    certain = place == words.size and x[0] == LOW
    states[:] = LOW
    states[0], states[1] = LOW + (x[0] & 0xFFFF), LOW + (x[0] >> 16)
    for j in range(2, LANES):
        if place < words.size:
            states[j] = LOW + load_integer(words, place, 2)
            place += 2
    return tail, certain


@jit
def encode_one(
    tables: Any, shift: int, parent: Array, codes: Array, n: int, states: Array, buffer: Array, at: int
) -> int:
    """Encode the first n codes with the first lane, before `at`; return the new position, or an error."""
    for i in range(n - 1, -1, -1):
        at = _encode_group(tables, shift, parent, codes, i, 1, states, buffer, at)
        if at < 0:
            return at
    return at


@jit
def encode_turns(
    tables: Any, shift: int, parent: Array, codes: Array, n: int, states: Array, buffer: Array, at: int
) -> int:
    """Encode the first n codes with the lanes in turn, before `at`; return the new position, or an error."""
    for first in range((n - 1) // LANES * LANES, -1, -LANES):
        at = _encode_group(tables, shift, parent, codes, first, min(n - first, LANES), states, buffer, at)
        if at < 0:
            return at
    return at


@jit
def store_state(state: int, buffer: Array, at: int) -> int:
    """Write a state before `at`; return the new position."""
    for i in range(4):
        buffer[at - 4 + i] = state >> (8 * i) & 0xFF
    return at - 4


@jit
def store_states(tail: int, states: Array, buffer: Array, at: int) -> int:
    """Write the number of codes of the tail and the states of the lanes before `at`; return the new position."""
    for j in range(LANES - 1, -1, -1):
        at = store_state(states[j], buffer, at)
    buffer[at - 2], buffer[at - 1] = tail & 0xFF, tail >> 8
    return at - 2


@jit
def _encode(tables: Any, shift: int, parent: Array, codes: Array, buffer: Array) -> int:
    n, end = codes.size, buffer.size
    at, states = end, np.full(LANES, LOW, np.int64)
    if n < SINGLE:
        at = encode_one(tables, shift, parent, codes, n, states, buffer, at)
        if at < 0 or (at == end and states[0] == LOW):
            return min(at, 0)
        return end - store_state(states[0], buffer, at)
    tail, certain = encode_tail(tables, shift, parent, codes, n, states)
    if tail < 0:
        return tail
    seed = states.copy()
    at = encode_turns(tables, shift, parent, codes, n - tail, states, buffer, at)
    if at < 0:
        return at
    if certain and at == end and (states == seed).all():
        return 0
    return end - store_states(tail, states, buffer, at)


_NONE = np.empty(0, np.uint8)


def decode(rows: Array, counts: Array, escaped: Array, entries: Array, parent: Array | None, out: Array,
           block: Array) -> int:
    """Decode a block; see `dsq_decode` in native/lanes.c."""
    # A copy, as Numba would compile all once more for arrays that are read-only.
    result: int = _decode((rows, counts, escaped, entries), _NONE if parent is None else parent, out, block.copy())
    return result


def encode(table: Array, escapes: Array, counts: Array, shift: int, parent: Array | None, codes: Array,
           buffer: Array) -> int:
    """Encode a block; see `dsq_encode` in native/lanes.c."""
    if int(codes.max()) >> shift:
        return UNKNOWN
    result: int = _encode((table, escapes, counts), shift, _NONE if parent is None else parent, codes, buffer)
    return result
