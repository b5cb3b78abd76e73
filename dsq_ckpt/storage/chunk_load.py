"""A chunk that is being decoded: each block by itself, from the bytes of its chain to values where they are wanted.

A block of codes stays in the cache from the keyframe's bytes to the values. What a block takes beside its codes and
values is memory that its thread uses again for the next one: fresh memory costs as much time as decoding.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt.coding import layered, turns
from dsq_ckpt.coding.turns import Steps
from dsq_ckpt.core.arrays import F32, U32, Codes
from dsq_ckpt.core.workers import Scratch, Workers
from dsq_ckpt.errors import CodingError, CorruptCheckpoint
from dsq_ckpt.quantization.chunk import Dequantizer
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from dsq_ckpt.storage.chain_decoding import ChainRecord, decode_chain
from dsq_ckpt.storage.container import Block, ContainerReader
from dsq_ckpt.storage.shard import RecordRef

_CONVERT_ELEMENTS = 1 << 15  # elements that torch converts in the thread that asks, without threads of its own


class RecordDecoder(NamedTuple):
    """How codes of a record become values, block by block, in any thread.

    Attributes:
        source: file that the blocks are counted in, and of the refinement, if there is one.
        fqn: name of the tensor, for errors.
        step: elements of a block.
        refined: blocks of the refinement; None: the base layer alone.
        bits: of a refinement symbol.
        dequantizer: levels and cells.
        protected_code: the code of protected values.
        protected: fp32 bits of all of them, in order.
        scales: of rows and columns, that values are multiplied by.
    """

    source: ContainerReader
    fqn: str
    step: int
    refinement: list[Any] | None
    bits: int
    dequantizer: Dequantizer
    protected_code: int
    protected: U32
    scales: MatrixScales | None

    def count_protected(self, codes: Codes) -> int:
        """Return how many of these codes are of protected values."""
        return int(np.count_nonzero(codes == self.protected_code)) if len(self.protected) else 0

    def check_protected_count(self, total: int) -> None:
        """Refuse a record of which another number of codes is protected than it has values for."""
        if total != len(self.protected):
            raise CorruptCheckpoint(
                f"'{self.fqn}': {total} codes are protected but {len(self.protected)} protected values are stored"
            )

    def decode(
        self, where: slice, codes: Codes, protected: slice, out: F32, scratch: Scratch, last: bool = False
    ) -> Steps:
        """Write the values of a block to `out`.

        Args:
            where: its place in the chunk.
            codes: uint8[n].
            protected: which of the protected values are its own.
            out: float32[n].
            scratch: memory of the threads.
            last: nothing reads the values soon.

        Raises:
            CorruptCheckpoint: the block is altered, or does not fit.
        """
        symbols, packed = None, False
        try:
            if self.refinement is not None:
                block = Block(*self.refinement[where.start // self.step])
                data = self.source.borrow(block, scratch)
                symbols, packed = yield from layered.symbols_of(data, codes, self.bits, scratch)
            self.dequantizer.block(
                codes, self.protected[protected], symbols, out, packed, last and self.scales is None
            )
        except (CodingError, ValueError) as error:
            raise CorruptCheckpoint(f"'{self.source.path}', {self.fqn}: {error}") from error
        if self.scales is not None:
            self.scales.multiply(out, where.start)


class CodedChunk:
    """The chain of a chunk and its values, for threads that take a block each.

    Attributes:
        step: elements of a block.
        codes: where all its codes are, or are to be; None: nowhere.
    """

    def __init__(
        self, layers: list[ChainRecord], values: RecordDecoder, codes: Codes | None, count: int,
        factor: Callable[[slice, F32, Scratch], Steps | None] | None,
    ) -> None:
        """Make a chunk.

        Args:
            layers: the records of its chain, from the keyframe on; none: `codes` are there.
            values: of the last of them.
            codes: see above.
            count: elements of the chunk.
            factor: multiplies the values of a block by what is known elsewhere.
        """
        self.step, self.codes = values.step, codes
        self._layers, self._values, self._count, self._factor = layers, values, count, factor
        # Number of protected values up to the end of each block, for which the thread of the next block waits.
        blocks = split_blocks(count, self.step) if len(values.protected) else ()
        self._ends: list[Future[int]] = [Future() for _ in blocks]

    def select_blocks(self, span: tuple[int, int] | None) -> list[slice]:
        """Return the blocks to decode for the elements of a span, first and last, exclusive; None: for all."""
        blocks = list(split_blocks(self._count, self.step))
        return blocks if span is None or self.is_sequential else blocks[span[0] // self.step : -(-span[1] // self.step)]

    @property
    def second_moments(self) -> tuple[RecordRef, Codes] | None:
        """Record and codes of the second moments that it is multiplied by, if these are kept."""
        own = self._factor
        if not isinstance(own, SecondMomentFactor) or own.chunk.codes is None:
            return None
        return own.ref, own.chunk.codes

    @property
    def is_sequential(self) -> bool:
        """Whether all blocks are needed, each begun after the one before."""
        return bool(self._ends) or (isinstance(self._factor, SecondMomentFactor) and self._factor.chunk.is_sequential)

    def decode(self, where: slice, out: F32, scratch: Scratch, last: bool = False) -> Steps:
        """Write the values of a block to `out`; `last`: nothing reads them soon.

        Raises:
            CorruptCheckpoint: any record of the chain is altered or does not fit.
        """
        place, count = where.start // self.step, where.stop - where.start
        codes = scratch.array("codes", count, np.uint8) if self.codes is None else self.codes[where]
        if self._layers:
            yield from decode_chain(self._layers, where, codes, scratch)
        first, end = 0, self._values.count_protected(codes)
        if self._ends:
            if place and not self._ends[place - 1].done():
                yield None
            first = self._ends[place - 1].result() if place else 0
            end += first
            self._ends[place].set_result(end)
        if where.stop == self._count:
            self._values.check_protected_count(end)
        yield from self._values.decode(where, codes, slice(first, end), out, scratch, last and self._factor is None)
        if self._factor is not None:
            yield from self._factor(where, out, scratch) or ()

    def fail(self, where: slice, error: BaseException) -> None:
        """End the wait of threads for a block that could not be decoded, wherever that failed."""
        if self._ends and not self._ends[where.start // self.step].done():
            self._ends[where.start // self.step].set_exception(error)
        if isinstance(self._factor, SecondMomentFactor):
            self._factor.chunk.fail(where, error)


@dataclass(frozen=True)
class SecondMomentFactor:
    """Second moments by whose roots the values of another chunk are multiplied.

    Attributes:
        ref: their record.
        chunk: they.
        times: multiplies values by roots, in place.
    """

    ref: RecordRef
    chunk: CodedChunk
    multiply: Callable[[F32, F32], None]

    def __call__(self, where: slice, out: F32, scratch: Scratch) -> Steps:
        """Multiply the values of a block."""
        squares = scratch.array("squares", len(out), np.float32)
        yield from self.chunk.decode(where, squares, scratch)
        self.multiply(out, squares)


class ChunkLoad(NamedTuple):
    """A chunk to be decoded, block by block, by any threads; blocks are begun in their order.

    Attributes:
        tensor: takes the values, in the dtype and shape in which they were saved; contiguous.
        blocks: blocks of the flat chunk that are to be decoded.
        decode: decodes a block, by its place, into its part of the flat tensor, with memory of the thread.
        naming: returns a context in which errors name the file.
        codes: take the codes, if they are wanted.
        measure: record and codes of the second moments by whose roots values are multiplied, if these are kept, too.
    """

    tensor: torch.Tensor
    blocks: list[slice]
    decode: Callable[[slice, torch.Tensor, Scratch], Steps | None]
    error_context: Callable[[], AbstractContextManager[None]]
    codes: Codes | None = None
    second_moments: tuple[RecordRef, Codes] | None = None


def decode_coded(chunk: CodedChunk, where: slice, out: torch.Tensor, scratch: Scratch) -> Steps:
    """Decode a block of a chunk into a flat tensor of any floating dtype."""
    try:
        if out.dtype == torch.float32:
            yield from chunk.decode(where, out.numpy(), scratch, last=True)
            return
        values = scratch.array("values", out.numel(), np.float32)
        yield from chunk.decode(where, values, scratch)
    except BaseException as error:
        chunk.fail(where, error)
        raise
    copy_clamped(torch.from_numpy(values), out)


def decode_nothing(where: slice, out: torch.Tensor, scratch: Scratch) -> None:
    """Leave a tensor as it is, which is complete."""


def multiply_by_roots(times: Callable[[F32, F32], None], squares: F32, where: slice, out: F32, _: Scratch) -> None:
    """Multiply the values of a block by roots of second moments that were decoded before."""
    times(out, squares[where])


class _BlockTask:
    """A block of a chunk that is to be decoded, or one without any.

    Attributes:
        done: ends with it.
    """

    def __init__(self, load: ChunkLoad, where: slice | None, last: bool) -> None:
        self.load, self.where, self.last = load, where, last
        self.done: Future[None] = Future()

    def steps(self, scratch: Scratch) -> Steps:
        """Decode it."""
        if self.where is not None:
            with self.load.error_context():
                yield from self.load.decode(self.where, self.load.tensor.view(-1)[self.where], scratch) or ()


def decode_all(loads: Iterable[ChunkLoad], workers: Workers) -> Iterator[ChunkLoad]:
    """Decode chunks side by side, and yield each in its turn when it is complete.

    Loads are taken as threads need blocks, at most four for each thread ahead. A thread decodes two blocks in turns
    where one is left for each other thread. An error of a block is raised in its turn; other threads
    may be writing until the workers are closed.
    """
    waiting, lock = deque[_BlockTask](), threading.Lock()

    def blocks() -> Iterator[_BlockTask]:
        for load in loads:
            for where in load.blocks[:-1] or ():
                yield _BlockTask(load, where, False)
            yield _BlockTask(load, load.blocks[-1] if load.blocks else None, True)

    def queued() -> Iterator[_BlockTask]:
        for block in blocks():
            with lock:
                waiting.append(block)
            yield block

    def work(block: _BlockTask) -> _BlockTask:
        with lock:
            if block not in waiting:  # another thread has it beside its own
                return block
            waiting.remove(block)
            taken = [block, waiting.popleft()] if len(waiting) >= workers.threads else [block]
        _decode_blocks(taken, workers)
        return block

    def by_twos() -> Iterator[_BlockTask]:
        every = blocks()
        while taken := list(islice(every, 2)):
            _decode_blocks(taken, workers)
            yield from taken

    for block in by_twos() if workers.threads == 1 else workers.map(work, queued(), ahead=4):
        block.done.result()
        if block.last:
            yield block.load


def _decode_blocks(blocks: list[_BlockTask], workers: Workers) -> None:
    """Decode up to two blocks."""
    memory = workers.scratch, workers.other
    errors: Sequence[BaseException | None]
    try:
        errors = turns.run_in_turns([block.steps(own) for block, own in zip(blocks, memory, strict=False)])
    except BaseException as beside:  # of neither block, but whoever waits for them would wait without end
        errors = [beside] * len(blocks)
    for block, error in zip(blocks, errors, strict=True):
        if error is None:
            block.done.set_result(None)
        else:
            block.done.set_exception(error)


def split_blocks(count: int, step: int) -> Iterator[slice]:
    """Yield blocks of `step` elements of a flat array of `count`."""
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def allocate_output(shape: list[int], dtype: torch.dtype, into: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor that takes a chunk: `into`, if shape, dtype and layout allow, or a new one.

    Raises:
        MemoryError: there is not enough memory for a new one.
    """
    fits = into is not None and into.dtype == dtype and list(into.shape) == shape and into.device.type == "cpu"
    if into is None or not fits or not into.is_contiguous() or into.is_conj() or into.is_neg():
        count = math.prod(shape)
        flat = torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8))
        return (flat.view(dtype) if count else torch.empty(0, dtype=dtype, device="cpu")).view(shape)
    return into


def copy_clamped(values: torch.Tensor, out: torch.Tensor) -> None:
    """Copy flat values to a tensor of another dtype; finite values beyond its largest number become that number."""
    for own, made in zip(out.split(_CONVERT_ELEMENTS), values.split(_CONVERT_ELEMENTS), strict=True):
        if out.dtype.is_floating_point and torch.finfo(out.dtype).max < torch.finfo(made.dtype).max:
            limit = torch.finfo(out.dtype).max
            made = made.clamp(-limit, limit)
        own.copy_(made)
