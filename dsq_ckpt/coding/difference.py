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
_BLOCK_ITEMS = 1 << 15  # items processed together, so that intermediate results stay in the cache
_COUNT_BLOCK = 1 << 18
_MODEL_BYTES_PER_FREQUENCY = 1.5  # bytes of a model for each of its frequencies, about
_MAX_CODED_RATIO = 0.98  # of the bits of a byte; smaller gains are not worth coding


def encode(data: bytes | memoryview, parent: bytes | memoryview, itemsize: int, level: int = 3) -> bytes:
    """Encode items given as many items of the parent.

    Raises:
        CodingError: the sizes do not match, or this size of items is not supported.
    """
    items, parent_items = _as_items(data, itemsize), _as_items(parent, itemsize)
    if items.size != parent_items.size:
        raise CodingError(f"{items.nbytes} bytes cannot be coded given {parent_items.nbytes}, expected as many")
    if items.size and np.array_equal(items, parent_items):
        return _unchanged_block(items.size, itemsize)
    planes = np.empty((itemsize, items.size), np.uint8)
    for where in _block_slices(items.size):
        differences = _differences(items[where], parent_items[where])
        planes[:, where] = differences.view(np.uint8).reshape(-1, itemsize).T
    context = _exponent_contexts(parent_items)
    return _join_planes([_encode_plane(plane, context, level) for plane in planes])


def decode(block: bytes | memoryview, parent: bytes | memoryview, itemsize: int) -> bytes:
    """Decode a block of `encode`, given the same items of the parent.

    Raises:
        CodingError: the block is damaged, or has another number of items.
    """
    parent_items, block = _as_items(parent, itemsize), memoryview(block).cast("B")
    if is_unchanged(block, parent_items.nbytes, itemsize):
        return bytes(parent)
    context = _exponent_contexts(parent_items)
    planes = [_decode_plane(model, coded, context) for model, coded in _split_planes(block, itemsize)]
    items = np.empty_like(parent_items)
    for where in _block_slices(items.size):
        differences = np.empty((items[where].size, itemsize), np.uint8)
        for place, plane in enumerate(planes):
            differences[:, place] = plane[where]
        items[where] = _apply_differences(differences.reshape(-1).view(items.dtype), parent_items[where])
    return items.tobytes()


