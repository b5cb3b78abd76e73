"""Block-wise decoding of chunks: each block from the bytes of its chain to the values in their destination.

A block of codes stays in the cache from the keyframe's bytes to the values. Temporary memory is kept per thread and
reused for the next block: to allocate it anew takes as long as decoding.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from dsq_ckpt.coding import decoding_tasks, refinement_blocks
from dsq_ckpt.coding.decoding_tasks import DecodingTask
from dsq_ckpt.core.arrays import F32, U32, Codes
from dsq_ckpt.core.workers import Scratch, Workers
from dsq_ckpt.errors import CodingError, CorruptCheckpoint
from dsq_ckpt.quantization.dequantizer import Dequantizer
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from dsq_ckpt.storage.chain_decoding import ChainRecord, decode_chain
from dsq_ckpt.storage.container import ContainerReader
from dsq_ckpt.storage.refinement_layers import RefinementLayer, read_layers
from dsq_ckpt.storage.shard import RecordRef

_CONVERT_ELEMENTS = 1 << 15  # elements that torch converts without its own threads


class RecordDecoder(NamedTuple):
    """Decoder from the codes of a record to values, block by block, in any thread.

    Attributes:
        source: file that is named in errors: the refinement file, or the base file without refinement.
        fqn: name of the tensor, for errors.
        step: elements per block.
        refinement: layers of refinement: the own one, and the older one to which its blocks may be differences; empty:
            the base layer alone.
        dequantizer: levels and cells.
        protected_code: code of protected values.
        protected: fp32 bits of all protected values, in order.
        scales: factors of rows and columns.
    """

    source: ContainerReader
    fqn: str
    step: int
    refinement: list[RefinementLayer]
    dequantizer: Dequantizer
    protected_code: int
    protected: U32
    scales: MatrixScales | None

    def count_protected(self, codes: Codes) -> int:
        """Return the number of protected values among these codes."""
        return int(np.count_nonzero(codes == self.protected_code)) if len(self.protected) else 0

    def check_protected_count(self, total: int) -> None:
        """Raise CorruptCheckpoint if the number of protected codes differs from that of stored values."""
        if total != len(self.protected):
            raise CorruptCheckpoint(
                f"'{self.fqn}': {total} codes are protected but {len(self.protected)} protected values are stored"
            )

    def decode(
        self, span: slice, codes: Codes, protected: slice, out: F32, scratch: Scratch, last: bool = False
    ) -> DecodingTask:
        """Write the values of a block to `out`.

        Args:
            span: range of the block in the chunk.
            codes: uint8[n].
            protected: range of the block in the protected values.
            out: float32[n].
            scratch: memory of the threads.
            last: the values are not read again soon.

        Raises:
            CorruptCheckpoint: the block is altered, or does not fit.
        """
        symbols, packed = None, False
        try:
            if self.refinement:
                layers = read_layers(self.refinement, span.start // self.step, scratch)
                symbols, packed = yield from refinement_blocks.decode_symbols(layers, codes, scratch)
            self.dequantizer.block(
                codes, self.protected[protected], symbols, out, packed, last and self.scales is None
            )
        except (CodingError, ValueError) as error:
            raise CorruptCheckpoint(f"'{self.source.path}', {self.fqn}: {error}") from error
        if self.scales is not None:
            self.scales.multiply(out, span.start)


class ChunkDecoder:
    """Decoder of a chunk along a chain, block by block in several threads.

    Attributes:
        step: elements per block.
        codes: array of all codes, known or to be filled; None: codes are not kept.
    """

    def __init__(
        self, records: list[ChainRecord], values: RecordDecoder, codes: Codes | None, count: int,
        factor: Callable[[slice, F32, Scratch], DecodingTask | None] | None,
    ) -> None:
        """Create a decoder.

        Args:
            records: records of its chain, from the keyframe on; empty if `codes` are known.
            values: decoder of the last record.
            codes: see above.
            count: number of elements.
            factor: multiplies the values of a block in place.
        """
        self.step, self.codes = values.step, codes
        self._records, self._values, self._count, self._factor = records, values, count, factor
        # Number of protected values up to the end of each block, for which the thread of the next block waits.
        blocks = split_blocks(count, self.step) if len(values.protected) else ()
        self._ends: list[Future[int]] = [Future() for _ in blocks]

    def select_blocks(self, span: tuple[int, int] | None) -> list[slice]:
        """Return the blocks to decode for a span of elements (first, last exclusive), or all blocks for None."""
        blocks = list(split_blocks(self._count, self.step))
        return blocks if span is None or self.is_sequential else blocks[span[0] // self.step : -(-span[1] // self.step)]

    @property
    def second_moments(self) -> tuple[RecordRef, Codes] | None:
        """Record and codes of the second moments by whose roots values are multiplied, if they are kept."""
        factor = self._factor
        if not isinstance(factor, SecondMomentFactor) or factor.chunk.codes is None:
            return None
        return factor.ref, factor.chunk.codes

    @property
    def is_sequential(self) -> bool:
        """Whether all blocks have to be decoded, in order."""
        return bool(self._ends) or (isinstance(self._factor, SecondMomentFactor) and self._factor.chunk.is_sequential)

    def decode(self, span: slice, out: F32, scratch: Scratch, last: bool = False) -> DecodingTask:
        """Write the values of a block to `out`; with `last` they are not read again soon.

        Raises:
            CorruptCheckpoint: any record of the chain is altered or does not fit.
        """
        index, count = span.start // self.step, span.stop - span.start
        codes = scratch.array("codes", count, np.uint8) if self.codes is None else self.codes[span]
        if self._records:
            yield from decode_chain(self._records, span, codes, scratch)
        first, end = 0, self._values.count_protected(codes)
        if self._ends:
            if index and not self._ends[index - 1].done():
                yield None
            first = self._ends[index - 1].result() if index else 0
            end += first
            self._ends[index].set_result(end)
        if span.stop == self._count:
            self._values.check_protected_count(end)
        yield from self._values.decode(span, codes, slice(first, end), out, scratch, last and self._factor is None)
        if self._factor is not None:
            yield from self._factor(span, out, scratch) or ()

    def fail(self, span: slice, error: BaseException) -> None:
        """Pass an error of a block to the threads that wait for the block."""
        if self._ends and not self._ends[span.start // self.step].done():
            self._ends[span.start // self.step].set_exception(error)
        if isinstance(self._factor, SecondMomentFactor):
            self._factor.chunk.fail(span, error)


@dataclass(frozen=True)
class SecondMomentFactor:
    """Factor of first moments: the roots of a chunk of second moments.

    Attributes:
        ref: record of the second moments.
        chunk: chunk of the second moments.
        multiply: multiplies values by the roots, in place.
    """

    ref: RecordRef
    chunk: ChunkDecoder
    multiply: Callable[[F32, F32], None]

    def __call__(self, span: slice, out: F32, scratch: Scratch) -> DecodingTask:
        """Multiply the values of a block."""
        squares = scratch.array("squares", len(out), np.float32)
        yield from self.chunk.decode(span, squares, scratch)
        self.multiply(out, squares)


class CodeReuse(NamedTuple):
    """Codes that a load need not decode, and whether it keeps those that it decodes.

    Attributes:
        keep: keep the codes of the chain, and of the second moments that scale it; 1 byte per element.
        known: codes of whole chunks, by record, that are decoded already.
        parts: codes of chunks, by record, of which a range of elements is decoded already, with first and end of it.
    """

    keep: bool = False
    known: Mapping[RecordRef, Codes] = MappingProxyType({})
    parts: Mapping[RecordRef, tuple[Codes, int, int]] = MappingProxyType({})

    def find(self, ref: RecordRef, span: tuple[int, int] | None) -> Codes | None:
        """Return the codes of a record, decoded at least in a span of elements (None: all), or None."""
        if span is not None and ref in self.parts:
            codes, first, end = self.parts[ref]
            return codes if first <= span[0] and span[1] <= end else None
        return self.known.get(ref)


NO_REUSE = CodeReuse()


class ChunkLoad(NamedTuple):
    """Load of a chunk: its destination and its blocks, which any threads decode, begun in order.

    Attributes:
        tensor: destination, contiguous, of the saved dtype and shape.
        blocks: blocks of the flat chunk to decode.
        decode: decodes a block into its part of the flat tensor.
        error_context: returns a context in which errors name the file.
        codes: destination of the codes, if they are kept.
        second_moments: record and codes of the second moments that scale the values, if these are kept.
    """

    tensor: torch.Tensor
    blocks: list[slice]
    decode: Callable[[slice, torch.Tensor, Scratch], DecodingTask | None]
    error_context: Callable[[], AbstractContextManager[None]]
    codes: Codes | None = None
    second_moments: tuple[RecordRef, Codes] | None = None


def decode_coded(chunk: ChunkDecoder, span: slice, out: torch.Tensor, scratch: Scratch) -> DecodingTask:
    """Decode a block of a chunk into a flat tensor of any floating dtype."""
    try:
        if out.dtype == torch.float32:
            yield from chunk.decode(span, out.numpy(), scratch, last=True)
            return
        values = scratch.array("values", out.numel(), np.float32)
        yield from chunk.decode(span, values, scratch)
    except BaseException as error:
        chunk.fail(span, error)
        raise
    copy_clamped(torch.from_numpy(values), out)


def decode_nothing(span: slice, out: torch.Tensor, scratch: Scratch) -> None:
    """Do nothing: the tensor is complete."""


def multiply_by_second_moments(
    times: Callable[[F32, F32], None], squares: F32, span: slice, out: F32, _: Scratch,
) -> None:
    """Multiply the values of a block by the roots of decoded second moments."""
    times(out, squares[span])


class _BlockTask:
    """Task to decode a block of a chunk, or nothing for a chunk without blocks.

    Attributes:
        done: completes with the task.
    """

    def __init__(self, load: ChunkLoad, span: slice | None, last: bool) -> None:
        self.load, self.span, self.last = load, span, last
        self.done: Future[None] = Future()

    def steps(self, scratch: Scratch) -> DecodingTask:
        """Decode the block."""
        if self.span is not None:
            with self.load.error_context():
                yield from self.load.decode(self.span, self.load.tensor.view(-1)[self.span], scratch) or ()


def decode_all(loads: Iterable[ChunkLoad], workers: Workers) -> Iterator[ChunkLoad]:
    """Decode the blocks of all chunks in parallel, and yield the chunks in order, each when it is complete.

    Loads are taken as threads need blocks, at most four per thread ahead. A thread decodes two blocks in turns as long
    as every other thread has a block. An error of a block is raised in its order; other threads may be writing until
    the workers are closed.
    """
    waiting, lock = deque[_BlockTask](), threading.Lock()

    def blocks() -> Iterator[_BlockTask]:
        for load in loads:
            for span in load.blocks[:-1] or ():
                yield _BlockTask(load, span, False)
            yield _BlockTask(load, load.blocks[-1] if load.blocks else None, True)

    def queued() -> Iterator[_BlockTask]:
        for block in blocks():
            with lock:
                waiting.append(block)
            yield block

    def work(block: _BlockTask) -> _BlockTask:
        with lock:
            if block not in waiting:  # another thread decodes it together with its own
                return block
            waiting.remove(block)
            batch = [block, waiting.popleft()] if len(waiting) >= workers.threads else [block]
        _decode_blocks(batch, workers)
        return block

    def by_twos() -> Iterator[_BlockTask]:
        every = blocks()
        while pair := list(islice(every, 2)):
            _decode_blocks(pair, workers)
            yield from pair

    for block in by_twos() if workers.threads == 1 else workers.map(work, queued(), ahead=4):
        block.done.result()
        if block.last:
            yield block.load


def _decode_blocks(blocks: list[_BlockTask], workers: Workers) -> None:
    """Decode up to two blocks."""
    memory = workers.scratch, workers.other
    errors: Sequence[BaseException | None]
    try:
        tasks = [block.steps(scratch) for block, scratch in zip(blocks, memory, strict=False)]
        errors = decoding_tasks.run_tasks(tasks)
    except BaseException as failure:  # of neither block, but threads wait for both
        errors = [failure] * len(blocks)
    for block, error in zip(blocks, errors, strict=True):
        if error is None:
            block.done.set_result(None)
        else:
            block.done.set_exception(error)


def split_blocks(count: int, step: int) -> Iterator[slice]:
    """Return the slices of `step` elements that a flat array of `count` elements is divided into."""
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def allocate_output(shape: list[int], dtype: torch.dtype, into: torch.Tensor | None) -> torch.Tensor:
    """Return the destination of a chunk: `into` if its shape, dtype and layout fit, else a new tensor.

    Raises:
        MemoryError: there is not enough memory for a new tensor.
    """
    fits = into is not None and into.dtype == dtype and list(into.shape) == shape and into.device.type == "cpu"
    if into is None or not fits or not into.is_contiguous() or into.is_conj() or into.is_neg():
        count = math.prod(shape)
        flat = torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8))
        return (flat.view(dtype) if count else torch.empty(0, dtype=dtype, device="cpu")).view(shape)
    return into


def copy_clamped(values: torch.Tensor, out: torch.Tensor) -> None:
    """Copy flat values to a tensor of another dtype, clamped so that finite values stay finite."""
    for target, block in zip(out.split(_CONVERT_ELEMENTS), values.split(_CONVERT_ELEMENTS), strict=True):
        if out.dtype.is_floating_point and torch.finfo(out.dtype).max < torch.finfo(block.dtype).max:
            limit = torch.finfo(out.dtype).max
            block = block.clamp(-limit, limit)
        target.copy_(block)
