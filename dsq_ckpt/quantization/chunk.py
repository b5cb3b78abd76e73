"""A chunk, the part of a tensor that one rank writes, and its coded form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from dsq_ckpt import kernels
from dsq_ckpt.coding.codes import quantize
from dsq_ckpt.core.arrays import F32, I64, U16, Bits, Codes
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.kernels.keys import KeyWindow
from dsq_ckpt.quantization.codebook.fit import GroupFit
from dsq_ckpt.quantization.compensation import Compensation
from dsq_ckpt.quantization.dequantizer import Dequantizer, add_residual, scale_of
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from dsq_ckpt.quantization.moments import Frame
from dsq_ckpt.quantization.step_lengths import StepLengths, sum_step_lengths

_BLOCK = 1 << 18  # elements looked at together


class ChunkKey(NamedTuple):
    """Identity of a chunk along a chain. An index in a plan would change with de-duplication."""

    fqn: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Chunk:
    """A lossy chunk before coding: local `tensor` (any device, any layout) of `group`, scaled by 2**`exponent`.

    With `base_values`, the difference between the tensor and these is coded. With a `frame`, the coordinates in that
    frame are coded.
    """

    key: ChunkKey
    tensor: torch.Tensor
    group: str
    refinement_bits: int
    exponent: float = 0.0
    parent: Codes | None = None
    gradient: torch.Tensor | None = None
    """Averaged gradient on the CPU, of the tensor's shape; only where elements are weighed by sensitivity."""
    base_values: F32 | None = None
    """Values that the parent decodes to without refinement, flat; decoded differences are added to them."""
    device_codes: torch.Tensor | None = None
    """The previous codes in device memory, if the last save kept them there."""
    on_device: bool = True
    """Whether the chunk may be processed in device memory, if its tensor is there."""
    frame: Frame | None = None
    """The coordinates in which values are sketched and quantized; None: the values themselves."""
    compensation: Compensation | None = None
    """Compensation of rounding errors; only without previous codes and without a refinement layer."""

    def scaled(self, exponent: float, keep_parent: bool = True) -> Chunk:
        """Return the chunk with another scale, and optionally without its parent; self if nothing changes."""
        if exponent == self.exponent and (keep_parent or self.parent is None):
            return self
        return replace(self, exponent=exponent, parent=self.parent if keep_parent else None)

    def flat(self) -> torch.Tensor:
        """Return the tensor flattened in row-major order; a view if its layout allows."""
        return self.tensor.detach().contiguous().view(-1)

    def coded_flat(self) -> torch.Tensor:
        """Return all numbers to code, flat, on the tensor's device; only for chunks without `base_values`."""
        flat = self.flat()
        return flat if self.frame is None else self.frame.coded(flat, slice(0, len(flat)))


class BlockData(NamedTuple):
    """Data of a block besides its codes.

    Attributes:
        protected: fp32 bits of the protected values, in order.
        refinement: packed refinement bits.
        steps: lengths of the next optimizer steps, for second moments divided by scales.
    """

    protected: Bits
    refinement: bytes | memoryview
    steps: StepLengths | None = None

    def __reduce__(self) -> tuple[type[BlockData], tuple[Bits, bytes, StepLengths | None]]:
        """Return the constructor and its arguments for another process: memoryviews cannot be pickled."""
        return BlockData, (self.protected, bytes(self.refinement), self.steps)


class CodeSource(Protocol):
    """A chunk that yields its codes block by block, in any order and from several threads.

    Attributes:
        codes: uint8, one per element, flat in row-major order; the codes of a block are valid after `block` returned.
        parent: the previous codes that `codes` are coded against, or None.
        exponent: log2 of the factor that was taken out of the values.
        values: decoded base layers of the chain, flat, for a residual; valid block by block, as codes are.
        second_moment: name of the tensor whose square roots the values were divided by, or None.
        scales: scales of rows and columns that the values were divided by, or None.
    """

    key: ChunkKey
    group: str
    exponent: float
    codes: Codes
    parent: Codes | None
    refinement_bits: int
    values: F32 | None
    second_moment: str | None
    scales: MatrixScales | None

    def block(self, span: slice) -> BlockData:
        """Fill `codes[where]` and return the other data of the block."""

    def staged(self, workers: Workers) -> CodeSource:
        """Return a source of the same codes that no longer reads the tensor, so that training may change it."""


