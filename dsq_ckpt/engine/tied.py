"""Tensors that share memory, as tied weights do: one is stored for all, with the strictest of their settings.

A load into tied tensors writes the same memory once for each name, in an unspecified order. So the values stored under
any of the names must satisfy the settings of all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.engine.local import SaveItem
from dsq_ckpt.quantization.chunk import ChunkKey


@dataclass(frozen=True)
class TiedItems:
    """The items of a rank that share memory.

    Attributes:
        stored_as: the stored item, by item that is not stored under its own name.
        exact: items that are stored exactly whatever their own settings are, because another name of their memory is
            to be exact, or because neither of two settings is stricter than the other.
    """

    stored_as: dict[ChunkKey, ChunkKey]
    exact: frozenset[ChunkKey]

    @classmethod
    def of(cls, items: Sequence[SaveItem], beside: Iterable[SaveItem] = ()) -> TiedItems:
        """Find the tied items among those that this rank writes.

        Args:
            items: items that this rank writes.
            beside: items of this rank's memory that another rank writes; their settings count.
        """
        alive: list[torch.Tensor] = []  # a temporary tensor that is freed could give its address to the next
        own = {item.key for item in items}
        same: dict[Hashable, list[tuple[SaveItem, Hashable]]] = {}
        ranges: dict[torch.device, list[tuple[int, int, Hashable]]] = {}
        for item in chain(items, (other for other in beside if other.key not in own)):
            try:
                alive.append(tensor := local_part(item.load()))
            except Exception:  # it fails again where the other ranks are notified
                continue
            if not item.key.elements or not tensor.numel() or tensor.layout is not torch.strided:
                continue
            # Moments are coded in coordinates of their own, so a moment is never tied to another kind of tensor.
            moment = item.kind if item.kind in ("exp_avg", "exp_avg_sq") else ""
            memory: Hashable = (place_of(tensor), item.key.offsets, item.key.shape, moment)
            if memory not in same:
                start = tensor.data_ptr()
                ranges.setdefault(tensor.device, []).append((start, start + _span(tensor), memory))
            same.setdefault(memory, []).append((item, _unit(item, alive)))
        stands = {memory: _strictest(group) for memory, group in same.items()}
        for shared in chain.from_iterable(map(_overlapping, ranges.values())):
            if not _alike([member for memory in shared for member in same[memory]]):
                stands.update(dict.fromkeys(shared))
        stored_as: dict[ChunkKey, ChunkKey] = {}
        exact: set[ChunkKey] = set()
        for memory, group in same.items():
            keys = [item.key for item, _ in group]
            chosen = stands[memory]
            if chosen is None:
                exact.update(keys)
            elif chosen.key not in own:  # its settings apply, which items with other settings cannot satisfy
                exact.update(item.key for item, _ in group if item.config != chosen.config)
            mine = [key for key in keys if key in own]
            kept = chosen.key if chosen is not None and chosen.key in own else next(iter(mine), None)
            stored_as.update({key: kept for key in mine if kept is not None and key != kept})
        return cls(stored_as, frozenset(exact))

    def stored(self, items: Iterable[SaveItem]) -> list[SaveItem]:
        """Return the items that are stored under their own name, with the settings that apply."""
        return [
            replace(item, config=None, second_moment=None) if item.key in self.exact else item
            for item in items if item.key not in self.stored_as
        ]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this rank's memory."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def place_of(tensor: torch.Tensor) -> Hashable:
    """Return where a tensor lies in memory; its shape is not part of that."""
    return tensor.device, tensor.data_ptr(), tensor.stride(), tensor.dtype


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last; the gaps of a view may hold others."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


def _unit(item: SaveItem, alive: list[torch.Tensor]) -> Hashable:
    """Return the memory of the second moment whose values scale an item; None if it has none."""
    if item.second_moment is None:
        return None
    try:
        alive.append(tensor := local_part(item.second_moment.load()))
        return place_of(tensor)
    except Exception:  # as above
        return item.second_moment.fqn


def _overlapping(ranges: list[tuple[int, int, Hashable]]) -> Iterable[list[Hashable]]:
    """Return groups of two or more memories whose address ranges overlap."""
    groups: list[list[Hashable]] = []
    reached = 0
    for start, stop, memory in sorted(ranges, key=lambda one: one[:2]):
        if groups and start < reached:
            groups[-1].append(memory)
        else:
            groups.append([memory])
        reached = max(reached, stop)
    return [group for group in groups if len(group) > 1]


def _strictest(group: Sequence[tuple[SaveItem, Hashable]]) -> SaveItem | None:
    """Return the item whose settings are as strict as those of all others; None if all are to be exact."""
    for item, unit in group:
        if all(unit == other and _as_strict(item.config, one.config) for one, other in group):
            return item
    return None


def _alike(group: Sequence[tuple[SaveItem, Hashable]]) -> bool:
    return all(item.config == group[0][0].config and unit == group[0][1] for item, unit in group)


def _as_strict(one: TensorConfig | None, other: TensorConfig | None) -> bool:
    if one is other:  # which to compare by their fields takes long
        return True
    if one is None or other is None or one == other:
        return one is None or one == other
    if one.method != other.method or one.method == "bf16":
        return one.method == other.method
    return one.codebook.as_fine_as(other.codebook) and one.refinement_bits >= other.refinement_bits
