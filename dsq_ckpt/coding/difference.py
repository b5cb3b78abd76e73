"""Lossless coding of numbers given earlier numbers: differences of bit patterns, with the earlier exponent as context.

In some steps of training, weights move by about the same amount, whatever their size. The bit pattern of a number, in
the order of values, moves by that amount over the distance between neighbours, which depends on its exponent. So the
bytes of a difference are coded by rANS, with a table for each exponent of the earlier numbers. Items that are not
floats are coded as well: every step is invertible, whatever the bits mean.

Block, of n items of 1, 2, 4 or 8 bytes: for each byte of an item, from the lowest on, uint32 m and uint32 b; then, for
each, m bytes of a model of rANS and b bytes that it coded, given the exponents, or given none if it has no contexts.
Where m is 0, the b bytes are a zstd frame, or, with b = n, the bytes of the differences themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import zstandard

from dsq_ckpt.coding.lossless import shuffle_decompress
from dsq_ckpt.coding.rans import RansCoder
from dsq_ckpt.core.arrays import I64, U8, Array
from dsq_ckpt.errors import CodingError

ITEM_SIZES = (1, 2, 4, 8)
_SIZES = struct.Struct("<II")
_STEP = 1 << 15  # items processed together, so that intermediate results stay in the cache
_COUNTED = 1 << 18
_EACH = 1.5  # bytes of a model for each of its frequencies, about
_NOISE = 0.98  # of the bits of a byte; smaller gains are not worth coding


def encode(data: bytes | memoryview, before: bytes | memoryview, itemsize: int, level: int = 3) -> bytes:
    """Encode items given the same number of earlier items.

    Raises:
        CodingError: the sizes do not match, or this size of items is not supported.
    """
    now, earlier = _items(data, itemsize), _items(before, itemsize)
    if now.size != earlier.size:
        raise CodingError(f"{now.nbytes} bytes cannot be coded given {earlier.nbytes}, expected as many")
    if now.size and np.array_equal(now, earlier):
        return _unchanged(now.size, itemsize)
    planes = np.empty((itemsize, now.size), np.uint8)
    for where in _steps(now.size):
        changes = _changes(now[where], earlier[where])
        planes[:, where] = changes.view(np.uint8).reshape(-1, itemsize).T
    context = _contexts(earlier)
    return _packed([_encode_plane(plane, context, level) for plane in planes])


def decode(block: bytes | memoryview, before: bytes | memoryview, itemsize: int) -> bytes:
    """Decode a block of `encode`, given the same earlier items.

    Raises:
        CodingError: the block is damaged, or has another number of items.
    """
    earlier, block = _items(before, itemsize), memoryview(block).cast("B")
    if tells_nothing(block, earlier.nbytes, itemsize):
        return bytes(before)
    context = _contexts(earlier)
    planes = [_decode_plane(model, coded, context) for model, coded in _parts(block, itemsize)]
    now = np.empty_like(earlier)
    for where in _steps(now.size):
        changes = np.empty((now[where].size, itemsize), np.uint8)
        for place, plane in enumerate(planes):
            changes[:, place] = plane[where]
        now[where] = _changed(changes.reshape(-1).view(now.dtype), earlier[where])
    return now.tobytes()


def tells_nothing(block: bytes | memoryview, size: int, itemsize: int) -> bool:
    """Return whether a block encodes `size` bytes that are all unchanged."""
    return size > 0 and block == _unchanged(size // itemsize, itemsize)


def _encode_plane(plane: U8, context: U8, level: int) -> tuple[bytes, bytes]:
    """Return the model and the coded bytes of a plane in its smallest form."""
    forms = [(b"", plane.tobytes())]
    if len(frame := zstandard.ZstdCompressor(level=level).compress(plane.data)) < plane.size:
        forms.append((b"", frame))
    counts = _joint_counts(plane, context)
    rows = min(counts, counts.sum(0, keepdims=True), key=_expected_bytes)
    if _expected_bytes(rows) < _NOISE * plane.size:
        coder = RansCoder.fit(rows)
        forms.append((coder.to_bytes(), coder.encode(plane, context if coder.contexts else None)))
    return min(forms, key=lambda form: len(form[0]) + len(form[1]))


@lru_cache(8)
def _unchanged(size: int, itemsize: int) -> bytes:
    """Return the block of unchanged items, whatever their values: planes of zeros, without contexts."""
    coder = RansCoder.fit(np.array([[size]]))
    return _packed([(coder.to_bytes(), coder.encode(np.zeros(size, np.uint8), None))] * itemsize)


def _decode_plane(model: memoryview, coded: memoryview, context: U8) -> U8:
    if len(model):
        coder, plane = RansCoder.from_bytes(model), np.empty(context.size, np.uint8)
        if not isinstance(coder, RansCoder):
            raise CodingError("a block of differences has a model of rANS of version 1, expected version 2")
        coder.decode(coded, context if coder.contexts else None, plane)
        return plane
    return np.frombuffer(coded if len(coded) == context.size else shuffle_decompress(coded, 1, context.size), np.uint8)


def _joint_counts(plane: U8, context: U8) -> I64:
    """Count bytes by the earlier exponent, for `Coder.fit`; every byte has one."""
    rows, symbols = int(context.max(initial=0)) + 1, int(plane.max(initial=0)) + 1
    counts = np.zeros((rows + 1) * symbols, np.int64)  # the last row is for bytes without an exponent
    for start in range(0, plane.size, _COUNTED):
        where = slice(start, start + _COUNTED)
        places = context[where].astype(np.uint16) * np.uint16(symbols) + plane[where]
        counts[:-symbols] += np.bincount(places, minlength=rows * symbols)
    return counts.reshape(rows + 1, symbols)


def _expected_bytes(rows: I64) -> float:
    """Estimate the size of a model of these counts and of the bytes that it codes."""
    totals, used = rows.sum(1), rows[rows > 0]
    bits = (totals[totals > 0] * np.log2(totals[totals > 0])).sum() - (used * np.log2(used)).sum()
    return float(bits) / 8 + _EACH * used.size


def _packed(planes: list[tuple[bytes, bytes]]) -> bytes:
    heads = [_SIZES.pack(len(model), len(coded)) for model, coded in planes]
    return b"".join([*heads, *(part for plane in planes for part in plane)])


def _parts(block: memoryview, itemsize: int) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield the model and the coded bytes of each plane.

    Raises:
        CodingError: the block does not have the size in its header.
    """
    at = itemsize * _SIZES.size
    if len(block) < at:
        raise CodingError(f"a block of differences has {len(block)} bytes, expected at least {at}")
    sizes = [_SIZES.unpack_from(block, place * _SIZES.size) for place in range(itemsize)]
    if (whole := at + sum(map(sum, sizes))) != len(block):
        raise CodingError(f"a block of differences has {len(block)} bytes, its head tells {whole}")
    for model, coded in sizes:
        yield block[at : at + model], block[at + model : at + model + coded]
        at += model + coded


