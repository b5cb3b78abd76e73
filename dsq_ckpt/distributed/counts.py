"""Sums of counts over all ranks, which omit the columns that are empty on all of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from dsq_ckpt.core.arrays import I64, U8, Counts, Mask
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import SaveFailed

_COLUMNS = 32
"""Adjacent columns that are sent or omitted together."""
_NARROW = 1 << 31
"""Sums below this are computed in pairs, two in an int64."""


class _Summary(NamedTuple):
    """The counts of one rank, in short.

    Attributes:
        largest: largest count.
        occupied: one bit for each block of columns, set if the block is not all zero; compressed.
        shapes: checksum of the shapes.
    """

    largest: int
    occupied: bytes
    shapes: int


def sum_counts(comm: Communicator, arrays: Sequence[Counts], failure: BaseException | None) -> None:
    """Sum arrays of counts over all ranks in one all-reduce, in place.

    A failed rank takes part too, and then every rank raises. The same gather tells all ranks which columns (indices of
    the last axis) are empty everywhere, and whether all sums fit into 32 bits.

    Args:
        comm: communicator of the ranks.
        arrays: int64, not negative, of the same shapes on all ranks unless `failure` is given.
        failure: exception of this rank.

    Raises:
        DSQError: on every rank if one failed: its own error there, `FailedElsewhere` on the others.
        SaveFailed: on every rank if shapes differ.
        BaseException: an exception that is no `Exception`, such as KeyboardInterrupt, unchanged on its rank.
    """

    def summarize() -> _Summary | None:
        if failure is not None:
            raise failure
        return None if comm.size == 1 else _summarize(arrays)

    summaries = [summary for summary in gather_from_all_ranks(comm, summarize) if summary is not None]
    if not summaries:
        return
    if odd := [rank for rank, summary in enumerate(summaries) if summary.shapes != summaries[0].shapes]:
        ranks = ", ".join(map(str, odd[:3])) + (", ..." if len(odd) > 3 else "")
        raise SaveFailed(f"rank(s) {ranks} counted values in tables of other sizes than rank 0")
    columns = _find_occupied_columns(arrays, summaries)
    shapes = [(*array.shape[:-1], int(occupied.sum())) for array, occupied in zip(arrays, columns, strict=True)]
    sizes = [math.prod(shape) for shape in shapes]
    count, problem = sum(sizes), None
    if not count:
        return
    narrow = sum(summary.largest for summary in summaries) < _NARROW
    words = np.zeros((-(-count // 2) if narrow else count) + 1, np.int64)  # the last one: whether a rank failed
    flat = words.view(np.uint32)[:count] if narrow else words[:count]  # no carry from one half to the other
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    try:
        for array, part, occupied in zip(arrays, parts, columns, strict=True):
            part[:] = array[..., occupied].reshape(-1)
    except BaseException as error:  # the others wait in the sum
        problem, words[-1] = error, 1
    comm.sum(words)
    if words[-1]:
        gather_from_all_ranks(comm, lambda: _raise(problem))
    for array, part, occupied, shape in zip(arrays, parts, columns, shapes, strict=True):
        array[..., occupied] = part.reshape(shape)


def _raise(problem: BaseException | None) -> None:
    if problem is not None:
        raise problem


def _summarize(arrays: Sequence[Counts]) -> _Summary:
    largest = [array.max(axis=tuple(range(array.ndim - 1)), initial=0) for array in arrays]
    blocks = [_split_columns(counts).any(axis=1) for counts in largest]
    packed = np.packbits(np.concatenate(blocks)) if blocks else np.zeros(0, np.uint8)
    most = max((int(counts.max(initial=0)) for counts in largest), default=0)
    shapes = zlib.crc32(repr([array.shape for array in arrays]).encode())
    return _Summary(most, zlib.compress(packed.tobytes()), shapes)


def _split_columns(counts: I64) -> I64:
    """Return one row for each block of columns; the last one is padded with zeros."""
    return np.pad(counts, (0, -counts.size % _COLUMNS)).reshape(-1, _COLUMNS)


def _find_occupied_columns(arrays: Sequence[Counts], summaries: Sequence[_Summary]) -> list[Mask]:
    """Return a mask of the last axis of each array, of blocks that hold counts on any rank."""
    masks: list[U8] = [np.frombuffer(zlib.decompress(summary.occupied), np.uint8) for summary in summaries]
    blocks, start = np.unpackbits(reduce(np.bitwise_or, masks)).astype(bool), 0
    columns = []
    for array in arrays:
        size = array.shape[-1]
        stop = start - (-size // _COLUMNS)
        columns.append(np.repeat(blocks[start:stop], _COLUMNS)[:size])
        start = stop
    return columns
