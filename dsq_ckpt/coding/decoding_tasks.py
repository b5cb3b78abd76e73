"""Decoding tasks, run two at a time by one thread: each fills the wait times of the other, which halves the time.

A task is a generator. It yields each `BlockRequest` and is resumed after the block was decoded. So any two blocks can
be decoded together, whatever they are part of.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.coding.base import Coder
from dsq_ckpt.coding.rans import RansCoder
from dsq_ckpt.core.arrays import U8


class BlockRequest(NamedTuple):
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


DecodingTask = Generator["BlockRequest | None", None, None]
"""Generator of the blocks that a task needs, and of None before it waits for other tasks. It is resumed when the block
was decoded, or when the thread has no other task. Errors of decoding are raised at the yield."""


def run_task(task: DecodingTask) -> None:
    """Run one task, block by block."""
    [error] = run_tasks([task])
    if error is not None:
        raise error


def run_tasks(tasks: list[DecodingTask]) -> list[BaseException | None]:
    """Run up to two tasks, decoding their blocks in turns; return the exception of each, or None."""
    errors: list[BaseException | None] = [None] * len(tasks)
    requests: dict[int, BlockRequest | None] = {}

    def resume(number: int, error: BaseException | None = None) -> None:
        try:
            requests[number] = next(tasks[number]) if error is None else tasks[number].throw(error)
        except BaseException as raised:
            requests.pop(number, None)
            errors[number] = None if isinstance(raised, StopIteration) else raised

    for number in range(len(tasks)):
        resume(number)
    while requests:
        ready = {number: block for number, block in requests.items() if block is not None}
        if not ready:
            resume(min(requests))
        for number, error in zip(ready, decode_blocks(list(ready.values())), strict=True):
            resume(number, error)
    return errors


def decode_blocks(blocks: list[BlockRequest]) -> list[BaseException | None]:
    """Decode up to two blocks; return the exception of each, or None."""
    errors, path = [-1] * len(blocks), native.path_index()
    if len(blocks) == 2 and native.supports_pairs(path):
        first = _lane_arguments(blocks[0])
        second = None if first is None else _lane_arguments(blocks[1])
        if first is not None and second is not None:
            errors = native.decode_pair(path, first, second)
    return [_decode_alone(block) if error else None for block, error in zip(blocks, errors, strict=True)]


def _decode_alone(block: BlockRequest) -> BaseException | None:
    """Decode a block alone. A block that failed in a pair fails again, with the message of the coder."""
    try:
        block.decode()
    except BaseException as error:
        return error
    return None


def _lane_arguments(block: BlockRequest) -> native.BlockArguments | None:
    """Return the arguments of a 32-lane block; None for other or invalid blocks."""
    coder, data, parent, out, in_place = block
    lanes = None if in_place else coder.lane_coder(parent)
    if not isinstance(lanes, RansCoder) or not len(data):
        return None
    for array in (out,) if parent is None else (out, parent):
        if array.dtype != np.uint8 or array.shape != (out.size,) or not array.flags.c_contiguous:
            return None
    if not out.flags.writeable or (parent is not None and np.may_share_memory(parent, out)):
        return None
    return native.BlockArguments(lanes.native_tables(parent), parent, out, np.frombuffer(data, np.uint8))
