"""Address ranges of tensors, and detection of overlaps."""

from __future__ import annotations

from bisect import bisect_left

import torch


class AddressRanges:
    """A set of address ranges; overlapping ranges are merged."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Add the range from `start` to `stop` (exclusive); return whether it overlaps none of the earlier ranges."""
        if start >= stop:
            return True
        first, last = bisect_left(self._stops, start + 1), bisect_left(self._starts, stop)
        if is_disjoint := first == last:
            merged = start, stop
        else:
            merged = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [merged[0]], [merged[1]]
        return is_disjoint

    def find_overlaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of the range from `start` to `stop` (exclusive) that lie in earlier ranges."""
        if start >= stop:
            return []
        first, last = bisect_left(self._stops, start + 1), bisect_left(self._starts, stop)
        earlier = zip(self._starts[first:last], self._stops[first:last], strict=True)
        return [(max(start, other_start), min(stop, other_stop)) for other_start, other_stop in earlier]


def count_spanned_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first to its last one, including gaps of its strides."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return reach * tensor.itemsize


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range from a tensor's first to its last byte (exclusive), including gaps of its strides."""
    start = tensor.data_ptr() if tensor.numel() else 0
    return start, start + count_spanned_bytes(tensor)
