"""Conversion of DeepSpeed's buffers to shards, and of its state dicts to state dicts that refer to the shards."""

from __future__ import annotations

import bisect
import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import torch
from torch import nn

from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.flat_ranges import split_range
from dsq_ckpt.deepspeed.flat_buffers import MASTER, Buffer, Inventory, ParameterSlice
from dsq_ckpt.engine.local_state import LocalShard
from dsq_ckpt.engine.tied import get_memory_key
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.pickle_refs import FlatRange, TensorPlaceholder


def iter_shards(
    buffers: Iterable[Buffer], rank: int, world_size: int, *, replicas: bool = False
) -> Iterator[LocalShard]:
    """Yield the shards that this rank writes: its partitions, and its share of replicated buffers.

    Args:
        buffers: buffers of this rank, in the same order on all ranks.
        rank: rank in the data-parallel group.
        world_size: size of the data-parallel group.
        replicas: True to yield the local shards that another rank writes instead.
    """
    for buffer, slice_ in (pair for pair, writes in _assign_writers(buffers, rank, world_size) if writes != replicas):
        flat = buffer.tensor.detach().view(-1)
        for key, start in _iter_chunks(buffer, slice_):
            yield LocalShard(key, slice_.shape, flat.dtype, partial(_view_chunk, flat, start, key.shape), is_view=True)


def split_by_chunk(
    buffers: Iterable[Buffer], get_values: Callable[[Buffer], torch.Tensor | None]
) -> dict[ChunkKey, torch.Tensor]:
    """Split per-element values of master weights into chunks.

    Args:
        buffers: buffers of this rank.
        get_values: function that returns the flat values of a buffer of master weights, or None.
    """
    chunk_values = {}
    for buffer in buffers:
        flat = get_values(buffer) if buffer.kind == MASTER else None
        if flat is not None:
            chunk_values.update({
                key: _view_chunk(flat, start, key.shape)
                for slice_ in buffer.slices for key, start in _iter_chunks(buffer, slice_)
            })
    return chunk_values


def _iter_chunks(buffer: Buffer, slice_: ParameterSlice) -> Iterator[tuple[ChunkKey, int]]:
    """Yield the chunks of a slice, each with its first element in the buffer."""
    for box in split_range(slice_.shape, slice_.start, slice_.length):
        yield ChunkKey(buffer.fqn(slice_), box.offsets, box.shape), slice_.buffer_start + box.start - slice_.start


def _assign_writers(
    buffers: Iterable[Buffer], rank: int, world_size: int
) -> Iterator[tuple[tuple[Buffer, ParameterSlice], bool]]:
    """Yield all slices, each with whether this rank writes it."""
    load = [0] * world_size
    writer_ranks: dict[str, int] = {}  # a parameter and its moments are written by one rank
    for buffer in buffers:
        for slice_ in buffer.slices:
            if buffer.replicated:
                if slice_.name not in writer_ranks:
                    writer_ranks[slice_.name] = load.index(min(load))
                load[writer_ranks[slice_.name]] += slice_.length
            yield (buffer, slice_), not buffer.replicated or writer_ranks[slice_.name] == rank


def get_nesting(buffers: Iterable[Buffer]) -> dict[str, tuple[str, ...]]:
    """Return the nested path of each tensor in the buffers by FQN."""
    return {buffer.fqn(slice_): buffer.path(slice_) for buffer in buffers for slice_ in buffer.slices}


def find_diverged_parameters(inventory: Inventory) -> set[str]:
    """Return the names of parameters that differ from their cast master weights on this rank.

    Frozen parameters have no master weights, and are not included.
    """
    names = set()
    for buffer in inventory.buffers:
        if buffer.kind != MASTER:
            continue
        flat = buffer.tensor.detach().view(-1)
        for slice_ in buffer.slices:
            parameter = inventory.parameters.get(slice_.name)
            if parameter is None:
                continue
            if not parameter.is_contiguous():
                names.add(slice_.name)
                continue
            values = parameter.view(-1)[slice_.start : slice_.start + slice_.length]
            master = flat[slice_.buffer_start : slice_.buffer_start + slice_.length].to(values.device).to(values.dtype)
            if not torch.equal(_view_bits(values), _view_bits(master)):
                names.add(slice_.name)
    return names


@dataclass
class _MemoryRegion:
    start: int
    end: int
    buffer: Buffer


