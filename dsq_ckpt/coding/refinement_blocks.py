"""Blocks of a refinement layer: packed bits, or symbols coded given the codes that they refine.

Weights fill their cells evenly, so that packed bits cannot be made smaller. A first moment is nearly always in the
middle of its cell. Its symbols take a fraction of their bits if they are coded by a table of frequencies per code.

Block, with n elements of `bits` bits: ceil(n * bits / 8) bytes are packed symbols. Any other number begins with a byte:

* 0x28, the first of a zstd frame: the packed symbols, compressed (format version 2).
* 0x01: uint32 size of a model of rANS, the model, and rANS given the codes (version 3).
"""

from __future__ import annotations

import struct
from collections.abc import Generator

import numpy as np

from dsq_ckpt import kernels
from dsq_ckpt.coding.decoding_tasks import BlockRequest
from dsq_ckpt.coding.lossless import shuffle_decompress
from dsq_ckpt.coding.pairs import count_pairs
from dsq_ckpt.coding.rans import RansCoder
from dsq_ckpt.core.arrays import Codes
from dsq_ckpt.core.workers import Scratch
from dsq_ckpt.errors import CodingError

_RANS = 1
_HEADER = struct.Struct("<BI")
_UNSAMPLED_BITS = 3  # up to this width, symbols may always depend on codes; wider ones are first examined alone
_SAMPLE = 4096  # symbols sampled to decide whether coding may pay; a multiple of 8, so that they end with a byte
_MAX_CODED_RATIO = 0.97


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
    kernels.unpack(data, bits, symbols)
    contexts = int(codes.max()) + 1
    rows = np.zeros((contexts + 1, 1 << bits), np.int64)
    rows[:contexts] = count_pairs(codes, symbols)[:contexts, : 1 << bits]
    coder = RansCoder.fit(rows)
    model = coder.to_bytes()
    block = _HEADER.pack(_RANS, len(model)) + model + coder.encode(symbols, codes)
    return block if len(block) < _MAX_CODED_RATIO * len(packed) else packed


def _entropy(packed: Codes, bits: int, symbols: Codes) -> float:
    """Unpack the first symbols and return their entropy in bits per symbol."""
    kernels.unpack(packed[: -(-len(symbols) * bits // 8)], bits, symbols)
    counts = np.bincount(symbols)
    shares = counts[counts > 0] / len(symbols)
    return -float((shares * np.log2(shares)).sum())


def decode_symbols(
    block: bytes | memoryview, codes: Codes, bits: int, scratch: Scratch
) -> Generator[BlockRequest | None, None, tuple[Codes, bool]]:
    """Decode the symbols of a block, as `decoding_tasks.DecodingTask`; return the symbols and whether they are packed.

    Symbols that are not packed have a byte each, in memory of the thread.

    Args:
        block: Block of `encode` or of format version 2.
        codes: uint8[n], the refined codes.
        bits: Width of a symbol.
        scratch: Memory of the threads.

    Raises:
        CodingError: The block does not belong to these codes, or is damaged.
    """
    packed_size = -(-len(codes) * bits // 8)
    if len(block) != packed_size and block[:1] == bytes([_RANS]):
        if len(block) < _HEADER.size:
            raise CodingError(f"a block of refinement has {len(block)} bytes, expected at least {_HEADER.size}")
        _, size = _HEADER.unpack_from(block)
        if size > len(block) - _HEADER.size:
            raise CodingError(f"a block of refinement claims a model of {size} bytes and has {len(block)} in all")
        coder = RansCoder.from_bytes(block[_HEADER.size : _HEADER.size + size])
        if coder.symbols != 1 << bits:
            raise CodingError(f"a block of refinement has a model of {coder.symbols} symbols, expected {1 << bits}")
        symbols = scratch.array("symbols", len(codes), np.uint8)
        try:
            yield BlockRequest(coder, block[_HEADER.size + size :], codes, symbols)
        except CodingError as error:  # the coder calls its contexts previous codes
            if (needed := int(codes.max(initial=0)) + 1) <= coder.contexts:
                raise
            raise CodingError(
                f"a block of refinement has a model of {coder.contexts} codes, expected {needed} or more"
            ) from error
        return symbols, False
    packed = block if len(block) == packed_size else shuffle_decompress(block, 1, packed_size)
    return np.frombuffer(packed, np.uint8), True
