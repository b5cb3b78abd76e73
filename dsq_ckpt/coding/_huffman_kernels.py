"""Kernels of `huffman.py`: grouping, run lengths, Huffman codes and the bit stream of one block.

Positions are in bits; readers report damage by the negative results below and never run past their arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsq_ckpt.coding._bits import PADDING, read_bits, read_number, write_bits, write_number
from dsq_ckpt.core.arrays import Array
from dsq_ckpt.kernels.jit import jit

MAX_LENGTH = 15
MAX_PLAIN_RUN = 256
RUN_TOKENS = MAX_PLAIN_RUN + 32  # runs of 1..256, then 2**9 .. 2**40

UNKNOWN_SYMBOL, TRUNCATED, BAD_TABLE, BAD_RUN = -1, -2, -3, -4

_i64: Any = np.int64  # typed Any, as kernels turn it into a plain int for their callers


@jit
def _stable_order(counts: Array) -> Array:
    """Return positions in ascending order of counts, as a stable `np.argsort`, which takes a second to compile."""
    n = counts.size
    order, merged = np.arange(n), np.empty(n, np.int64)
    width = 1
    while width < n:
        for start in range(0, n, 2 * width):
            left, right, end = start, min(start + width, n), min(start + 2 * width, n)
            middle = right
            for i in range(start, end):
                if left < middle and (right == end or counts[order[left]] <= counts[order[right]]):
                    merged[i] = order[left]
                    left += 1
                else:
                    merged[i] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order


@jit
def huffman_lengths(counts: Array) -> Array:
    """Return lengths of an optimal prefix code of at most MAX_LENGTH bits; 2 <= len(counts) <= 2**15, counts > 0.

    Package-merge: L. Larmore, D. Hirschberg, "A fast algorithm for optimal length-limited Huffman codes"
    (1990). A level's list merges the leaves with the pairs of the list below it; the 2n - 2 cheapest items of
    the top list define the code: the length of a leaf is the number of levels in which it is among the
    items taken.
    """
    n = counts.size
    order = _stable_order(counts)
    is_leaf = np.zeros((MAX_LENGTH, 2 * n), np.bool_)
    below = np.empty(2 * n, np.int64)
    current = np.empty(2 * n, np.int64)
    n_below = 0
    for level in range(MAX_LENGTH):
        leaf = package = size = 0
        n_packages = n_below // 2
        while leaf < n or package < n_packages:
            if package == n_packages or (
                leaf < n and counts[order[leaf]] <= below[2 * package] + below[2 * package + 1]
            ):
                current[size] = counts[order[leaf]]
                is_leaf[level, size] = True
                leaf += 1
            else:
                current[size] = below[2 * package] + below[2 * package + 1]
                package += 1
            size += 1
        below, current = current, below
        n_below = size
    lengths = np.zeros(n, np.int64)
    taken = 2 * n - 2
    for level in range(MAX_LENGTH - 1, -1, -1):
        leaves = 0
        for i in range(taken):
            if is_leaf[level, i]:
                lengths[order[leaves]] += 1
                leaves += 1
        taken = 2 * (taken - leaves)
    return lengths


@jit
def canonical_codes(lengths: Array) -> Array:
    """Return the codes of a complete prefix code for the bit stream, first bit lowest; lengths in 1..MAX_LENGTH.

    Shorter codes first, then ascending tokens; each code is the one before plus 1, with zeros appended.
    """
    codes = np.zeros(lengths.size, np.int64)
    code = 0
    for length in range(1, MAX_LENGTH + 1):
        for i in range(lengths.size):
            if lengths[i] == length:
                for bit in range(length):
                    codes[i] |= ((code >> bit) & 1) << (length - 1 - bit)
                code += 1
        code <<= 1
    return codes


@jit
def tokenize(values: Array, n_values: int, run_length: bool, tokens: Array) -> int:
    """Write the tokens of a group to `tokens`, uint16, at least as long as values; return their number.

    A value is its own token. The length of a run of two or more follows its value as tokens that add up to
    it, largest first: n_values + r - 1 for r <= 256, n_values + 247 + k for 2**k, k >= 9.
    """
    n = 0
    i = 0
    while i < values.size:
        value = values[i]
        end = i + 1
        if run_length:
            while end < values.size and values[end] == value:
                end += 1
        tokens[n] = value
        n += 1
        left = end - i
        if left > 1:
            while left > MAX_PLAIN_RUN:
                log = 8
                while left >> (log + 1):
                    log += 1
                # 2**8 is both the first power of two and the last plain run
                tokens[n] = n_values + MAX_PLAIN_RUN - 1 + log - 8
                n += 1
                left -= 1 << log
            if left > 0:
                tokens[n] = n_values + left - 1
                n += 1
        i = end
    return n


@jit
def group_starts(parent: Array, n_groups: int) -> Array:
    """Return the start of each group, int64 (n_groups + 1,), groups in the order of the parent's codes."""
    starts = np.zeros(n_groups + 1, np.int64)
    if n_groups == 1:
        starts[1] = parent.size
        return starts
    for i in range(parent.size):
        starts[_i64(parent[i]) + 1] += 1
    for group in range(n_groups):
        starts[group + 1] += starts[group]
    return starts


