"""Blocks of a refinement layer: packed bits, symbols coded given the codes, or differences to an older layer.

Weights fill their cells evenly, so that packed bits cannot be made smaller by themselves. But from one checkpoint to
the next a weight moves by a few parts of its cell, so that the difference of its symbols, modulo 2^bits, takes fewer
bits. A first moment is nearly always in the middle of its cell. Its symbols take a fraction of their bits if they are
coded by a table of frequencies per code.

Block, with n elements of `bits` bits: ceil(n * bits / 8) bytes are packed symbols. Any other number begins with a byte:

* 0x28, the first of a zstd frame: the packed symbols, compressed (format version 2).
* 0x01: uint32 size of a model of rANS, the model, and rANS given the codes (version 3).
* 0x02: the same size and model, and rANS of the differences to the packed symbols of an older layer (version 9).
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator

import numpy as np

from dsq_ckpt import kernels
from dsq_ckpt.coding.base import Coder
from dsq_ckpt.coding.decoding_tasks import BlockRequest, DecodingTask, run_task
from dsq_ckpt.coding.lossless import shuffle_decompress
from dsq_ckpt.coding.pairs import count_pairs
from dsq_ckpt.coding.rans import RansCoder
from dsq_ckpt.core.arrays import Array, Codes
from dsq_ckpt.core.workers import Scratch
from dsq_ckpt.errors import CodingError
from dsq_ckpt.kernels import unpack

_RANS, _DIFFERENCES = 1, 2
_HEADER = struct.Struct("<BI")
_UNSAMPLED_BITS = 3  # up to this width, symbols may always depend on codes; wider ones are first examined alone
_SAMPLE = 4096  # symbols sampled to decide whether coding may pay; a multiple of 8, so that they end with a byte
_MAX_CODED_RATIO = 0.97
_MAX_DIFFERENCE_RATIO = 0.75  # differences cost time, and keep the older layer on the disk
_DIFFERENCE_SAMPLE = 1 << 14  # differences counted for a model


def encode(packed: bytes | memoryview, codes: Codes, bits: int) -> bytes | memoryview:
    """Return a block of refinement symbols in its smaller form.

    Args:
        packed: The packed symbols.
        codes: uint8[n], the codes that they refine.
        bits: Width of a symbol.
    """
    data, symbols = np.frombuffer(packed, np.uint8), np.empty(len(codes), np.uint8)
    if not len(codes) or (bits > _UNSAMPLED_BITS and _entropy(data, bits, symbols[:_SAMPLE]) > _MAX_CODED_RATIO * bits):
        return packed
    unpack(data, bits, symbols)
    contexts = int(codes.max()) + 1
    rows = np.zeros((contexts + 1, 1 << bits), np.int64)
    rows[:contexts] = count_pairs(codes, symbols)[:contexts, : 1 << bits]
    block = _assemble(_RANS, RansCoder.fit(rows), symbols, codes)
    return block if len(block) < _MAX_CODED_RATIO * len(packed) else packed


def encode_differences(packed: bytes | memoryview, older: bytes | memoryview, count: int, bits: int) -> bytes | None:
    """Return a block of the differences to an older layer; None if it would hardly be smaller than packed symbols.

    Args:
        packed: The packed symbols.
        older: Those of the same elements in the older layer, likewise.
        count: Number of elements.
        bits: Width of a symbol, in both layers.
    """
    differences, before = np.empty(count, np.uint8), np.empty(count, np.uint8)
    unpack(np.frombuffer(packed, np.uint8), bits, differences)
    unpack(np.frombuffer(older, np.uint8), bits, before)
    differences -= before
    differences &= (1 << bits) - 1
    # An odd distance, as rows of a matrix often have an even length. Each difference counts once more, so that all can
    # be coded.
    sample = differences[:: count // _DIFFERENCE_SAMPLE | 1]
    counts = np.bincount(sample, minlength=1 << bits)
    if len(sample) * bits * _MAX_DIFFERENCE_RATIO < _count_bits(counts):
        return None
    block = _assemble(_DIFFERENCES, RansCoder.fit(counts[None] + 1), differences, None)
    return block if len(block) < _MAX_DIFFERENCE_RATIO * len(packed) else None


def is_packed(block: bytes | memoryview, count: int, bits: int) -> bool:
    """Return whether a block has packed symbols."""
    return len(block) == _packed_size(count, bits)


def _assemble(kind: int, coder: RansCoder, symbols: Codes, contexts: Codes | None) -> bytes:
    model = coder.to_bytes()
    return _HEADER.pack(kind, len(model)) + model + coder.encode(symbols, contexts)


def _packed_size(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _entropy(packed: Codes, bits: int, symbols: Codes) -> float:
    """Unpack the first symbols and return their entropy in bits per symbol."""
    unpack(packed[: _packed_size(len(symbols), bits)], bits, symbols)
    return _count_bits(np.bincount(symbols)) / len(symbols)


def _count_bits(counts: Array) -> float:
    """Return the bits of all symbols by their entropy, from how often each occurs."""
    total, counts = counts.sum(), counts[counts > 0]
    return -float((counts * np.log2(counts / total)).sum())


def decode_symbols(
    layers: Iterator[tuple[bytes | memoryview, int]], codes: Codes, scratch: Scratch
) -> Generator[BlockRequest | None, None, tuple[Codes, bool]]:
    """Decode the symbols of a block, as `decoding_tasks.DecodingTask`; return the symbols and whether they are packed.

    Symbols that are not packed have a byte each, in memory of the thread.

    Args:
        layers: The block and the width of its symbols; then those of the older layer, read when they are needed.
        codes: uint8[n], the codes that the block refines.
        scratch: Memory of the threads.

    Raises:
        CodingError: The block does not belong to these codes, or is damaged.
    """
    block, bits = next(layers)
    kind = _kind(block, len(codes), bits)
    if kind == _DIFFERENCES:
        return (yield from _add_differences(block, bits, layers, len(codes), scratch)), False
    if kind != _RANS:
        packed = block if kind is None else shuffle_decompress(block, 1, _packed_size(len(codes), bits))
        return np.frombuffer(packed, np.uint8), True
    symbols = scratch.array("symbols", len(codes), np.uint8)
    coder, data = _read_model(block, bits)
    try:
        yield BlockRequest(coder, data, codes, symbols)
    except CodingError as error:  # the coder calls its contexts previous codes
        if (needed := int(codes.max(initial=0)) + 1) <= coder.contexts:
            raise
        raise CodingError(
            f"a block of refinement has a model of {coder.contexts} codes, expected {needed} or more"
        ) from error
    return symbols, False


def without_differences(
    layers: Iterator[tuple[bytes | memoryview, int]], count: int, scratch: Scratch
) -> bytes | memoryview:
    """Return a block of `count` symbols in a form that needs no older layer; for the arguments see `decode_symbols`.

    Raises:
        CodingError: A block is damaged.
    """
    block, bits = next(layers)
    if _kind(block, count, bits) != _DIFFERENCES:
        return block
    symbols = np.empty(count, np.uint8)

    def decode() -> DecodingTask:
        symbols[:] = yield from _add_differences(block, bits, layers, count, scratch)

    run_task(decode())
    return kernels.pack(symbols, bits).tobytes()


def _add_differences(
    block: bytes | memoryview, bits: int, layers: Iterator[tuple[bytes | memoryview, int]], count: int, scratch: Scratch
) -> Generator[BlockRequest | None, None, Codes]:
    """Decode differences, and add them to the packed symbols of the older layer."""
    symbols, older = scratch.array("symbols", count, np.uint8), scratch.array("older symbols", count, np.uint8)
    coder, data = _read_model(block, bits)
    yield BlockRequest(coder, data, None, symbols)
    block, width = next(layers, (b"", 0))
    if width != bits or _kind(block, count, bits) is not None:
        raise CodingError(f"a block of refinement is the difference to symbols of {bits} bits that are not there")
    unpack(np.frombuffer(block, np.uint8), bits, older)
    symbols += older
    symbols &= (1 << bits) - 1
    return symbols


def _kind(block: bytes | memoryview, count: int, bits: int) -> int | None:
    """Return the first byte of a block; None for packed symbols.

    Raises:
        CodingError: The block is empty, and its symbols are not.
    """
    if is_packed(block, count, bits):
        return None
    if not len(block):
        raise CodingError(f"a block of refinement of {count} elements has no bytes")
    return block[0]


def _read_model(block: bytes | memoryview, bits: int) -> tuple[Coder, memoryview]:
    """Return the coder of a coded block, and its coded symbols."""
    if len(block) < _HEADER.size:
        raise CodingError(f"a block of refinement has {len(block)} bytes, expected at least {_HEADER.size}")
    _, size = _HEADER.unpack_from(block)
    if size > len(block) - _HEADER.size:
        raise CodingError(f"a block of refinement claims a model of {size} bytes and has {len(block)} in all")
    coder = RansCoder.from_bytes(block[_HEADER.size : _HEADER.size + size])
    if coder.symbols != 1 << bits:
        raise CodingError(f"a block of refinement has a model of {coder.symbols} symbols, expected {1 << bits}")
    return coder, memoryview(block)[_HEADER.size + size :]