class Substitution:
    """A function that replaces tensors of state dicts by references to stored values.

    A tensor is identified by its memory, which lies in a buffer or in a parameter that equals its cast master weights.

    Args:
        save_id: save ID of the checkpoint.
        inventory: buffers and unpartitioned parameters of this rank.
        diverged_parameters: names of parameters that differ from their cast master weights on any rank.
    """

    def __init__(self, save_id: str, inventory: Inventory, diverged_parameters: set[str]) -> None:
        self._save_id = save_id
        self._views: dict[Any, torch.Tensor] = {}
        regions = [_create_region(buffer) for buffer in inventory.buffers]
        covered_starts = {region.start for region in regions}
        for name, shape in inventory.master_shapes.items():
            parameter = inventory.parameters.get(name)
            if parameter is None or name in diverged_parameters or not parameter.is_contiguous():
                continue
            full_slice = ParameterSlice(name, shape, 0, parameter.numel(), 0)
            region = _create_region(Buffer(MASTER, parameter, [full_slice], replicated=True))
            if region.start not in covered_starts:
                regions.append(region)
        self._regions = sorted(regions, key=lambda region: region.start)
        self._starts = [region.start for region in self._regions]

    def __call__(self, node: Any) -> Any:
        """Return a copy of a state dict, or of a node in it, with references in place of stored tensors."""
        if isinstance(node, torch.Tensor):
            return self._substitute_tensor(node)
        if isinstance(node, Mapping) and type(node).__module__ in ("builtins", "collections"):
            changed = {key: self(value) for key, value in node.items()}
            if all(changed[key] is value for key, value in node.items()):
                return node
            replacement = copy.copy(node)  # keeps attributes, such as the versions of a module's state dict
            replacement.update(changed)  # type: ignore[attr-defined]
            return replacement
        if type(node) in (list, tuple):
            changed_list = [self(value) for value in node]
            same = all(new is old for new, old in zip(changed_list, node, strict=True))
            return node if same else type(node)(changed_list)
        return node

    def substitute_file(self, state: Any, client_state: Mapping[Any, Any]) -> Any:
        """Return a copy of a file's state dict with references, in which the values of `client_state` stay exact.

        Args:
            state: state dict of DeepSpeed, into whose top level `client_state` is merged.
            client_state: `client_state` of the save. Its tensors are stored as they are, even if they are the engine's.
        """
        exact_keys = {
            key for key, value in client_state.items() if type(state) is dict and state.get(key, client_state) is value
        }
        if not exact_keys:
            return self(state)
        exact_substitution = Substitution(self._save_id, Inventory(), set())
        return {key: (exact_substitution if key in exact_keys else self)(value) for key, value in state.items()}

    def _substitute_tensor(self, tensor: torch.Tensor) -> Any:
        if not tensor.numel() or tensor.layout is not torch.strided:
            return tensor
        placeholder = self._find_placeholder(tensor) if tensor.is_contiguous() and not tensor.is_neg() else None
        if placeholder is None and tensor.untyped_storage().nbytes() > tensor.nbytes:  # a pickle would hold all of it
            copied = tensor.detach().clone()
            copied = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
            return self._views.setdefault((get_memory_key(tensor), tensor.shape), copied)
        return tensor if placeholder is None else placeholder

    def _find_placeholder(self, tensor: torch.Tensor) -> TensorPlaceholder | None:
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        region = self._regions[index]
        buffer = region.buffer
        expected = (buffer.tensor.dtype, buffer.tensor.device)
        if address + tensor.nbytes > region.end or (tensor.dtype, tensor.device) != expected:
            return None
        first = (address - region.start) // tensor.itemsize
        ranges, gap_values, filled_end = [], [], 0
        for slice_ in sorted(buffer.slices, key=lambda slice_: slice_.buffer_start):
            begin = max(slice_.buffer_start, first)
            end = min(slice_.buffer_start + slice_.length, first + tensor.numel())
            if begin >= end:
                continue
            gap_values += _get_gap_values(tensor, filled_end, begin - first)
            start = slice_.start + begin - slice_.buffer_start
            ranges.append(FlatRange(buffer.fqn(slice_), start, end - begin, begin - first))
            filled_end = end - first
        gap_values += _get_gap_values(tensor, filled_end, tensor.numel())
        return TensorPlaceholder(self._save_id, tensor.dtype, tuple(tensor.shape), ranges, gap_values)


def write_substituted(
    stream: IO[bytes], save_id: str, *, inventory: Inventory, diverged_parameters: set[str], state: Any,
    client_state: Mapping[Any, Any],
) -> None:
    """Pickle a file's state dict with references in place of stored tensors; see `Substitution`.

    Raises:
        SaveFailed: values cannot be pickled; the message names their keys.
    """
    substitution = Substitution(save_id, inventory, diverged_parameters)
    try:
        torch.save(substitution.substitute_file(state, client_state), stream)
    except OSError:  # the stream failed
        raise
    except Exception as error:  # an object's `__reduce__` may raise any
        keys = [key for key, value in state.items() if not _is_picklable(substitution, value)]
        if not keys:
            raise
        cause = "it contains itself, or is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SaveFailed(f"{quote(keys)} of the state, or of client_state, cannot be pickled: {cause}") from error


def _is_picklable(substitution: Substitution, value: Any) -> bool:
    try:
        torch.save(substitution(value), io.BytesIO())
        return True
    except Exception:
        return False


def _create_region(buffer: Buffer) -> _MemoryRegion:
    start = buffer.tensor.data_ptr()
    return _MemoryRegion(start, start + buffer.tensor.nbytes, buffer)


def _get_gap_values(tensor: torch.Tensor, first: int, last: int) -> list[tuple[int, torch.Tensor]]:
    """Return the elements between slices with their position; empty if all of them are zero."""
    values = tensor.detach().reshape(-1)[first:last]
    return [(first, values.cpu().clone())] if first < last and bool(_view_bits(values).any()) else []


def _view_chunk(flat: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    return flat[start : start + torch.Size(shape).numel()].view(shape)


def _view_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
