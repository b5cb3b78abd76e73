"""Block-wise decoding of codes along a chain of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dsq_ckpt.coding.base import Coder
from dsq_ckpt.coding.decoding_tasks import BlockRequest, DecodingTask
from dsq_ckpt.core.arrays import Codes
from dsq_ckpt.core.workers import Scratch
from dsq_ckpt.errors import CodingError, CorruptCheckpoint
from dsq_ckpt.storage.container import Block, ContainerReader

_MAX_BLOCK_ELEMENTS = 1 << 26  # elements


class ChainRecord(NamedTuple):
    """Record of a chain: its blocks of codes, None for a block that equals that of the parent."""

    reader: ContainerReader
    coder: Coder
    step: int
    blocks: list[Block | None]

    @property
    def in_place(self) -> bool:
        """Whether `update` is faster than `decode`."""
        return self.coder.in_place

    def update(self, span: slice, codes: Codes, scratch: Scratch) -> DecodingTask:
        """Replace the parent's codes in the range `span` by those of this record. The range begins with a block.

        Raises:
            CorruptCheckpoint: see `decode`.
        """
        for index, part in self._parts(span):
            if (block := self.blocks[index]) is not None:
                try:
                    yield BlockRequest(self.coder, self.reader.borrow(block, scratch), None, codes[part], in_place=True)
                except (CodingError, ValueError) as error:
                    raise self._locate_error(index, error) from error

    def decode(self, span: slice, parent: Codes | None, out: Codes, scratch: Scratch) -> DecodingTask:
        """Decode the codes in the range `span` into `out`, from the parent's codes there. It begins with a block.

        Raises:
            CorruptCheckpoint: a block is altered, or does not fit.
        """
        for index, part in self._parts(span):
            block, previous = self.blocks[index], None if parent is None else parent[part]
            try:
                if block is not None:
                    yield BlockRequest(self.coder, self.reader.borrow(block, scratch), previous, out[part])
                elif previous is not None:
                    out[part] = previous
                else:
                    raise CodingError("it repeats previous codes, but has none")
            except (CodingError, ValueError) as error:
                raise self._locate_error(index, error) from error

    def _parts(self, span: slice) -> Iterator[tuple[int, slice]]:
        for index in range(span.start // self.step, -(-span.stop // self.step)):
            yield index, slice(index * self.step - span.start, (index + 1) * self.step - span.start)

    def _locate_error(self, index: int, error: Exception) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"'{self.reader.path}' block {index}: {error}")


def decode_chain(records: Sequence[ChainRecord], span: slice, out: Codes, scratch: Scratch) -> DecodingTask:
    """Decode the codes in the range `span` of a chain, from its keyframe on, into `out`.

    Raises:
        CorruptCheckpoint: see `ChainRecord.decode`.
    """
    moves = 1 + sum(not record.in_place for record in records[1:])
    to, other = out, scratch.array("chain", len(out) if moves > 1 else 0, np.uint8)
    if moves % 2 == 0:
        to, other = other, to
    parent = None
    for record in records:
        if parent is not None and record.in_place:
            yield from record.update(span, parent, scratch)
        else:
            yield from record.decode(span, parent, to, scratch)
            parent, to, other = to, other, to


def read_block_elements(reader: ContainerReader) -> int:
    """Return the elements per block of codes of a file.

    Raises:
        CorruptCheckpoint: the number is not valid.
    """
    step = reader.contents["block_elements"]
    if type(step) is not int or not 0 < step <= _MAX_BLOCK_ELEMENTS:
        raise CorruptCheckpoint(f"'{reader.path}': blocks of {step} elements")
    return step
