"""Conversion of flat ranges of tensors, as in ZeRO's partitions, to boxes with offsets and shape, as in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor whose elements are contiguous in the flattened tensor.

    Attributes:
        offsets: offsets of the box in the tensor.
        shape: shape of the box, with as many dimensions as the tensor.
        start: index of its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def split_range(shape: Sequence[int], start: int, length: int) -> Iterator[Box]:
    """Yield boxes that cover elements `start` to `start + length` of a flattened tensor, in order.

    There are at most two boxes per dimension and one more: the rest of a row, whole rows, the beginning of a row, and
    so on for inner dimensions.

    Raises:
        ValueError: the range exceeds the tensor.
    """
    total = math.prod(shape)
    if start < 0 or length < 0 or start + length > total:
        raise ValueError(f"elements {start} to {start + length} of a tensor of {total}")
    if length:
        yield from _split_range(tuple(shape), (), start, start, length)


def _split_range(shape: tuple[int, ...], outer: tuple[int, ...], offset: int, start: int, length: int) -> Iterator[Box]:
    """Yield the boxes of a range that starts at index `first` of the sub-tensor at `outer`, `start` of the tensor."""
    before = (1,) * len(outer)
    if not shape:
        yield Box(outer, before, start)
        return
    row = math.prod(shape[1:])
    first, skipped = divmod(offset, row)
    if skipped or length < row:
        head = min(length, row - skipped)
        yield from _split_range(shape[1:], (*outer, first), skipped, start, head)
        first, start, length = first + 1, start + head, length - head
    rows = length // row
    if rows:
        yield Box((*outer, first, *(0,) * len(shape[1:])), (*before, rows, *shape[1:]), start)
        first, start, length = first + rows, start + rows * row, length - rows * row
    if length:
        yield from _split_range(shape[1:], (*outer, first), 0, start, length)


def flat_index(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Return the index of the element at `offsets` in the flattened tensor."""
    index = 0
    for size, offset in zip(shape, offsets, strict=True):
        index = index * size + offset
    return index


def is_contiguous(shape: Sequence[int], box: Sequence[int]) -> bool:
    """Return whether the elements of a box of this shape are contiguous in the flattened tensor."""
    inner = len(shape)
    while inner and box[inner - 1] == shape[inner - 1]:
        inner -= 1
    return all(size == 1 for size in box[: max(inner - 1, 0)])
