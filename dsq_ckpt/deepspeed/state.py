"""From DeepSpeed's state dicts to parts of a checkpoint, and to state dicts that only say where these are."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsq_ckpt.core.flat import boxes
from dsq_ckpt.deepspeed.partition import MASTER, Buffer, Inventory, Segment
from dsq_ckpt.engine.local import LocalShard
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.pickle_refs import FlatRange, StoredTensor


def shards_of(buffers: Iterable[Buffer], rank: int, ranks: int, *, written: bool = True) -> Iterator[LocalShard]:
    """What of the buffers this rank writes: its partitions, and its share of what all ranks have.

    Args:
        buffers: of this rank, in the same order on all.
        rank: in the data-parallel group.
        ranks: its size.
        written: False: what lies here and is written by another rank.
    """
    for buffer, segment in (pair for pair, own in _dealt(buffers, rank, ranks) if own == written):
        flat = buffer.tensor.detach().view(-1)
        for key, at in _chunks(buffer, segment):
            yield LocalShard(key, segment.shape, flat.dtype, partial(_view, flat, at, key.shape))


def by_chunk(
    buffers: Iterable[Buffer], values: Callable[[Buffer], torch.Tensor | None]
) -> dict[ChunkKey, torch.Tensor]:
    """What belongs to each chunk of master weights, of something that there is one of for every element of a buffer.

    Args:
        buffers: of this rank.
        values: flat, for a buffer of master weights; None: there is nothing.
    """
    found = {}
    for buffer in buffers:
        flat = values(buffer) if buffer.kind == MASTER else None
        if flat is not None:
            found.update({
                key: _view(flat, at, key.shape) for segment in buffer.segments for key, at in _chunks(buffer, segment)
            })
    return found


def _chunks(buffer: Buffer, segment: Segment) -> Iterator[tuple[ChunkKey, int]]:
    """The chunks that a segment is stored in, and where each begins in the buffer."""
    for box in boxes(segment.shape, segment.start, segment.length):
        yield ChunkKey(buffer.fqn(segment), box.offsets, box.shape), segment.at + box.start - segment.start


def _dealt(buffers: Iterable[Buffer], rank: int, ranks: int) -> Iterator[tuple[tuple[Buffer, Segment], bool]]:
    """All segments, and whether this rank writes them."""
    load = [0] * ranks
    turn: dict[str, int] = {}  # a parameter and its moments are written by one rank
    for buffer in buffers:
        for segment in buffer.segments:
            if buffer.replicated:
                if segment.name not in turn:
                    turn[segment.name] = load.index(min(load))
                load[turn[segment.name]] += segment.length
            yield (buffer, segment), not buffer.replicated or turn[segment.name] == rank


def nesting_of(buffers: Iterable[Buffer]) -> dict[str, tuple[str, ...]]:
    """Paths by name of all that the buffers hold."""
    return {buffer.fqn(segment): buffer.path(segment) for buffer in buffers for segment in buffer.segments}


def differing(found: Inventory) -> set[str]:
    """Parameters of the module that are not what casting their master weights gives, as far as these lie here.

    Frozen parameters have none and are not among them.
    """
    names = set()
    for buffer in found.buffers:
        if buffer.kind != MASTER:
            continue
        flat = buffer.tensor.detach().view(-1)
        for segment in buffer.segments:
            parameter = found.parameters.get(segment.name)
            if parameter is None:
                continue
            if not parameter.is_contiguous():
                names.add(segment.name)
                continue
            own = parameter.view(-1)[segment.start : segment.start + segment.length]
            master = flat[segment.at : segment.at + segment.length].to(own.device).to(own.dtype)
            if not torch.equal(_bits(own), _bits(master)):
                names.add(segment.name)
    return names


@dataclass
class _Region:
    start: int
    end: int
    buffer: Buffer


class Substitution:
    """Replaces tensors of state dicts by what says where their values are stored.

    A tensor is known by where its memory lies: in a buffer, or in a parameter that its master weights give.

    Args:
        save_id: of the checkpoint.
        found: the buffers, and the parameters that are whole here.
        differing: parameters that are not what their master weights give, on any rank.
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
            whole = Segment(name, shape, 0, parameter.numel(), 0)
            region = _region(Buffer(MASTER, parameter, [whole], replicated=True))
            if region.start not in covered:
                regions.append(region)
        self._regions = sorted(regions, key=lambda region: region.start)
        self._starts = [region.start for region in self._regions]

    def __call__(self, node: Any) -> Any:
        """A copy of a state dict, or of a part of one, with stored tensors in place of those that are known."""
        if isinstance(node, torch.Tensor):
            return self._stored(node)
        if isinstance(node, Mapping) and type(node).__module__ in ("builtins", "collections"):
            changed = {key: self(value) for key, value in node.items()}
            if all(changed[key] is value for key, value in node.items()):
                return node
            replaced = copy.copy(node)  # with all that it is besides, as the versions of a module's state dict
            replaced.update(changed)  # type: ignore[attr-defined]
            return replaced
        if type(node) in (list, tuple):
            changed_list = [self(value) for value in node]
            same = all(new is old for new, old in zip(changed_list, node, strict=True))
            return node if same else type(node)(changed_list)
        return node

    def _stored(self, tensor: torch.Tensor) -> Any:
        if not tensor.numel() or tensor.layout is not torch.strided:
            return tensor
        found = self._found(tensor) if tensor.is_contiguous() else None
        if found is None and tensor.untyped_storage().nbytes() > tensor.nbytes:  # all of which a pickle would hold
            view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            return self._views.setdefault(view, tensor.detach().clone())
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
        for segment in sorted(buffer.segments, key=lambda segment: segment.at):
            begin, end = max(segment.at, first), min(segment.at + segment.length, first + tensor.numel())
            if begin >= end:
                continue
            rest += _gap(tensor, at, begin - first)
            start = segment.start + begin - segment.at
            pieces.append(FlatRange(buffer.fqn(segment), start, end - begin, begin - first))
            at = end - first
        rest += _gap(tensor, at, tensor.numel())
        return StoredTensor(self._save_id, tensor.dtype, tuple(tensor.shape), pieces, rest)


def _region(buffer: Buffer) -> _Region:
    start = buffer.tensor.data_ptr()
    return _Region(start, start + buffer.tensor.nbytes, buffer)


def _gap(tensor: torch.Tensor, first: int, last: int) -> list[tuple[int, torch.Tensor]]:
    """What no segment covers, where it is not zero."""
    values = tensor.detach().reshape(-1)[first:last]
    return [(first, values.cpu().clone())] if first < last and bool(_bits(values).any()) else []


def _view(flat: torch.Tensor, at: int, shape: Sequence[int]) -> torch.Tensor:
    return flat[at : at + torch.Size(shape).numel()].view(shape)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