class QuantizingChunk:
    """A chunk that is quantized block by block on request, so that only its codes are held as a whole."""

    def __init__(self, chunk: Chunk, fitted: GroupFit, workers: Workers | None = None) -> None:
        self.key, self.group, self.exponent = chunk.key, chunk.group, chunk.exponent
        self.refinement_bits = chunk.refinement_bits
        self.codes: Codes = np.empty(chunk.key.elements, np.uint8)
        self.parent = chunk.parent if fitted.uses_parent else None
        self._flat = chunk.flat()
        settle_streams([self._flat])
        if chunk.compensation is not None and not self.refinement_bits and self.parent is None:
            map_blocks = map if workers is None else workers.map
            self._flat = chunk.compensation.compensate(self._flat, fitted, scale_of(self.exponent), map_blocks)
        self._fitted = fitted
        cells = fitted.refined_cells if self.refinement_bits else None
        if cells is not None and cells.bits != self.refinement_bits:
            cells = replace(cells, bits=self.refinement_bits)
        self._cells = cells
        self._gradient = None if chunk.gradient is None or fitted.limits is None else chunk.gradient.reshape(-1)
        self._partition = None if fitted.partition_turn is None else fitted.partition_turn.slice_of(chunk.key.elements)
        self._base_values, self._frame = chunk.base_values, chunk.frame
        self.second_moment = None if chunk.frame is None else chunk.frame.second_moment
        self.scales = None if chunk.frame is None else chunk.frame.scales
        self.values: F32 | None = None
        if chunk.base_values is not None:
            self.values = np.empty_like(chunk.base_values)
            self._dequantizer = Dequantizer(fitted.codebook, self.exponent, 0)

    def block(self, span: slice) -> BlockData:
        values = coded_values(self._flat, self._base_values, span, self._frame)
        codes = self.codes[span]
        parent = None if self.parent is None else self.parent[span]
        fitted, book = self._fitted, self._fitted.codebook
        inverse = 1.0 / scale_of(self.exponent)
        are_changed = self._gradient is not None or self._partition is not None
        cells = None if are_changed else self._cells
        packed = quantize(values, parent, fitted.table.shape[0] - 1, fitted.window, inverse, fitted.table, codes, cells)
        if self._gradient is not None and fitted.limits is not None:
            sensitivity = kernels.compute_importance(values, block_values(self._gradient[span]))
            kinds = kernels.classify(sensitivity, *fitted.limits)
            codes[(kinds == kernels.PRUNE) & (codes != book.protected)] = 0
            codes[kinds == kernels.PROTECT] = book.protected
        if self._partition is not None:
            start, stop = (max(0, edge - span.start) for edge in (self._partition.start, self._partition.stop))
            codes[start:stop] = book.protected
        if are_changed and self._cells is not None:
            packed = self._cells.refine(values, codes, inverse)
        protected = kernels.gather_protected(values, codes, book.protected)
        if self.values is not None and self._base_values is not None:
            out = self.values[span]
            bits = kernels.from_bf16(protected_bf16(protected)).view(np.uint32)
            self._dequantizer.block(codes, bits, None, out)
            add_residual(self._base_values[span], out, out)
        steps = None if self.scales is None else sum_step_lengths(values, codes, book.levels, self.scales, span.start)
        return BlockData(protected, b"" if packed is None else packed.data, steps)

    def staged(self, workers: Workers) -> CodeSource:
        """Quantize all blocks."""
        return CodedChunk.from_source(self, workers)


