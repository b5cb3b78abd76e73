"""Partitioning of a checkpoint that all ranks can read: the chunks that each compresses, the same on every rank."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from dsq_ckpt.convert.sources import Source, Stored
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.groups import second_moment_of

_CUTS = 4  # a part is at most a quarter of what a rank gets, so that none gets much more than another
_SMALLEST = 1 << 20  # bytes of a part that is worth a record of its own


class _Block(NamedTuple):
    """A part of a tensor, and the same part of those tied to it, which one rank must have together."""

    names: list[str]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int


def deal(source: Source, ranks: int) -> list[list[ChunkKey]]:
    """Partition a source over ranks, in its order: every chunk once, and about as many bytes for each rank.

    What is decoded does not depend on it: sketches are sums over all chunks, and everything else is per element. Second
    moments are an exception, whose scales are those of a chunk's rows and columns.

    Args:
        source: source to be partitioned.
        ranks: number of ranks.
    """
    total = sum(_bytes(stored, stored.shape) for stored in source.tensors.values())
    cut = ranks > 1 and source.mapped  # elsewhere each rank would read the whole chunk for its part of it
    blocks = list(_blocks(source, max(total // (ranks * _CUTS), _SMALLEST) if cut else sys.maxsize))
    loads = [(0, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    # The largest first, each to the rank that has least.
    for place in sorted(range(len(blocks)), key=lambda place: -blocks[place].bytes):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(place)
        heapq.heappush(loads, (load + blocks[place].bytes, rank))
    return [
        [ChunkKey(name, blocks[place].offsets, blocks[place].shape) for place in sorted(mine)
         for name in blocks[place].names]
        for mine in dealt
    ]


def _blocks(source: Source, most: int) -> Iterator[_Block]:
    """Yield all of a source: chunks as they are stored, cut in rows where they are larger than `most` bytes."""
    tied: dict[object, list[str]] = {}
    for name, stored in source.tensors.items():
        second = second_moment_of(name)  # it measures the first moment: a rank has both, or none
        leader = second if second in source.tensors and _alike(stored, source.tensors[second]) else name
        memory = source.tensors[leader].memory
        tied.setdefault(leader if memory is None else memory, []).append(name)
    for names in tied.values():
        stored = source.tensors[names[0]]
        for offsets, shape in stored.chunks:
            parts = min(-(-_bytes(stored, shape) // most), shape[0]) if shape else 1
            if parts <= 1:
                yield _Block(names, offsets, shape, _bytes(stored, shape))
                continue
            edges = [shape[0] * part // parts for part in range(parts + 1)]
            for start, stop in pairwise(edges):
                rows = (stop - start, *shape[1:])
                yield _Block(names, (offsets[0] + start, *offsets[1:]), rows, _bytes(stored, rows))


def _alike(one: Stored, other: Stored) -> bool:
    return (one.shape, list(one.chunks)) == (other.shape, list(other.chunks))


def _bytes(stored: Stored, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * stored.dtype.itemsize
