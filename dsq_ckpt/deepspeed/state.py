"""Conversion of DeepSpeed's state dicts to shards of a checkpoint, and to state dicts that refer to the shards."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dsq_ckpt.core.flat_ranges import split_range
from dsq_ckpt.deepspeed.partition import MASTER, Buffer, Inventory, ParameterSlice
from dsq_ckpt.engine.local_state import LocalShard
from dsq_ckpt.engine.tied import get_memory_key
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.pickle_refs import FlatRange, StoredTensor


def shards_of(buffers: Iterable[Buffer], rank: int, ranks: int, *, written: bool = True) -> Iterator[LocalShard]:
    """Yield the shards that this rank writes: its partitions, and its share of replicated buffers.

    Args:
        buffers: buffers of this rank, in the same order on all ranks.
        rank: rank in the data-parallel group.
        ranks: size of the data-parallel group.
        written: False to yield the shards that another rank writes instead.
    """
    for buffer, slice_ in (pair for pair, own in _assigned(buffers, rank, ranks) if own == written):
        flat = buffer.tensor.detach().view(-1)
        for key, at in _chunks(buffer, slice_):
            yield LocalShard(key, slice_.shape, flat.dtype, partial(_view, flat, at, key.shape), is_view=True)


def by_chunk(
    buffers: Iterable[Buffer], values: Callable[[Buffer], torch.Tensor | None]
) -> dict[ChunkKey, torch.Tensor]:
    """Return the values of each chunk of master weights, for a function with one value per element.

    Args:
        buffers: buffers of this rank.
        values: function that returns the flat values of a buffer of master weights, or None.
    """
    found = {}
    for buffer in buffers:
        flat = values(buffer) if buffer.kind == MASTER else None
        if flat is not None:
            found.update({
                key: _view(flat, at, key.shape) for slice_ in buffer.slices for key, at in _chunks(buffer, slice_)
            })
    return found


def _chunks(buffer: Buffer, slice_: ParameterSlice) -> Iterator[tuple[ChunkKey, int]]:
    """Yield the chunks of a slice, and the start of each in the buffer."""
    for box in split_range(slice_.shape, slice_.start, slice_.length):
        yield ChunkKey(buffer.fqn(slice_), box.offsets, box.shape), slice_.at + box.start - slice_.start


def _assigned(buffers: Iterable[Buffer], rank: int, ranks: int) -> Iterator[tuple[tuple[Buffer, ParameterSlice], bool]]:
    """Yield all slices, and whether this rank writes them."""
    load = [0] * ranks
    turn: dict[str, int] = {}  # a parameter and its moments are written by one rank
    for buffer in buffers:
        for slice_ in buffer.slices:
            if buffer.replicated:
                if slice_.name not in turn:
                    turn[slice_.name] = load.index(min(load))
                load[turn[slice_.name]] += slice_.length
            yield (buffer, slice_), not buffer.replicated or turn[slice_.name] == rank


def nesting_of(buffers: Iterable[Buffer]) -> dict[str, tuple[str, ...]]:
    """Return the nested path of each tensor in the buffers, by name."""
    return {buffer.fqn(slice_): buffer.path(slice_) for buffer in buffers for slice_ in buffer.slices}


def differing(found: Inventory) -> set[str]:
    """Return the names of parameters that differ from their cast master weights on this rank.

    Frozen parameters have no master weights, and are not included.
    """
    names = set()
    for buffer in found.buffers:
        if buffer.kind != MASTER:
            continue
        flat = buffer.tensor.detach().view(-1)
        for slice_ in buffer.slices:
            parameter = found.parameters.get(slice_.name)
            if parameter is None:
                continue
            if not parameter.is_contiguous():
                names.add(slice_.name)
                continue
            own = parameter.view(-1)[slice_.start : slice_.start + slice_.length]
            master = flat[slice_.at : slice_.at + slice_.length].to(own.device).to(own.dtype)
            if not torch.equal(_bits(own), _bits(master)):
                names.add(slice_.name)
    return names


@dataclass
class _Region:
    start: int
    end: int
    buffer: Buffer


class Substitution:
    """A function that replaces tensors of state dicts by references to stored values.

    A tensor is identified by its memory: within a buffer, or within a parameter that equals its cast master weights.

    Args:
        save_id: save ID of the checkpoint.
        found: buffers and whole parameters of this rank.
        differing: names of parameters that differ from their cast master weights on any rank.
    """

    def __init__(self, save_id: str, found: Inventory, differing: set[str]) -> None:
        self._save_id = save_id
        self._views: dict[Any, torch.Tensor] = {}
        regions = [_region(buffer) for buffer in found.buffers]
        covered = {region.start for region in regions}
        for name, shape in found.masters.items():
            parameter = found.parameters.get(name)
            if parameter is None or name in differing or not parameter.is_contiguous():
                continue
            whole = ParameterSlice(name, shape, 0, parameter.numel(), 0)
            region = _region(Buffer(MASTER, parameter, [whole], replicated=True))
            if region.start not in covered:
                regions.append(region)
        self._regions = sorted(regions, key=lambda region: region.start)
        self._starts = [region.start for region in self._regions]

    def __call__(self, node: Any) -> Any:
        """Return a copy of a state dict, or of a node in it, with references in place of stored tensors."""
        if isinstance(node, torch.Tensor):
            return self._stored(node)
        if isinstance(node, Mapping) and type(node).__module__ in ("builtins", "collections"):
            changed = {key: self(value) for key, value in node.items()}
            if all(changed[key] is value for key, value in node.items()):
                return node
            replaced = copy.copy(node)  # with its attributes, such as the versions of a module's state dict
            replaced.update(changed)  # type: ignore[attr-defined]
            return replaced
        if type(node) in (list, tuple):
            changed_list = [self(value) for value in node]
            same = all(new is old for new, old in zip(changed_list, node, strict=True))
            return node if same else type(node)(changed_list)
        return node

    def of_file(self, state: Any, client: Mapping[Any, Any]) -> Any:
        """Return a copy of the state dict of a file, in which what the user gave for it is exact.

        Args:
            state: state dict of DeepSpeed, which has the values of `client_state` beside its own at the top level.
            client: `client_state` of the save. Tensors in it may be the engine's own, and are stored as they are.
        """
        exact = {key for key, value in client.items() if type(state) is dict and state.get(key, client) is value}
        if not exact:
            return self(state)
        as_it_is = Substitution(self._save_id, Inventory(), set())
        return {key: (as_it_is if key in exact else self)(value) for key, value in state.items()}

    def _stored(self, tensor: torch.Tensor) -> Any:
        if not tensor.numel() or tensor.layout is not torch.strided:
            return tensor
        found = self._found(tensor) if tensor.is_contiguous() and not tensor.is_neg() else None
        if found is None and tensor.untyped_storage().nbytes() > tensor.nbytes:  # all of which a pickle would hold
            own = tensor.detach().clone()
            own = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
            return self._views.setdefault((get_memory_key(tensor), tensor.shape), own)
        return tensor if found is None else found

    def _found(self, tensor: torch.Tensor) -> StoredTensor | None:
        address = tensor.data_ptr()
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        region = self._regions[place]
        buffer = region.buffer
        own = (buffer.tensor.dtype, buffer.tensor.device)
        if address + tensor.nbytes > region.end or (tensor.dtype, tensor.device) != own:
            return None
        first = (address - region.start) // tensor.itemsize
        pieces, rest, at = [], [], 0
        for slice_ in sorted(buffer.slices, key=lambda slice_: slice_.at):
            begin, end = max(slice_.at, first), min(slice_.at + slice_.length, first + tensor.numel())
            if begin >= end:
                continue
            rest += _gap(tensor, at, begin - first)
            start = slice_.start + begin - slice_.at
            pieces.append(FlatRange(buffer.fqn(slice_), start, end - begin, begin - first))
            at = end - first
        rest += _gap(tensor, at, tensor.numel())
        return StoredTensor(self._save_id, tensor.dtype, tuple(tensor.shape), pieces, rest)


def _region(buffer: Buffer) -> _Region:
    start = buffer.tensor.data_ptr()
    return _Region(start, start + buffer.tensor.nbytes, buffer)


def _gap(tensor: torch.Tensor, first: int, last: int) -> list[tuple[int, torch.Tensor]]:
    """Return the elements between slices, with their position, unless all are zero."""
    values = tensor.detach().reshape(-1)[first:last]
    return [(first, values.cpu().clone())] if first < last and bool(_bits(values).any()) else []


def _view(flat: torch.Tensor, at: int, shape: Sequence[int]) -> torch.Tensor:
    return flat[at : at + torch.Size(shape).numel()].view(shape)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
