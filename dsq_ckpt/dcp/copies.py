"""Copies of state dicts for saves in the background, in buffers that are reused by the next save.

A copy into a reused buffer takes a third of the time of one into new memory, whose pages the system has to find and
clear first. Copies from a GPU take a tenth, since their buffers are pinned.
"""

from __future__ import annotations

import copy
import platform
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from dsq_ckpt.core.aliases import bytes_of
from dsq_ckpt.core.flat_names import flatten
from dsq_ckpt.core.memory import available_memory
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.core.notices import is_new_warning, warn_safely
from dsq_ckpt.core.pinning import allocate_pinned
from dsq_ckpt.core.tensor_subclasses import check_storable, name_object_errors
from dsq_ckpt.errors import SaveFailed

_BufferKind = tuple[int, bool]
"""Size of a buffer in bytes, and whether it is for copies from a GPU."""

_spare_buffers: dict[_BufferKind, list[torch.Tensor]] = {}
"""Free buffers of earlier copies: uint8, flat."""

_warned_hosts = set[str]()  # hosts with too little memory that were warned of

_SINGLE_THREAD_BYTES = 1 << 24
"""Bytes up to which a single thread copies: if cores are busy, waiting for other threads takes longer."""

_MIN_PINNED_BYTES = 1 << 18
"""Bytes from which a buffer is pinned, by one driver call each."""


class CopyCost(NamedTuple):
    """The memory required for a copy of the state of one rank.

    Attributes:
        host: name of the host.
        size: bytes of the copy; None: a copy is impossible (`ShardedTensor`), or not cheaper, because a tensor is
            neither on the CPU nor on a GPU, or because tensors are small parts of their storages, which are copied as
            a whole.
        spare: bytes of free buffers that can be reused.
        available: bytes that the rank can still allocate; None: unknown.
    """

    host: str
    size: int | None
    spare: int
    available: int | None

    @classmethod
    def measure(cls, state_dict: dict[str, Any]) -> CopyCost:
        """Return the cost of a copy of a state dict of this rank."""
        size, kinds = _measure_size(state_dict)
        spare = sum(kind[0] * min(count, len(_spare_buffers.get(kind, ()))) for kind, count in kinds.items())
        return cls(platform.node(), size, spare, available_memory())


def should_copy(stage_mode: str, costs: Sequence[CopyCost | None], processes: bool, rank: int) -> bool:
    """Return whether a state is to be copied instead of quantized while training waits; equal on all ranks.

    Args:
        how: `storage.stage` of the configuration.
        costs: costs of all ranks, in rank order; None: the rank runs a search, during which training must wait.
        processes: whether DCP's background process saves, for which a copy is copied again to shared memory.
        rank: this rank; rank 0 warns if there is too little memory.
    """
    known_costs = [cost for cost in costs if cost is not None]
    if len(known_costs) < len(costs) or stage_mode == "quantize":
        return False
    if stage_mode == "copy":
        return True
    sizes = [cost.size for cost in known_costs if cost.size is not None]
    if processes or len(sizes) < len(known_costs):
        return False
    lacking = _describe_shortage(known_costs)
    if lacking is not None and rank == 0 and is_new_warning(lacking, _warned_hosts):
        warn_safely(
            f"{lacking}: this asynchronous save quantizes while training waits, which takes longer and less memory; "
            "storage.stage: quantize does so always, and says nothing"
        )
    return lacking is None


