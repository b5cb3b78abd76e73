"""Tensors that share memory, such as tied weights: one of them is stored, with the strictest of their settings.

A load into tied tensors writes the same memory once per name, in an unspecified order. So the values stored under any
of the names must satisfy the settings of all names.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch

from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.engine.local_state import SaveItem
from dsq_ckpt.quantization.chunk import ChunkKey


@dataclass(frozen=True)
class TiedItems:
    """The items of a rank that share memory.

    Attributes:
        primary_keys: the stored chunk, by chunk that is not stored under its own name.
        exact: items that are stored exactly despite their own settings, because another name of their memory requires
            it, or because neither of two settings is stricter than the other.
    """

    primary_keys: dict[ChunkKey, ChunkKey]
    exact: frozenset[ChunkKey]

    @classmethod
    def find(cls, items: Sequence[SaveItem], replicas: Iterable[SaveItem] = ()) -> TiedItems:
        """Return the tied items among those that this rank writes.

        Args:
            items: items that this rank writes.
            replicas: local items that another rank writes; their settings apply too.
        """
        alive: list[torch.Tensor] = []  # a temporary tensor that is freed could give its address to the next
        item_keys = {item.key for item in items}
        groups: dict[Hashable, list[tuple[SaveItem, Hashable]]] = {}
        ranges: dict[torch.device, list[tuple[int, int, Hashable]]] = {}
        for item in chain(items, (replica for replica in replicas if replica.key not in item_keys)):
            try:
                alive.append(tensor := local_part(item.load()))
            except Exception:  # it fails again in a step that notifies the other ranks
                continue
            if not item.key.elements or not tensor.numel() or tensor.layout is not torch.strided:
                continue
            # Moments are coded in their own coordinates, so a moment is never tied to another kind of tensor.
            moment = item.kind if item.kind in ("exp_avg", "exp_avg_sq") else ""
            memory: Hashable = (get_memory_key(tensor), item.key.offsets, item.key.shape, moment)
            if memory not in groups:
                start = tensor.data_ptr()
                ranges.setdefault(tensor.device, []).append((start, start + _get_span(tensor), memory))
            groups.setdefault(memory, []).append((item, _get_unit_key(item, alive)))
        strictest = {memory: _find_strictest(group) for memory, group in groups.items()}
        for shared in chain.from_iterable(map(_group_overlapping, ranges.values())):
            if not _have_same_settings([member for memory in shared for member in groups[memory]]):
                strictest.update(dict.fromkeys(shared))
        primary_keys: dict[ChunkKey, ChunkKey] = {}
        exact: set[ChunkKey] = set()
        for memory, group in groups.items():
            keys = [item.key for item, _ in group]
            chosen = strictest[memory]
            if chosen is None:
                exact.update(keys)
            elif chosen.key not in item_keys:  # its settings apply, which items with other settings cannot satisfy
                exact.update(item.key for item, _ in group if item.config != chosen.config)
            own_keys = [key for key in keys if key in item_keys]
            key_kept = chosen.key if chosen is not None and chosen.key in item_keys else next(iter(own_keys), None)
            primary_keys.update({key: key_kept for key in own_keys if key_kept is not None and key != key_kept})
        return cls(primary_keys, frozenset(exact))

    def select_stored(self, items: Iterable[SaveItem]) -> list[SaveItem]:
        """Return the items that are stored under their own name, with the settings that apply."""
        return [
            replace(item, config=None, second_moment=None) if item.key in self.exact else item
            for item in items if item.key not in self.primary_keys
        ]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this rank's memory."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def get_memory_key(tensor: torch.Tensor) -> Hashable:
    """Return a key of the memory of a tensor, and of how it is read; it does not include the shape."""
    read_as = tensor.is_conj(), tensor.is_neg()  # such views lie in the memory of other values
    return tensor.device, tensor.data_ptr(), tensor.stride(), tensor.dtype, read_as


def share_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether any two tensors overlap in memory, or one begins in a gap of another."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _get_span(tensor))
        for tensor in tensors if tensor.numel() and tensor.layout is torch.strided and tensor.data_ptr()
    )
    return any(before[0] == device and start < before[2] for before, (device, start, _) in pairwise(spans))


def _get_span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last, with the gaps of a view."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


def _get_unit_key(item: SaveItem, alive: list[torch.Tensor]) -> Hashable:
    """Return the memory of the second moment whose values scale an item; None if it has none."""
    if item.second_moment is None:
        return None
    try:
        alive.append(tensor := local_part(item.second_moment.load()))
        return get_memory_key(tensor)
    except Exception:  # as above
        return item.second_moment.fqn


def _group_overlapping(ranges: list[tuple[int, int, Hashable]]) -> Iterable[list[Hashable]]:
    """Return groups of two or more memories whose address ranges overlap."""
    groups: list[list[Hashable]] = []
    reached = 0
    for start, stop, memory in sorted(ranges, key=lambda span: span[:2]):
        if groups and start < reached:
            groups[-1].append(memory)
        else:
            groups.append([memory])
        reached = max(reached, stop)
    return [group for group in groups if len(group) > 1]


def _find_strictest(group: Sequence[tuple[SaveItem, Hashable]]) -> SaveItem | None:
    """Return an item whose settings are as strict as those of all others; None: there is none, and all are exact."""
    for item, unit in group:
        if all(unit == peer_unit and _is_as_strict(item.config, peer.config) for peer, peer_unit in group):
            return item
    return None


def _have_same_settings(group: Sequence[tuple[SaveItem, Hashable]]) -> bool:
    return all(item.config == group[0][0].config and unit == group[0][1] for item, unit in group)


def _is_as_strict(one: TensorConfig | None, other: TensorConfig | None) -> bool:
    if one is other:  # comparing all fields takes long
        return True
    if one is None or other is None or one == other:
        return one is None or one == other
    if one.method != other.method or one.method == "bf16":
        return one.method == other.method
    return one.codebook.as_fine_as(other.codebook) and one.refinement_bits >= other.refinement_bits