@jit
def group_values(
    codes: Array, parent: Array, row_offset: int, modulus: int, support: Array, starts: Array, values: Array
) -> bool:
    """Write deltas to the groups of their previous codes (Algorithm 5); return False if a code is unknown.

    Deltas are cyclic, (parent - code) mod modulus, or the codes themselves if modulus is 0. The next free index of a
    group is starts[parent]. There is one group, with all elements in order, if starts has one entry.
    """
    one_group = starts.size == 1
    for i in range(codes.size):
        row = _i64(parent[i])
        code = _i64(codes[i])
        if not support[row_offset + row, code]:
            return False
        value = code
        if modulus > 0:
            value = row - code
            if value < 0:
                value += modulus
        group = 0 if one_group else row
        values[starts[group]] = value
        starts[group] += 1
    return True


@jit
def ungroup_values(
    values: Array, parent: Array, modulus: int, symbols: int, starts: Array, out: Array
) -> bool:
    """Undo `group_values` (Algorithm 6); return False if a code is not below `symbols`."""
    one_group = starts.size == 1
    for i in range(out.size):
        row = _i64(parent[i])
        group = 0 if one_group else row
        code = _i64(values[starts[group]])
        starts[group] += 1
        if modulus > 0:
            code = row - code
            if code < 0:
                code += modulus
        if code >= symbols:
            return False
        out[i] = code
    return True


@jit
def write_group(
    values: Array, n_values: int, run_length: bool, tokens: Array, buffer: Array, position: int
) -> int:
    """Write one group, not empty, as table and tokens; tokens is scratch. Return the position after it."""
    n_tokens = tokenize(values, n_values, run_length, tokens)
    counts = np.zeros(n_values + RUN_TOKENS, np.int64)
    for i in range(n_tokens):
        counts[tokens[i]] += 1
    used = np.flatnonzero(counts)
    position = write_number(buffer, position, used.size - 1)
    if used.size == 1:
        return write_number(buffer, position, used[0])
    lengths = huffman_lengths(counts[used])
    codes = canonical_codes(lengths)
    words = np.zeros(counts.size, np.int64)
    previous = -1
    for i in range(used.size):
        position = write_number(buffer, position, used[i] - previous - 1)
        position = write_bits(buffer, position, lengths[i], 4)
        previous = used[i]
        words[used[i]] = codes[i] << 4 | lengths[i]
    for i in range(n_tokens):
        word = words[tokens[i]]
        shifted = (word >> 4) << (position & 7)
        byte = position >> 3
        # at most 15 + 7 bits: three bytes
        buffer[byte] |= np.uint8(shifted & 0xFF)
        buffer[byte + 1] |= np.uint8((shifted >> 8) & 0xFF)
        buffer[byte + 2] |= np.uint8(shifted >> 16)
        position += word & 15
    return position


@jit
def read_group(buffer: Array, position: int, n_values: int, lookup: Array, values: Array) -> int:
    """Read one group into values; lookup is scratch, int32 (2**MAX_LENGTH,). Return the position after it."""
    end = 8 * (buffer.size - PADDING)
    n_used, position = read_number(buffer, position)
    n_used += 1
    alphabet = n_values + RUN_TOKENS
    if n_used < 1 or n_used > alphabet:
        return BAD_TABLE
    used = np.zeros(n_used, np.int64)
    lengths = np.zeros(n_used, np.int64)
    previous = -1
    kraft = width = 0
    for i in range(n_used):
        gap, position = read_number(buffer, position)
        previous += gap + 1
        if gap < 0 or previous >= alphabet:
            return BAD_TABLE
        used[i] = previous
        if n_used > 1:
            lengths[i] = read_bits(buffer, position, 4)
            position += 4
            if lengths[i] == 0:
                return BAD_TABLE
            width = max(width, lengths[i])
            kraft += 1 << (MAX_LENGTH - lengths[i])
    if n_used == 1:
        if used[0] >= n_values:
            return BAD_TABLE
        values[:] = used[0]
        return position
    if kraft != 1 << MAX_LENGTH:
        return BAD_TABLE
    codes = canonical_codes(lengths)
    for i in range(n_used):
        for index in range(codes[i], 1 << width, 1 << lengths[i]):
            lookup[index] = used[i] << 4 | lengths[i]
    mask = (1 << width) - 1
    filled = 0
    value = -1
    after_value = False
    while filled < values.size:
        byte = position >> 3
        if position >= end:
            return TRUNCATED
        bits = _i64(buffer[byte]) | _i64(buffer[byte + 1]) << 8 | _i64(buffer[byte + 2]) << 16
        word = _i64(lookup[(bits >> (position & 7)) & mask])
        position += word & 15
        token = word >> 4
        if token < n_values:
            value = token
            values[filled] = value
            filled += 1
            after_value = True
            continue
        run = token - n_values + 1
        if run > MAX_PLAIN_RUN:
            run = 1 << (run - MAX_PLAIN_RUN + 8)
        # the value itself is the first of its run
        run -= _i64(after_value)
        after_value = False
        if value < 0 or run < 0 or run > values.size - filled:
            return BAD_RUN
        values[filled : filled + run] = value
        filled += run
    return position if position <= end else TRUNCATED
