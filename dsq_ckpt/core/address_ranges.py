"""Memory of tensors: ranges of addresses, and whether they overlap."""

from __future__ import annotations

from bisect import bisect_left

import torch


class AddressRanges:
    """Ranges of addresses; those that overlap are joined."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Add a range, without its last address; return whether it is apart from all that were added before."""
        if start >= stop:
            return True
        first, last = bisect_left(self._stops, start + 1), bisect_left(self._starts, stop)
        if apart := first == last:
            joined = start, stop
        else:
            joined = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [joined[0]], [joined[1]]
        return apart


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor from its first to its last byte, with gaps that it may have; last exclusive."""
    if not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return start, start + reach * tensor.itemsize
