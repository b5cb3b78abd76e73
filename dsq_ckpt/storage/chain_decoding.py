"""One record of a chain of codes, decoded block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dsq_ckpt.coding.base import Coder
from dsq_ckpt.coding.turns import Steps, Wanted
from dsq_ckpt.core.arrays import Codes
from dsq_ckpt.core.workers import Scratch
from dsq_ckpt.errors import CodingError, CorruptCheckpoint
from dsq_ckpt.storage.container import Block, ContainerReader

_MAX_BLOCK_ELEMENTS = 1 << 26  # elements


class ChainRecord(NamedTuple):
    """Blocks of codes of one record of a chain."""

    reader: ContainerReader
    coder: Coder
    step: int
    blocks: list[Block | None]

    @property
    def in_place(self) -> bool:
        """Whether `update` takes less time than `decode`."""
        return self.coder.in_place

    def update(self, where: slice, codes: Codes, scratch: Scratch) -> Steps:
        """Decode the codes `where`, which begins with a block, in place of those of the parent.

        Raises:
            CorruptCheckpoint: see `decode`.
        """
        for place, part in self._parts(where):
            if (block := self.blocks[place]) is not None:
                try:
                    yield Wanted(self.coder, self.reader.borrow(block, scratch), None, codes[part], in_place=True)
                except (CodingError, ValueError) as error:
                    raise self._named(place, error) from error

    def decode(self, where: slice, parent: Codes | None, out: Codes, scratch: Scratch) -> Steps:
        """Decode the codes `where`, which begins with a block, into `out`, given those of the parent there.

        Raises:
            CorruptCheckpoint: a block is altered, or does not fit.
        """
        for place, part in self._parts(where):
            block, previous = self.blocks[place], None if parent is None else parent[part]
            try:
                if block is not None:
                    yield Wanted(self.coder, self.reader.borrow(block, scratch), previous, out[part])
                elif previous is not None:
                    out[part] = previous
                else:
                    raise CodingError("it repeats previous codes, but has none")
            except (CodingError, ValueError) as error:
                raise self._named(place, error) from error

    def _parts(self, where: slice) -> Iterator[tuple[int, slice]]:
        for place in range(where.start // self.step, -(-where.stop // self.step)):
            yield place, slice(place * self.step - where.start, (place + 1) * self.step - where.start)

    def _named(self, place: int, error: Exception) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"'{self.reader.path}' block {place}: {error}")


def decode_chain(layers: Sequence[ChainRecord], where: slice, out: Codes, scratch: Scratch) -> Steps:
    """Decode the codes `where` of a chain, from its keyframe on, into `out`.

    Raises:
        CorruptCheckpoint: see `Layer.decode`.
    """
    moves = 1 + sum(not layer.in_place for layer in layers[1:])
    to, other = out, scratch.array("chain", len(out) if moves > 1 else 0, np.uint8)
    if moves % 2 == 0:
        to, other = other, to
    parent = None
    for layer in layers:
        if parent is not None and layer.in_place:
            yield from layer.update(where, parent, scratch)
        else:
            yield from layer.decode(where, parent, to, scratch)
            parent, to, other = to, other, to


def read_block_elements(reader: ContainerReader) -> int:
    """Return the elements of each block of codes of a file.

    Raises:
        CorruptCheckpoint: there can be no blocks of so many.
    """
    step = reader.contents["block_elements"]
    if type(step) is not int or not 0 < step <= _MAX_BLOCK_ELEMENTS:
        raise CorruptCheckpoint(f"'{reader.path}': blocks of {step} elements")
    return step