def _describe_shortage(costs: Sequence[CopyCost]) -> str | None:
    """Return a description of a host with too little memory for the copies of its ranks; None: there is none."""
    for host in dict.fromkeys(cost.host for cost in costs):
        ranks = [cost for cost in costs if cost.host == host]
        free = min((cost.available for cost in ranks if cost.available is not None), default=None)
        # Half a copy is added for the codes of this save and for allocations of the training meanwhile.
        needed = sum((cost.size or 0) * 3 // 2 - min(cost.spare, cost.size or 0) for cost in ranks)
        if free is not None and needed > free:
            return f"{host} has {free / 2**30:.3g} GiB of memory left, and to copy the state needs {needed / 2**30:.3g}"
    return None


def wait_for_collectives(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Wait for results of asynchronous collectives; return a state dict of the results, or the argument without any.

    Such tensors, as `DTensor.redistribute(async_op=True)` returns them, do not reveal the address of their memory.
    """
    flat, mappings = flatten(state_dict)
    if not any(isinstance(_get_local_tensor(value), AsyncCollectiveTensor) for value in flat.values()):
        return state_dict
    return Nesting.of(state_dict, mappings).unflatten({fqn: _wait_for_value(value) for fqn, value in flat.items()})


def _wait_for_value(value: Any) -> Any:
    local = _get_local_tensor(value)
    if not isinstance(local, AsyncCollectiveTensor):
        return value
    if not isinstance(value, DTensor):
        return local.wait()
    with torch.no_grad():
        return DTensor.from_local(
            local.wait(), value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )


def copy_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict on the CPU, with the same structure, as DCP's stager makes it."""
    return _stage(state_dict, flatten(state_dict)[0])


def copy_bare_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict on the CPU, without Python attributes of its tensors.

    Raises:
        SaveFailed: an object or a tensor cannot be copied, or a tensor cannot be stored; the message names it.
    """
    def tensors(flat: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        bare = {fqn: _detach(fqn, check_storable(fqn, tensor)) for fqn, tensor in flat.items()}
        return _stage(bare, bare)

    return rebuild_state_dict(state_dict, tensors)


def rebuild_state_dict(
    state_dict: dict[str, Any], replace: Callable[[Mapping[str, torch.Tensor]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a state dict with replaced tensors, and a copy of every object.

    Args:
        state_dict: the original.
        replace: returns the replacements of tensors, by name.

    Raises:
        SaveFailed: an object cannot be copied; the message names it.
    """
    flat, mappings = flatten(state_dict)
    staged: dict[str, Any] = {}
    tensors = replace({fqn: value for fqn, value in flat.items() if isinstance(value, torch.Tensor)})
    for fqn, value in flat.items():
        if fqn in tensors:
            staged[fqn] = tensors[fqn]
        else:
            with name_object_errors(fqn):
                staged[fqn] = copy.deepcopy(value)
    return Nesting.of(state_dict, mappings).unflatten(staged)


def release_spare_memory() -> None:
    """Free the buffers that are kept for the next copy."""
    _spare_buffers.clear()


class _Stager(StateDictStager):
    """DCP's stager with reused buffers. An instance makes one copy.

    Storages that share memory, as of two views of a NumPy array, also share it in the copy.
    """

    def __init__(self, flat: Mapping[str, Any]) -> None:
        super().__init__()
        global _spare_buffers
        self._regions = _find_regions(flat)
        # Buffers that this copy cannot use are freed before others are allocated.
        counts = _count_buffers(self._regions)
        self._spare_buffers = {kind: _spare_buffers.get(kind, [])[-count:] for kind, count in counts.items()}
        _spare_buffers = {}
        self._buffers: dict[_Address, Any] = {}
        self._resolved: list[torch.Tensor] = []  # kept alive, since the stager identifies tensors by id()

    def _offload_tensor(self, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        if x.is_conj() or x.is_neg():  # lazy views, whose memory holds other values
            x = x.resolve_conj().resolve_neg()
            self._resolved.append(x)
        return super()._offload_tensor(x, memo, non_blocking)

    def _stage_untyped_storage(self, storage: torch.UntypedStorage, non_blocking: bool = False) -> torch.UntypedStorage:
        if not storage.nbytes():
            return super()._stage_untyped_storage(storage, non_blocking)
        key = storage.device, storage.data_ptr()
        region, size = self._regions.get(key, (key, storage.nbytes()))
        if region not in self._buffers:
            self._buffers[region] = self._take_buffer(size, storage.device)
        start = storage.data_ptr() - region[1]
        target = self._buffers[region][start : start + storage.nbytes()]
        if storage.nbytes() < _SINGLE_THREAD_BYTES and storage.device.type == "cpu":
            target[:] = bytes_of(storage).numpy()
            return torch.from_numpy(target).untyped_storage()
        copy = torch.from_numpy(target).untyped_storage()
        copy.copy_(storage, non_blocking)
        return copy

    def _take_buffer(self, size: int, device: torch.device) -> Any:
        """Return a buffer as an array of bytes; it becomes free again when the last tensor in it is freed."""
        kind = _get_buffer_kind(size, device)
        try:
            buffer = self._spare_buffers[kind].pop()
        except LookupError:
            buffer = allocate_pinned(size, device) if kind[1] else torch.empty(size, dtype=torch.uint8, device="cpu")
        lease = buffer.numpy()
        weakref.finalize(lease, _return_buffer, buffer, kind).atexit = False
        return lease


_Address = tuple[torch.device, int]
"""Start of a memory range: device and address."""


def _find_regions(flat: Mapping[str, Any]) -> dict[_Address, tuple[_Address, int]]:
    """Return start and size of the region of overlapping storages that each storage is in, by start of the storage."""
    storages: dict[_Address, int] = {}
    for storage in _iterate_storages(flat):
        key = storage.device, storage.data_ptr()
        storages[key] = max(storages.get(key, 0), storage.nbytes())
    regions: dict[_Address, tuple[_Address, int]] = {}
    inside: list[_Address] = []
    for key in sorted(storages, key=lambda address: (str(address[0]), address[1])):
        device, start = key
        end = start + storages[key]
        if inside and inside[0][0] == device and start < inside[0][1] + regions[inside[0]][1]:
            inside.append(key)
            end = max(end, inside[0][1] + regions[inside[0]][1])
        else:
            inside = [key]
        regions |= dict.fromkeys(inside, (inside[0], end - inside[0][1]))
    return regions


def _get_buffer_kind(size: int, device: torch.device) -> _BufferKind:
    return size, device.type == "cuda" and size >= _MIN_PINNED_BYTES


def _count_buffers(regions: Mapping[_Address, tuple[_Address, int]]) -> Counter[_BufferKind]:
    """Return the number of buffers of each kind that a copy needs."""
    return Counter(
        _get_buffer_kind(size, key[0]) for key, (region, size) in regions.items() if key == region and size
    )


def _return_buffer(buffer: torch.Tensor, kind: _BufferKind) -> None:
    _spare_buffers.setdefault(kind, []).append(buffer)


def _stage(state_dict: dict[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    stager = _Stager(flat)
    try:
        return stager.stage(state_dict)
    finally:
        stager.close()


def _detach(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    if _get_local_tensor(tensor) is None:
        raise SaveFailed(
            f"'{fqn}' is of class {type(tensor).__name__}, which DCP's stager does not copy: leave storage.stage at "
            "auto, or set it to quantize"
        )
    return tensor.detach()


def _measure_size(state_dict: dict[str, Any]) -> tuple[int | None, Counter[_BufferKind]]:
    """Return the bytes of all storages of a state dict, None as in `CopyCost`, and the buffers for a copy."""
    flat = flatten(state_dict)[0]
    tensors = [_get_local_tensor(value) for value in flat.values() if isinstance(value, torch.Tensor)]
    local = [tensor for tensor in tensors if tensor is not None and tensor.device.type in ("cpu", "cuda")]
    if len(local) < len(tensors):
        return None, Counter()
    kinds = _count_buffers(_find_regions(flat))
    size = sum(kind[0] * count for kind, count in kinds.items())
    return None if size > 2 * sum(tensor.numel() * tensor.itemsize for tensor in local) else size, kinds


def _iterate_storages(flat: Mapping[str, Any]) -> Iterator[torch.UntypedStorage]:
    for value in flat.values():
        if isinstance(value, torch.Tensor) and (tensor := _get_local_tensor(value)) is not None:
            with suppress(Exception):  # a subclass or layout without memory of its own
                storage = tensor.untyped_storage()
                storage.data_ptr()  # raises if there is none
                yield storage


def _get_local_tensor(tensor: Any) -> torch.Tensor | None:
    """Return the local tensor of this rank; None: a `ShardedTensor`, which DCP's stager does not support."""
    if isinstance(tensor, ShardedTensor):
        return None
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", tensor)
    return local
