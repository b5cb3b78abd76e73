"""Decoding of two blocks by one thread in turns: each fills the wait times of the other, which halves the time.

Functions that decode blocks are generators. They yield each `Wanted` and are resumed after it was decoded. So any two
blocks can be decoded together, whatever they are part of.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from dsq_ckpt.coding import _native
from dsq_ckpt.coding.base import Coder
from dsq_ckpt.coding.rans import RansCoder
from dsq_ckpt.core.arrays import U8


class Wanted(NamedTuple):
    """A block to decode: arguments of `Coder.decode` or, with `in_place`, of `Coder.update`."""

    coder: Coder
    data: bytes | memoryview
    parent: U8 | None
    out: U8
    in_place: bool = False

    def decode(self) -> None:
        """Decode the block alone; raise the errors of the coder."""
        if self.in_place:
            self.coder.update(self.data, self.out)
        else:
            self.coder.decode(self.data, self.parent, self.out)


Steps = Generator["Wanted | None", None, None]
"""Work that yields each block that it needs, and None before it waits for other work. It is resumed when the block was
decoded, or when no other work of the thread is left. Errors of decoding are raised at the yield."""


def run(work: Steps) -> None:
    """Run one work, block by block."""
    [error] = run_in_turns([work])
    if error is not None:
        raise error


def run_in_turns(works: list[Steps]) -> list[BaseException | None]:
    """Run up to two works, decoding their blocks in turns; return the exception of each, or None."""
    errors: list[BaseException | None] = [None] * len(works)
    wanted: dict[int, Wanted | None] = {}

    def resume(number: int, error: BaseException | None = None) -> None:
        try:
            wanted[number] = next(works[number]) if error is None else works[number].throw(error)
        except BaseException as raised:
            wanted.pop(number, None)
            errors[number] = None if isinstance(raised, StopIteration) else raised

    for number in range(len(works)):
        resume(number)
    while wanted:
        ready = {number: block for number, block in wanted.items() if block is not None}
        if not ready:
            resume(min(wanted))
        for number, error in zip(ready, decode_blocks(list(ready.values())), strict=True):
            resume(number, error)
    return errors


def decode_blocks(blocks: list[Wanted]) -> list[BaseException | None]:
    """Decode up to two blocks; return the exception of each, or None."""
    errors, level = [-1] * len(blocks), _native.level()
    if len(blocks) == 2 and _native.takes_two(level):
        first = _arguments(blocks[0])
        second = None if first is None else _arguments(blocks[1])
        if first is not None and second is not None:
            errors = _native.decode_two(level, first, second)
    return [_decoded(block) if error else None for block, error in zip(blocks, errors, strict=True)]


def _decoded(block: Wanted) -> BaseException | None:
    """Decode a block alone. A block that failed in a pair fails again, with the message of the coder."""
    try:
        block.decode()
    except BaseException as error:
        return error
    return None


def _arguments(block: Wanted) -> _native.Given | None:
    """Return the arguments of a 32-lane block; None for other or invalid blocks."""
    coder, data, parent, out, in_place = block
    lanes = None if in_place else coder.in_lanes(parent)
    if not isinstance(lanes, RansCoder) or not len(data):
        return None
    for array in (out,) if parent is None else (out, parent):
        if array.dtype != np.uint8 or array.shape != (out.size,) or not array.flags.c_contiguous:
            return None
    if not out.flags.writeable or (parent is not None and np.may_share_memory(parent, out)):
        return None
    return _native.Given(lanes.addresses(parent), parent, out, np.frombuffer(data, np.uint8))
