"""Bits in a byte array, least significant bit first: bit i is bit i % 8 of byte i // 8.

Writers expect a zeroed array that is long enough. Readers never read outside their array. They return zeros past its
end, and callers compare the final position with the length. A number v >= 0 is written as an
Exp-Golomb code: with k = bit_length(v + 1) - 1, k zeros, a one, then the k low bits of v + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsq_ckpt.core.arrays import U8, Array
from dsq_ckpt.kernels.jit import jit

MAX_WIDTH = 16
PADDING = 4  # zero bytes that `pad` appends, so that a read of MAX_WIDTH bits needs no check of each byte

_i64: Any = np.int64  # typed Any, as kernels turn it into a plain int for their callers


@jit
def write_bits(buffer: Array, position: int, value: int, width: int) -> int:
    """Write the `width` <= 16 low bits of value; return the position after them."""
    byte = position >> 3
    shifted = value << (position & 7)
    while shifted:
        buffer[byte] |= np.uint8(shifted & 0xFF)
        shifted >>= 8
        byte += 1
    return position + width


@jit
def write_number(buffer: Array, position: int, value: int) -> int:
    """Write value in 0..65534 as an Exp-Golomb code; return the position after it."""
    k = 0
    while (value + 1) >> (k + 1):
        k += 1
    position = write_bits(buffer, position + k, 1, 1)
    return write_bits(buffer, position, (value + 1) & ((1 << k) - 1), k)


@jit
def read_bits(buffer: Array, position: int, width: int) -> int:
    """Return the `width` <= 16 bits at a position, in bits, of a padded array; zeros past its end."""
    byte = position >> 3
    if byte + PADDING > buffer.size:
        return 0
    bits = _i64(buffer[byte]) | _i64(buffer[byte + 1]) << 8 | _i64(buffer[byte + 2]) << 16
    value: int = (bits >> (position & 7)) & ((1 << width) - 1)
    return value


@jit
def read_number(buffer: Array, position: int) -> tuple[int, int]:
    """Return the Exp-Golomb code at a position as (value, position after it); value -1 if there is none."""
    k = 0
    while read_bits(buffer, position + k, 1) == 0:
        k += 1
        if k >= MAX_WIDTH:
            return -1, position
    position += k + 1
    return (1 << k) - 1 + read_bits(buffer, position, k), position + k


def pad(data: Array) -> U8:
    """Return a copy of bytes, uint8 (n,), with the padding that the functions here read past its end."""
    return np.concatenate((data, np.zeros(PADDING, np.uint8)))


def is_end(data: Array, position: int) -> bool:
    """Return whether a position is in the last byte of a padded array, with zero bits only after it."""
    bits = 8 * (data.size - PADDING)
    return bits - 8 < position <= bits and read_bits(data, position, bits - position) == 0
