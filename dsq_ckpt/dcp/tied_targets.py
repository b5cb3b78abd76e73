"""Detection of tied targets of a load, for whose names or elements the checkpoint has different values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsq_ckpt.core.address_ranges import AddressRanges, address_range
from dsq_ckpt.core.notices import warn
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.storage.shard import RecordRef

_MAX_SHOWN = 5  # in the warning
_BLOCK_ELEMENTS = 1 << 20  # elements compared at once
_MAX_SEARCHES = 256  # of overlapping targets with other values, each among all that were written
_MAX_DISTANCE = 0.5
"""Relative difference from which lossy values belong to different tensors. Two lossy copies of one tensor, which ranks
under DDP stored by two names, differ by a few percent; unrelated weights differ by about 1.4."""


class _Written(NamedTuple):
    """The values that a target was filled with last, and the addresses of its bytes; None: they have gaps."""

    fqn: str
    ref: RecordRef
    lossy: bool
    addresses: tuple[int, int] | None


class TiedTargets:
    """The records from which the targets of a load were filled, by memory of the targets."""

    def __init__(self) -> None:
        self._last_written: dict[Any, _Written] = {}
        self._ranges: defaultdict[torch.device, AddressRanges] = defaultdict(AddressRanges)
        self._overwritten: dict[str, str] = {}
        self._searches = 0

    def add(self, fqn: str, ref: RecordRef, lossy: bool, target: torch.Tensor, values: torch.Tensor) -> None:
        """Add values that are about to be written to a target, or were just decoded into it.

        Args:
            fqn: stored name of the values.
            ref: record of the values.
            lossy: whether they were stored lossy.
            target: tensor, or a part of one, that stays alive; holds the values that this load wrote to it before.
            values: the values, of the same shape.
        """
        if not target.numel():
            return
        key = target.device, target.data_ptr(), target.shape, target.stride(), target.dtype
        addresses = _get_addresses(target)
        overlaps = [] if addresses is None else self._ranges[target.device].find_overlaps(*addresses)
        if addresses is not None:
            self._ranges[target.device].add(*addresses)
        if (last := self._last_written.get(key)) is not None:
            if last.fqn != fqn and last.ref != ref and _is_different(target, values, lossy or last.lossy):
                self._overwritten[fqn] = last.fqn
        elif addresses is not None and overlaps and self._searches < _MAX_SEARCHES:
            self._compare_overlaps(fqn, lossy, addresses, overlaps, target, values)
        self._last_written[key] = _Written(fqn, ref, lossy, addresses)

    def _compare_overlaps(
        self, fqn: str, lossy: bool, addresses: tuple[int, int], overlaps: Sequence[tuple[int, int]],
        target: torch.Tensor, values: torch.Tensor,
    ) -> None:
        """Compare values with those of other names in targets that are not the same view, such as a transposed one.

        `overlaps` has the addresses of bytes that were written before.
        """
        order = sorted(range(target.dim()), key=target.stride, reverse=True)
        before, after = (tensor.permute(order).reshape(-1) for tensor in (target, values))

        def shared_slice(start: int, stop: int) -> slice:
            return slice((start - addresses[0]) // target.itemsize, -((addresses[0] - stop) // target.itemsize))

        parts = [shared_slice(start, stop) for start, stop in overlaps]
        if not any(_is_different(before[part], after[part], False) for part in parts):
            return
        self._searches += 1
        for (device, *_), other in self._last_written.items():
            if device != target.device or other.fqn == fqn or other.addresses is None:
                continue
            start, stop = max(addresses[0], other.addresses[0]), min(addresses[1], other.addresses[1])
            shared = shared_slice(start, stop)
            if start < stop and _is_different(before[shared], after[shared], lossy or other.lossy):
                self._overwritten[fqn] = other.fqn

    def warn(self, path: Path) -> None:
        """Warn of names whose values were replaced by those of another name."""
        if self._overwritten:
            pairs = [f"'{last}' and '{fqn}'" for fqn, last in self._overwritten.items()]
            rest = f", and {len(pairs) - _MAX_SHOWN} more pairs" if len(pairs) > _MAX_SHOWN else ""
            warn(
                f"'{path}' has different values for names that are one tensor where they are loaded into, such as tied "
                f"weights ({', '.join(pairs[:_MAX_SHOWN])}{rest}): that tensor has the values of the second name. Load "
                "into a model that is not tied, or leave one name out"
            )


def check_shared_elements(fqn: str, target: torch.Tensor, values: torch.Tensor) -> None:
    """Check that a target holds the values that were copied to it, if its own elements may share memory.

    Equal elements of one tensor come back equal, of lossy tensors too.

    Raises:
        LoadFailed: elements that share memory have different values.
    """
    if _may_share_elements(target) and _is_different(target, values, False):
        raise LoadFailed(
            f"'{fqn}' has elements that share memory in what it is loaded into, and other values for them in the "
            "checkpoint; load into its clone()"
        )


def _may_share_elements(target: torch.Tensor) -> bool:
    reach = 0
    for stride, length in sorted(zip(target.stride(), target.shape, strict=True)):
        if length > 1 and stride <= reach:
            return True
        reach += (length - 1) * stride
    return False


def _get_addresses(target: torch.Tensor) -> tuple[int, int] | None:
    """Return the address range of a tensor; None: it has gaps, in which neighbours may lie, or is no plain tensor."""
    start, stop = address_range(target)
    return (start, stop) if start and stop - start == target.numel() * target.itemsize else None


def _is_different(one: torch.Tensor, other: torch.Tensor, lossy: bool) -> bool:
    """Return whether values belong to different tensors; NaN equals NaN."""
    rows = max(1, _BLOCK_ELEMENTS * len(one) // one.numel()) if one.dim() else 1
    parts = zip(one.split(rows), other.split(rows), strict=True) if one.dim() else [(one, other)]
    distance, size = 0.0, 0.0
    for target, values in parts:
        values = values.to(target)
        if not lossy:
            if not bool(((target == values) | ((target != target) & (values != values))).all()):
                return True
            continue
        a, b = target.double(), values.double()
        distance += float((a - b).square().nansum())
        size += float(torch.maximum(a.square(), b.square()).nansum())
    return distance > _MAX_DISTANCE**2 * size
