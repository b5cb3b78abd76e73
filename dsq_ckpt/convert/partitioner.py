"""Partitioning of a checkpoint that all ranks can read into the chunks that each rank compresses."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from dsq_ckpt.convert.sources import Source, StoredTensor
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.groups import second_moment_of

_PARTS_PER_RANK = 4  # a part is at most a quarter of a rank's share, which bounds the imbalance
_MIN_PART_BYTES = 1 << 20  # smaller parts are not worth a record of their own


class _Block(NamedTuple):
    """A part of a tensor and the same part of tied tensors, which must be on one rank."""

    names: list[str]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int


def partition_source(source: Source, ranks: int) -> list[list[ChunkKey]]:
    """Return the chunks of each rank, in the order of the source, with about the same number of bytes.

    The partition is the same on every rank. Decoded values do not depend on it: sketches are sums over all chunks, and
    everything else is per element. An exception are second moments, whose scales belong to rows and columns of a chunk.

    Args:
        source: source to partition.
        ranks: number of ranks.
    """
    total = sum(_count_bytes(stored, stored.shape) for stored in source.tensors.values())
    splits = ranks > 1 and source.mapped  # otherwise each rank would read the whole chunk for its part
    blocks = list(_blocks(source, max(total // (ranks * _PARTS_PER_RANK), _MIN_PART_BYTES) if splits else sys.maxsize))
    loads = [(0, rank) for rank in range(ranks)]
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    # Greedy: the largest block first, to the rank with the fewest bytes.
    for index in sorted(range(len(blocks)), key=lambda index: -blocks[index].bytes):
        load, rank = heapq.heappop(loads)
        assigned[rank].append(index)
        heapq.heappush(loads, (load + blocks[index].bytes, rank))
    return [
        [ChunkKey(name, blocks[index].offsets, blocks[index].shape) for index in sorted(places)
         for name in blocks[index].names]
        for places in assigned
    ]


def _blocks(source: Source, max_bytes: int) -> Iterator[_Block]:
    """Yield the stored chunks of a source, split by rows if they are larger than `max_bytes`."""
    tied: dict[object, list[str]] = {}
    for name, stored in source.tensors.items():
        second = second_moment_of(name)  # the first moment is quantized relative to it, so one rank has both
        leader = second if second in source.tensors and _same_chunks(stored, source.tensors[second]) else name
        memory = source.tensors[leader].memory
        tied.setdefault(leader if memory is None else memory, []).append(name)
    for names in tied.values():
        stored = source.tensors[names[0]]
        for offsets, shape in stored.chunks:
            parts = min(-(-_count_bytes(stored, shape) // max_bytes), shape[0]) if shape else 1
            if parts <= 1:
                yield _Block(names, offsets, shape, _count_bytes(stored, shape))
                continue
            edges = [shape[0] * part // parts for part in range(parts + 1)]
            for start, stop in pairwise(edges):
                rows = (stop - start, *shape[1:])
                yield _Block(names, (offsets[0] + start, *offsets[1:]), rows, _count_bytes(stored, rows))


def _same_chunks(one: StoredTensor, other: StoredTensor) -> bool:
    return (one.shape, list(one.chunks)) == (other.shape, list(other.chunks))


def _count_bytes(stored: StoredTensor, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * stored.dtype.itemsize