@dataclass
class CodedChunk:
    """A chunk whose blocks are all quantized, as an asynchronous save passes it to the background."""

    key: ChunkKey
    group: str
    exponent: float
    codes: Codes
    parent: Codes | None
    refinement_bits: int
    data: dict[int, BlockData]
    second_moment: str | None = None
    scales: MatrixScales | None = None
    values: F32 | None = None
    """Not passed on: the next save reads them in the process that made them."""

    @classmethod
    def from_source(cls, source: CodeSource, workers: Workers) -> CodedChunk:
        """Make a coded chunk from all blocks of `source`."""
        blocks, data = list(workers.blocks(len(source.codes))), dict[int, BlockData]()
        steps = None if source.scales is None else StepLengths.zeros(source.scales)
        for span, block in zip(blocks, workers.map(source.block, blocks), strict=True):
            if steps is not None and block.steps is not None:
                steps.add(block.steps)
            data[span.start] = block._replace(steps=None if span.start else steps)  # one for all blocks
        return cls(
            source.key, source.group, source.exponent, source.codes, source.parent, source.refinement_bits, data,
            source.second_moment, source.scales,
        )

    def block(self, span: slice) -> BlockData:
        return self.data[span.start]

    def staged(self, workers: Workers) -> CodeSource:
        """Return self."""
        return self


def settle_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the work queued on the current streams, so that other threads may read the tensors on theirs."""
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def block_values(flat: torch.Tensor) -> F32:
    """Return a block of a flat tensor as float32 on the CPU; a view unless the dtype or device differs."""
    return flat.to("cpu", torch.float32).numpy()


def flat_values(tensor: torch.Tensor) -> F32:
    """Return the values of a tensor as flat float32 on the CPU, row-major; a view if layout and dtype allow."""
    return block_values(tensor.detach().contiguous().view(-1))


def all_finite(chunk: Chunk) -> bool:
    """Return whether the numbers to code of a chunk are all finite."""
    flat = chunk.flat()
    blocks = (slice(start, start + _BLOCK) for start in range(0, flat.numel(), _BLOCK))
    return all(bool(np.isfinite(coded_values(flat, chunk.base_values, span, chunk.frame)).all()) for span in blocks)


def is_near_parent(chunk: Chunk) -> bool:
    """Return whether the differences of a chunk are finite, with at most twice the root mean square of its values.

    The error of a difference is a fraction of the difference. Against a distant parent, for example one saved during a
    spike of the loss, the error would exceed the values themselves.
    """
    flat, sums = chunk.flat(), np.zeros(2)
    for start in range(0, flat.numel(), _BLOCK):
        span = slice(start, start + _BLOCK)
        for index, base_values in enumerate((None, chunk.base_values)):
            values = coded_values(flat, base_values, span, chunk.frame).astype(np.float64)
            sums[index] += np.dot(values, values)  # infinite or NaN where a value is
    return bool(sums[1] <= 4 * sums[0] and np.isfinite(sums[1]))


def coded_values(flat: torch.Tensor, base_values: F32 | None, span: slice, frame: Frame | None) -> F32:
    """Return the float32 numbers to code of a block of a flat tensor: values or differences to `base_values`.

    Differences of infinities and differences outside the range of float32 are not finite.
    """
    values = block_values(flat[span] if frame is None else frame.coded(flat[span], span))
    if base_values is None:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        difference: F32 = values - base_values[span]
    return difference


def sketch_block(
    values: F32, parent: Codes | None, window: KeyWindow, exponent: float, counts: I64
) -> None:
    """Add a block to the joint counts of a group, int64[rows, window.size]; without a parent, to the last row."""
    last = counts.shape[0] - 1
    if last == 0 and parent is None:
        kernels.sketch(values, window.lo, window.hi, 1.0 / scale_of(exponent), counts[0])
    else:
        kernels.joint_sketch(values, parent, last, window.lo, window.hi, 1.0 / scale_of(exponent), counts)


def protected_bf16(bits: Bits) -> U16:
    """Return protected values as the base layer stores them: the nearest bf16, but never rounded up to infinity."""
    halves = kernels.to_bf16(bits)
    infinite = (halves & 0x7FFF) == 0x7F80
    return np.where(infinite, halves - 1, halves).astype(np.uint16)
