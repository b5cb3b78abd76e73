"""Two blocks decoded by one thread in turns: groups of one fill the waits of the other, which takes half the time.

What decodes a block is written as a generator, which yields each `Wanted` and goes on when that was decoded. So any two
blocks can be decoded side by side, whatever they are part of.
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
    """A block that is to be decoded: arguments of `Coder.decode`; with `in_place`, of `Coder.update`."""

    coder: Coder
    data: bytes | memoryview
    parent: U8 | None
    out: U8
    in_place: bool = False

    def decode(self) -> None:
        """Decode it; raises what the coder raises."""
        if self.in_place:
            self.coder.update(self.data, self.out)
        else:
            self.coder.decode(self.data, self.parent, self.out)


Steps = Generator["Wanted | None", None, None]
"""Work that yields each block which it needs decoded, and None where it is about to wait for other work: it is resumed
when the block was decoded, or no other work of the same thread is left. Errors are raised where it has yielded."""


def run(work: Steps) -> None:
    """Do work, block by block."""
    [error] = run_in_turns([work])
    if error is not None:
        raise error


def run_in_turns(works: list[Steps]) -> list[BaseException | None]:
    """Do up to two works, of which blocks are decoded in turns, and return what each has raised."""
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
    """Decode up to two blocks, and return what is wrong with each."""
    errors, level = [-1] * len(blocks), _native.level()
    if len(blocks) == 2 and _native.takes_two(level):
        first = _arguments(blocks[0])
        second = None if first is None else _arguments(blocks[1])
        if first is not None and second is not None:
            errors = _native.decode_two(level, first, second)
    return [_decoded(block) if error else None for block, error in zip(blocks, errors, strict=True)]


def _decoded(block: Wanted) -> BaseException | None:
    """Decode a block alone: one that failed with another one fails again, by the coder that says why."""
    try:
        block.decode()
    except BaseException as error:
        return error
    return None


def _arguments(block: Wanted) -> _native.Given | None:
    """Return the arguments of a block of 32 lanes; None if it is none, or it is wrong."""
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
