"""A chunk, the part of a tensor that one rank writes, and its coded form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dsq_ckpt import kernels
from dsq_ckpt.codebook.base import Codebook
from dsq_ckpt.codebook.fit import Fitted
from dsq_ckpt.keys import KeyWindow
from dsq_ckpt.workers import Workers

_LARGEST = float(np.finfo(np.float32).max)
Codes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.uint32]
Floats32 = npt.NDArray[np.float32]
Floats64 = npt.NDArray[np.float64]


class ChunkKey(NamedTuple):
    """Identity of a chunk along a chain: never its index in a plan, which changes when de-duplication does."""

    fqn: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Chunk:
    """A lossy chunk before coding: local `tensor` (any device, any layout) of `group`, scaled by 2**`exponent`."""

    key: ChunkKey
    tensor: torch.Tensor
    group: str
    refinement_bits: int
    exponent: int = 0
    parent: Codes | None = None

    def flat(self) -> torch.Tensor:
        """The tensor in one dimension, row-major; a view where its layout allows."""
        return self.tensor.detach().contiguous().view(-1)


class BlockData(NamedTuple):
    """What a block of codes has beside them: protected values (fp32 bits, in order), packed refinement bits."""

    protected: Bits
    refinement: bytes


class CodeSource(Protocol):
    """A chunk that yields its codes block by block, in any order and from several threads.

    Attributes:
        codes: uint8, one per element, flat in row-major order; a block's codes are valid once it was asked for.
        parent: the previous codes they are coded against, or None.
        exponent: log2 of the factor that was taken out of the values.
    """

    key: ChunkKey
    group: str
    exponent: int
    codes: Codes
    parent: Codes | None
    refinement_bits: int

    def block(self, where: slice) -> BlockData:
        """Make `codes[where]` valid and return what lies beside them."""


class QuantizingChunk:
    """A chunk that is quantized as its blocks are asked for, so that nothing but its codes is ever held whole."""

    def __init__(self, chunk: Chunk, fitted: Fitted) -> None:
        self.key, self.group, self.exponent = chunk.key, chunk.group, chunk.exponent
        self.refinement_bits = chunk.refinement_bits
        self.codes: Codes = np.empty(chunk.key.elements, np.uint8)
        self.parent = chunk.parent if fitted.uses_parent else None
        self._flat = chunk.flat()
        self._fitted = fitted

    def block(self, where: slice) -> BlockData:
        values = block_values(self._flat[where])
        codes = self.codes[where]
        parent = None if self.parent is None else self.parent[where]
        fitted, book = self._fitted, self._fitted.codebook
        window, inverse = fitted.window, 2.0**-self.exponent
        kernels.quantize(
            values, parent, fitted.table.shape[0] - 1, window.lo, window.hi, inverse, fitted.table, codes
        )
        packed = b""
        if self.refinement_bits:
            width = book.cell_high - book.cell_low
            inv_width = np.divide(1.0, width, where=width > 0, out=np.zeros_like(width))
            symbols = np.empty_like(codes)
            kernels.refine(
                values, codes, inverse, _padded(book.cell_low), _padded(inv_width), self.refinement_bits,
                book.domain == "log", symbols,
            )
            packed = kernels.pack(symbols, self.refinement_bits).tobytes()
        return BlockData(kernels.gather_protected(values, codes, book.protected), packed)


@dataclass
class CodedChunk:
    """A chunk whose blocks were all quantized: what an asynchronous save carries to the background."""

    key: ChunkKey
    group: str
    exponent: int
    codes: Codes
    parent: Codes | None
    refinement_bits: int
    data: dict[int, BlockData]

    @classmethod
    def of(cls, source: CodeSource, workers: Workers) -> CodedChunk:
        """Ask `source` for all its blocks."""
        blocks = list(workers.blocks(len(source.codes)))
        data = {where.start: beside for where, beside in zip(blocks, workers.map(source.block, blocks), strict=True)}
        return cls(
            source.key, source.group, source.exponent, source.codes, source.parent, source.refinement_bits, data
        )

    def block(self, where: slice) -> BlockData:
        return self.data[where.start]


def block_values(flat: torch.Tensor) -> Floats32:
    """A piece of a flat tensor as float32 on the CPU; a copy only for other dtypes and devices."""
    return flat.to("cpu", torch.float32).numpy()


def sketch_block(
    values: Floats32, parent: Codes | None, window: KeyWindow, exponent: int, counts: npt.NDArray[np.int64]
) -> None:
    """Add a block to a group's joint counts, int64[rows, window.size]; without parent, to the last row."""
    last = counts.shape[0] - 1
    if last == 0 and parent is None:
        kernels.sketch(values, window.lo, window.hi, 2.0**-exponent, counts[0])
    else:
        kernels.joint_sketch(values, parent, last, window.lo, window.hi, 2.0**-exponent, counts)


class Dequantizer:
    """From codes of a group back to values, block by block, from several threads.

    Args:
        book: the group's codebook.
        exponent: log2 of the factor that was taken out of the tensor.
        bits: of the refinement symbols.
    """

    def __init__(self, book: Codebook, exponent: int, bits: int) -> None:
        self._book, self._bits, factor = book, bits, 2.0**exponent
        levels, low, width = np.append(book.levels, 0.0), book.cell_low, book.cell_high - book.cell_low
        if book.domain == "linear":  # scaled in fp64, so that only the value itself can leave the range of fp32
            reach = max(np.abs(levels).max(), np.abs(book.cell_low).max(), np.abs(book.cell_high).max()) * factor
            levels, low, width, self._scale = levels * factor, low * factor, width * factor, 1.0
        else:
            reach, self._scale = 2.0 ** (min(book.cell_high.max(), 255.0) - 126) * factor, factor
        self._beyond = bool(reach >= _LARGEST)
        self._levels = levels.clip(-_LARGEST, _LARGEST).astype(np.float32)
        self._low, self._width = _padded(low), _padded(width)
        self._sign = _padded(np.where(levels < 0, -1.0, 1.0))

    def block(self, codes: Codes, protected: Bits, refinement: Codes | None, out: Floats32) -> None:
        """Values of a block.

        Args:
            codes: uint8[n].
            protected: fp32 bits of the block's protected values, in order.
            refinement: uint8[n] symbols, or None for the base layer alone.
            out: float32[n].

        Raises:
            ValueError: codes, protected values and refinement do not fit each other.
        """
        book, kept = self._book, protected.view(np.float32)
        if refinement is None:
            used = kernels.dequantize(codes, self._levels, self._scale, book.protected, kept, out)
        else:
            used = kernels.dequantize_refined(
                codes, refinement, self._bits, self._low, self._width, self._sign, self._levels, self._scale,
                book.protected, kept, book.domain == "log", out,
            )
        if used != len(kept):
            raise ValueError(f"{used} codes are protected but {len(kept)} protected values are stored")
        if self._beyond:
            np.nan_to_num(out, copy=False)  # a cell may reach beyond the largest number; its values do not


def protected_bf16(bits: Bits) -> npt.NDArray[np.uint16]:
    """Protected values as the base layer stores them: nearest bf16, but never rounded up to infinity."""
    halves = kernels.to_bf16(bits)
    infinite = (halves & 0x7FFF) == 0x7F80
    return np.where(infinite, halves - 1, halves).astype(np.uint16)


def _padded(per_code: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    full = np.zeros(256)
    full[: len(per_code)] = per_code
    return full
