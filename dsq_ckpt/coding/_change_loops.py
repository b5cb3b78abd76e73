"""Numba coder of blocks that list changes, used without the compiled library.

`native/changes.c` implements the same and writes the same bytes. The caller checks that codes and previous codes are in
range, and that tables belong to one model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsq_ckpt.coding import _lane_loops as lanes
from dsq_ckpt.coding._lane_loops import BAD_SIZE, BAD_STATE, HEAD, LANES, LEFT, LOW, UNKNOWN
from dsq_ckpt.core.arrays import Array
from dsq_ckpt.kernels.jit import jit

_SINGLE = 4096
_MAX_NUMBER = 5

_i64: Any = np.int64  # typed Any, as kernels turn it into a plain int for their callers

# Loops stand for assignments to slices, `np.repeat` and lists of positions: these take as long to compile as all else.


@jit
def _read_head(block: Array, n: int, counts: Array) -> tuple[int, int]:
    """Read the token count of each class; return the position after it, or an error, and whether there are lanes."""
    at, uses_lanes = 0, 0
    for k in range(counts.size):
        value, i = _i64(0), 0
        while True:
            if at == block.size or i == _MAX_NUMBER:
                return BAD_SIZE, 0
            byte = _i64(block[at])
            value |= (byte & 127) << (7 * i)
            at, i = at + 1, i + 1
            if byte < 128:
                break
        if k == 0:
            uses_lanes, value = value & 1, value >> 1
        if value > n:
            return BAD_SIZE, 0
        counts[k] = value
    return (at, uses_lanes) if counts.sum() <= n else (BAD_SIZE, 0)


@jit
def _read_states(block: Array, at: int, uses_lanes: int, states: Array) -> tuple[int, int]:
    """Read the initial states; return the position after them, or an error, and the number of codes of the tail."""
    tail = 0
    if block.size - at < (HEAD if uses_lanes else 4) or (block.size - at) % 2:
        return BAD_SIZE, 0
    if uses_lanes:
        tail, at = lanes.load_integer(block, at, 2), at + 2
    for j in range(LANES if uses_lanes else 1):
        states[j] = lanes.load_integer(block, at, 4)
        at += 4
        if states[j] < LOW:
            return BAD_STATE, 0
    return at, tail


@jit
def _next_change(tokens: Array, at: int, limit: int) -> tuple[int, int]:
    """Return the number of elements of a class before its next change, or -1, and the position after the change."""
    gap = _i64(0)
    while tokens[at] >= limit:
        gap, at = gap + limit, at + 1
        if at == tokens.size:
            return -1, at
    return gap + tokens[at], at + 1


@jit
def _find_listed(kinds: Array, limits: Array, tokens: Array, counts: Array, codes: Array, places: Array) -> int:
    """Write the positions of listed elements; return their number, or an error."""
    classes, n_listed, end = limits.size, 0, _i64(0)
    at, ends, gaps = np.empty_like(counts), np.empty_like(counts), np.full(classes + 2, -1, np.int64)  # -1: no more
    gaps[classes] = 0
    for k in range(classes):
        at[k], end = end, end + counts[k]
        ends[k] = end
        if counts[k]:
            gaps[k], at[k] = _next_change(tokens[: ends[k]], at[k], limits[k])
            if gaps[k] < 0:
                return LEFT
    for i in range(codes.size):
        k = min(_i64(kinds[codes[i]]), classes + 1)
        if gaps[k] > 0:
            gaps[k] -= 1
        elif gaps[k] == 0:
            places[n_listed] = i
            n_listed += 1
            if k < classes:
                gaps[k] = -1
                if at[k] < ends[k]:
                    gaps[k], at[k] = _next_change(tokens[: ends[k]], at[k], limits[k])
                    if gaps[k] < 0:
                        return LEFT
    for k in range(classes):
        if gaps[k] >= 0:
            return LEFT
    return n_listed


@jit
def _repeat_rows(first: int, counts: Array, total: int) -> Array:
    """Return the table of each token: a class's is `first` + its number."""
    rows, at = np.empty(total, np.uint8), 0
    for k in range(counts.size):
        for _ in range(counts[k]):
            rows[at] = first + k
            at += 1
    return rows


@jit
def _take(codes: Array, places: Array, n: int) -> Array:
    """Return the codes at the first n positions."""
    taken = np.empty(n, np.uint8)
    for i in range(n):
        taken[i] = codes[places[i]]
    return taken