def is_unchanged(block: bytes | memoryview, size: int, itemsize: int) -> bool:
    """Return whether a block encodes `size` bytes that are all unchanged."""
    return size > 0 and block == _unchanged_block(size // itemsize, itemsize)


def _encode_plane(plane: U8, context: U8, level: int) -> tuple[bytes, bytes]:
    """Return the model and the coded bytes of a plane in its smallest form."""
    forms = [(b"", plane.tobytes())]
    if len(frame := zstandard.ZstdCompressor(level=level).compress(plane.data)) < plane.size:
        forms.append((b"", frame))
    counts = _joint_counts(plane, context)
    rows = min(counts, counts.sum(0, keepdims=True), key=_expected_bytes)
    if _expected_bytes(rows) < _MAX_CODED_RATIO * plane.size:
        coder = RansCoder.fit(rows)
        forms.append((coder.to_bytes(), coder.encode(plane, context if coder.contexts else None)))
    return min(forms, key=lambda form: len(form[0]) + len(form[1]))


@lru_cache(8)
def _unchanged_block(size: int, itemsize: int) -> bytes:
    """Return the block of unchanged items, whatever their values: planes of zeros, without contexts."""
    coder = RansCoder.fit(np.array([[size]]))
    return _join_planes([(coder.to_bytes(), coder.encode(np.zeros(size, np.uint8), None))] * itemsize)


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
    for start in range(0, plane.size, _COUNT_BLOCK):
        where = slice(start, start + _COUNT_BLOCK)
        places = context[where].astype(np.uint16) * np.uint16(symbols) + plane[where]
        counts[:-symbols] += np.bincount(places, minlength=rows * symbols)
    return counts.reshape(rows + 1, symbols)


def _expected_bytes(rows: I64) -> float:
    """Estimate the size of a model of these counts and of the bytes that it codes."""
    totals, used = rows.sum(1), rows[rows > 0]
    bits = (totals[totals > 0] * np.log2(totals[totals > 0])).sum() - (used * np.log2(used)).sum()
    return float(bits) / 8 + _MODEL_BYTES_PER_FREQUENCY * used.size


def _join_planes(planes: list[tuple[bytes, bytes]]) -> bytes:
    heads = [_SIZES.pack(len(model), len(coded)) for model, coded in planes]
    return b"".join([*heads, *(part for plane in planes for part in plane)])


def _split_planes(block: memoryview, itemsize: int) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield the model and the coded bytes of each plane.

    Raises:
        CodingError: the block does not have the size in its header.
    """
    at = itemsize * _SIZES.size
    if len(block) < at:
        raise CodingError(f"a block of differences has {len(block)} bytes, expected at least {at}")
    sizes = [_SIZES.unpack_from(block, place * _SIZES.size) for place in range(itemsize)]
    if (total := at + sum(map(sum, sizes))) != len(block):
        raise CodingError(f"a block of differences has {len(block)} bytes, its head tells {total}")
    for model, coded in sizes:
        yield block[at : at + model], block[at + model : at + model + coded]
        at += model + coded


def _as_items(data: bytes | memoryview, itemsize: int) -> Array:
    if itemsize not in ITEM_SIZES or len(data) % itemsize:
        raise CodingError(f"{len(data)} bytes are no items of {itemsize} bytes, of which there may be differences")
    return np.frombuffer(data, f"<u{itemsize}")


def _block_slices(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK_ITEMS, count)) for start in range(0, count, _BLOCK_ITEMS))


def _differences(items: Array, parent: Array) -> Array:
    """Return differences of ranks in the order of values, modulo 2**bits, with the sign in the lowest bit."""
    difference = _ordered_bits(items) - _ordered_bits(parent)
    return difference << _one_like(items) ^ _sign_mask(difference)


def _apply_differences(differences: Array, parent: Array) -> Array:
    """Undo `_differences`."""
    one = _one_like(differences)
    lowest = differences & one
    ordered = (differences >> one ^ (~lowest + one)) + _ordered_bits(parent)
    return _ordered_bits(ordered, inverse=True)


def _ordered_bits(bits: Array, inverse: bool = False) -> Array:
    """Map bits of floats to integers in the order of values, or back: all bits of negative numbers are negated."""
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    negative = _sign_mask(~bits if inverse else bits)
    return bits ^ (negative | top)


def _exponent_contexts(bits: Array) -> U8:
    """Return the context of each item: the index of its exponent among the exponents that occur."""
    exponents = np.empty(bits.size, np.uint8)
    for where in _block_slices(bits.size):
        exponents[where] = _exponents(bits[where])
    places = np.cumsum(np.bincount(exponents, minlength=256) > 0) - 1
    return np.take(places.astype(np.uint8), exponents)


def _exponents(bits: Array) -> U8:
    """Return the eight bits below the sign: the exponent of float32 and bfloat16, roughly that of other floats."""
    rotated = bits << _one_like(bits) | bits >> bits.dtype.type(8 * bits.itemsize - 1)
    return (rotated >> bits.dtype.type(8 * bits.itemsize - 8)).astype(np.uint8)


def _sign_mask(bits: Array) -> Array:
    """Return all ones for each number whose highest bit is set, else zero."""
    width = 8 * bits.itemsize
    filled: Array = (bits.view(f"<i{bits.itemsize}") >> np.dtype(f"<i{bits.itemsize}").type(width - 1)).view(bits.dtype)
    return filled


def _one_like(bits: Array) -> np.integer:
    one: np.integer = bits.dtype.type(1)
    return one