def _items(data: bytes | memoryview, itemsize: int) -> Array:
    if itemsize not in ITEM_SIZES or len(data) % itemsize:
        raise CodingError(f"{len(data)} bytes are no items of {itemsize} bytes, of which there may be differences")
    return np.frombuffer(data, f"<u{itemsize}")


def _steps(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _STEP, count)) for start in range(0, count, _STEP))


def _changes(now: Array, before: Array) -> Array:
    """Return differences of ranks in the order of values, modulo 2**bits, with the sign in the lowest bit."""
    difference = _ordered(now) - _ordered(before)
    return difference << _one(now) ^ _all_if_set(difference)


def _changed(changes: Array, before: Array) -> Array:
    """Undo `_changes`."""
    lowest = changes & _one(changes)
    ordered = (changes >> _one(changes) ^ (~lowest + _one(changes))) + _ordered(before)
    return _ordered(ordered, back=True)


def _ordered(bits: Array, back: bool = False) -> Array:
    """Map bits of floats to integers in the order of values, or back, by inversion of all bits of negative numbers."""
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    negative = _all_if_set(~bits if back else bits)
    return bits ^ (negative | top)


def _contexts(bits: Array) -> U8:
    """Return the index of each exponent among the exponents that occur."""
    exponents = np.empty(bits.size, np.uint8)
    for where in _steps(bits.size):
        exponents[where] = _exponents(bits[where])
    places = np.cumsum(np.bincount(exponents, minlength=256) > 0) - 1
    return np.take(places.astype(np.uint8), exponents)


def _exponents(bits: Array) -> U8:
    """Return the eight bits below the sign: the exponent of float32 and bfloat16, roughly that of other floats."""
    rotated = bits << _one(bits) | bits >> bits.dtype.type(8 * bits.itemsize - 1)
    return (rotated >> bits.dtype.type(8 * bits.itemsize - 8)).astype(np.uint8)


def _all_if_set(bits: Array) -> Array:
    """Return all ones for each number whose highest bit is set, else zero."""
    width = 8 * bits.itemsize
    filled: Array = (bits.view(f"<i{bits.itemsize}") >> np.dtype(f"<i{bits.itemsize}").type(width - 1)).view(bits.dtype)
    return filled


def _one(bits: Array) -> np.integer:
    one: np.integer = bits.dtype.type(1)
    return one