@jit
def _decode(tables: Any, kinds: Array, limits: Array, codes: Array, block: Array) -> int:
    counts, states = np.zeros(limits.size, np.int64), np.full(LANES, LOW, np.int64)
    at, uses_lanes = _read_head(block, codes.size, counts)
    if at < 0:
        return at
    at, tail = _read_states(block, at, uses_lanes, states)
    if at < 0:
        return at
    total = counts.sum()
    tokens = np.empty(total, np.uint8)
    rows = _repeat_rows(kinds.size, counts, total)
    if uses_lanes:
        at = lanes.decode_turns(tables, rows, tokens, total, states, block, at)
    else:
        at = lanes.decode_one(tables, rows, tokens, total, states, block, at)
    if at < 0:
        return at
    places = np.empty(codes.size, np.uint32)
    n_listed = _find_listed(kinds, limits, tokens, counts, codes, places)
    if n_listed < tail:
        return n_listed if n_listed < 0 else BAD_SIZE
    context, symbols = _take(codes, places, n_listed), np.empty(n_listed, np.uint8)
    if uses_lanes:
        at = lanes.decode_turns(tables, context, symbols, n_listed - tail, states, block, at)
        if at < 0:
            return at
        error = LEFT if at != block.size else lanes.decode_tail(tables, context, symbols, n_listed - tail, states)
        if error < 0:
            return error
    else:
        at = lanes.decode_one(tables, context, symbols, n_listed, states, block, at)
        if at < 0:
            return at
        if at != block.size or states[0] != LOW:
            return LEFT
    for i in range(n_listed):
        codes[places[i]] = symbols[i]
    return 0


@jit
def _write_head(counts: Array, uses_lanes: int, buffer: Array, at: int) -> int:
    for k in range(counts.size - 1, -1, -1):
        value = counts[k] << 1 | uses_lanes if k == 0 else counts[k]
        size = 1
        while value >> (7 * size):
            size += 1
        at -= size
        for i in range(size):
            buffer[at + i] = (value >> (7 * i) & 127) | (128 if i < size - 1 else 0)
    return at


@jit
def _encode(
    tables: Any, shift: int, kinds: Array, limits: Array, parent: Array, codes: Array, buffer: Array
) -> int:
    n, classes = codes.size, limits.size
    places, n_listed = np.empty(n, np.uint32), 0
    gaps, counts = np.zeros(classes + 2, np.int64), np.zeros(classes, np.int64)
    streams = np.empty((classes, n), np.uint8)
    for i in range(n):
        k = min(_i64(kinds[parent[i]]), classes + 1)
        if k < classes and codes[i] == parent[i]:
            gaps[k] += 1
            continue
        if k > classes:
            if codes[i] != parent[i]:
                return UNKNOWN
            continue
        if k < classes:
            while gaps[k] >= limits[k]:
                streams[k, counts[k]] = limits[k]
                gaps[k] -= limits[k]
                counts[k] += 1
            streams[k, counts[k]] = gaps[k]
            counts[k] += 1
            gaps[k] = 0
        places[n_listed] = i
        n_listed += 1
    context, symbols = _take(parent, places, n_listed), _take(codes, places, n_listed)
    total = counts.sum()
    tokens, at = np.empty(total, np.uint8), 0
    for k in range(classes):
        for i in range(counts[k]):
            tokens[at] = streams[k, i]
            at += 1
    rows = _repeat_rows(kinds.size, counts, total)
    states, end = np.full(LANES, LOW, np.int64), buffer.size
    uses_lanes = 1 if total + n_listed >= _SINGLE else 0
    if uses_lanes:
        tail, _ = lanes.encode_tail(tables, shift, context, symbols, n_listed, states)
        if tail < 0:
            return tail
        at = lanes.encode_turns(tables, shift, context, symbols, n_listed - tail, states, buffer, end)
        if at >= 0:
            at = lanes.encode_turns(tables, shift, rows, tokens, total, states, buffer, at)
        if at < 0:
            return at
        at = lanes.store_states(tail, states, buffer, at)
    else:
        at = lanes.encode_one(tables, shift, context, symbols, n_listed, states, buffer, end)
        if at >= 0:
            at = lanes.encode_one(tables, shift, rows, tokens, total, states, buffer, at)
        if at < 0:
            return at
        at = lanes.store_state(states[0], buffer, at)
    return end - _write_head(counts, uses_lanes, buffer, at)


def decode(
    rows: Array, counts: Array, escaped: Array, entries: Array, kinds: Array, limits: Array, codes: Array, block: Array
) -> int:
    """Decode a block in place of its previous codes; see `dsq_decode_changes` in native/changes.c."""
    # A copy, as Numba would compile all once more for arrays that are read-only.
    result: int = _decode((rows, counts, escaped, entries), kinds, limits, codes, block.copy())
    return result


def encode(
    table: Array, escapes: Array, counts: Array, shift: int, kinds: Array, limits: Array, parent: Array, codes: Array,
    buffer: Array,
) -> int:
    """Encode a block given previous codes; see `dsq_encode_changes` in native/changes.c."""
    if int(codes.max()) >> shift:
        return UNKNOWN
    result: int = _encode((table, escapes, counts), shift, kinds, limits, parent, codes, buffer)
    return result
