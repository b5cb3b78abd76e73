"""Copies of state dicts for saves in the background, in memory that one save leaves to the next.

A copy into memory that was used before takes a third of the time of one into new memory, whose pages the system has to
find and clear first. Of a GPU a tenth: what is copied from there is pinned.
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
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from dsq_ckpt.core.aliases import bytes_of
from dsq_ckpt.core.memory import available_memory
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.core.notices import is_new_warning, warn_safely
from dsq_ckpt.core.pinning import allocate_pinned
from dsq_ckpt.core.tensor_subclasses import check_storable, name_object_errors
from dsq_ckpt.errors import SaveFailed

_Kind = tuple[int, bool]
"""Of memory: its size in bytes, and whether it is for copies from a GPU."""

_spare: dict[_Kind, list[torch.Tensor]] = {}
"""Memory of earlier copies: uint8, flat."""

_told = set[str]()  # hosts without the memory that were warned of

_ALONE = 1 << 24
"""Bytes up to which one thread copies: to wait for others to be scheduled takes longer where cores are busy."""

_PINNED = 1 << 18
"""Bytes from which memory for a copy is pinned, one call of the driver for each."""


class CopyCost(NamedTuple):
    """The memory that a copy of the state of one rank takes.

    Attributes:
        host: name of the host that it is on.
        size: bytes of the copy; None: a copy is not possible (`ShardedTensor`), or not cheaper, since a tensor is
            neither on the CPU nor on a GPU, or since the tensors are small parts of their memory, which is copied as a
            whole.
        spare: bytes of earlier copies that it may take the place of.
        available: bytes that the rank can still take; None: not known.
    """

    host: str
    size: int | None
    spare: int
    available: int | None

    @classmethod
    def of(cls, state_dict: dict[str, Any]) -> CopyCost:
        """Return the cost of a copy of a state dict of this rank."""
        size, kinds = _size(state_dict)
        spare = sum(kind[0] * min(count, len(_spare.get(kind, ()))) for kind, count in kinds.items())
        return cls(platform.node(), size, spare, available_memory())


def copies_instead(how: str, costs: Sequence[CopyCost | None], processes: bool, rank: int) -> bool:
    """Return whether a state is to be copied instead of quantized while training waits; the same on all ranks.

    Args:
        how: `storage.stage` of the configuration.
        costs: costs of all ranks, in rank order; None: the rank searches, which training has to wait for.
        processes: the save is done by DCP's background process, to which a copy is copied again, in shared memory.
        rank: this rank, of which 0 says what the memory is too small for.
    """
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs) or how == "quantize":
        return False
    if how == "copy":
        return True
    sizes = [cost.size for cost in known if cost.size is not None]
    if processes or len(sizes) < len(known):
        return False
    lacking = _shortage(known)
    if lacking is not None and rank == 0 and is_new_warning(lacking, _told):
        warn_safely(
            f"{lacking}: this asynchronous save quantizes while training waits, which takes longer and less memory; "
            "storage.stage: quantize does so always, and says nothing"
        )
    return lacking is None


def _shortage(costs: Sequence[CopyCost]) -> str | None:
    """Return which host lacks the memory for the copies of its ranks, for people; None: none does."""
    for host in dict.fromkeys(cost.host for cost in costs):
        ranks = [cost for cost in costs if cost.host == host]
        left = min((cost.available for cost in ranks if cost.available is not None), default=None)
        # Half a copy more is for the codes of this save, and for what training takes meanwhile.
        needed = sum((cost.size or 0) * 3 // 2 - min(cost.spare, cost.size or 0) for cost in ranks)
        if left is not None and needed > left:
            return f"{host} has {left / 2**30:.3g} GiB of memory left, and to copy the state needs {needed / 2**30:.3g}"
    return None


def settled(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Wait for tensors that are still being communicated; return a state dict of their results.

    The argument, if there are none. Such tensors, as `DTensor.redistribute(async_op=True)` gives, have no memory that
    tells where it is.
    """
    flat, mappings = flatten_state_dict(state_dict)
    if not any(isinstance(_local(value), AsyncCollectiveTensor) for value in flat.values()):
        return state_dict
    return Nesting.of(state_dict, mappings).unflatten({fqn: _settled(value) for fqn, value in flat.items()})


def _settled(value: Any) -> Any:
    local = _local(value)
    if not isinstance(local, AsyncCollectiveTensor):
        return value
    if not isinstance(value, DTensor):
        return local.wait()
    with torch.no_grad():
        return DTensor.from_local(
            local.wait(), value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )


def copied(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict on the CPU, of the same structure, as DCP's stager makes it."""
    return _staged(state_dict, flatten_state_dict(state_dict)[0])


def copied_by_name(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict on the CPU, without attributes that a program gave to its tensors.

    Raises:
        SaveFailed: an object or a tensor cannot be copied, or a tensor cannot be stored; it is named.
    """
    def tensors(flat: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        bare = {fqn: _bare(fqn, check_storable(fqn, tensor)) for fqn, tensor in flat.items()}
        return _staged(bare, bare)

    return rebuilt(state_dict, tensors)


def rebuilt(
    state_dict: dict[str, Any], replaced: Callable[[Mapping[str, torch.Tensor]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a state dict with other tensors, and a copy of every object.

    Args:
        state_dict: the original.
        replaced: returns what takes the place of the tensors, by name.

    Raises:
        SaveFailed: an object cannot be copied; it is named.
    """
    flat, mappings = flatten_state_dict(state_dict)
    staged: dict[str, Any] = {}
    tensors = replaced({fqn: value for fqn, value in flat.items() if isinstance(value, torch.Tensor)})
    for fqn, value in flat.items():
        if fqn in tensors:
            staged[fqn] = tensors[fqn]
        else:
            with name_object_errors(fqn):
                staged[fqn] = copy.deepcopy(value)
    return Nesting.of(state_dict, mappings).unflatten(staged)


def release_spare() -> None:
    """Free the memory that is kept for the next copy."""
    _spare.clear()


class _Stager(StateDictStager):
    """DCP's stager, with memory of earlier copies; an instance makes one copy.

    Memory that several storages share, as of two views of a NumPy array, is shared by their copies too.
    """

    def __init__(self, flat: Mapping[str, Any]) -> None:
        super().__init__()
        global _spare
        self._regions = _regions(flat)
        # What is of no use to this copy is of no use to the next, and freed before others are allocated.
        self._spare = {kind: _spare.get(kind, [])[-count:] for kind, count in _kinds(self._regions).items()}
        _spare = {}
        self._leased: dict[_Place, Any] = {}
        self._resolved: list[torch.Tensor] = []  # alive, since what is copied is known by its identity

    def _offload_tensor(self, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        if x.is_conj() or x.is_neg():  # views whose memory has other values than they have
            x = x.resolve_conj().resolve_neg()
            self._resolved.append(x)
        return super()._offload_tensor(x, memo, non_blocking)

    def _stage_untyped_storage(self, storage: torch.UntypedStorage, non_blocking: bool = False) -> torch.UntypedStorage:
        if not storage.nbytes():
            return super()._stage_untyped_storage(storage, non_blocking)
        place = storage.device, storage.data_ptr()
        region, size = self._regions.get(place, (place, storage.nbytes()))
        if region not in self._leased:
            self._leased[region] = self._lease(size, storage.device)
        start = storage.data_ptr() - region[1]
        target = self._leased[region][start : start + storage.nbytes()]
        if storage.nbytes() < _ALONE and storage.device.type == "cpu":
            target[:] = bytes_of(storage).numpy()
            return torch.from_numpy(target).untyped_storage()
        copy = torch.from_numpy(target).untyped_storage()
        copy.copy_(storage, non_blocking)
        return copy

    def _lease(self, size: int, device: torch.device) -> Any:
        """Return memory as an array of bytes, which is given back when the last tensor in it is freed."""
        kind = _kind(size, device)
        try:
            whole = self._spare[kind].pop()
        except LookupError:
            whole = allocate_pinned(size, device) if kind[1] else torch.empty(size, dtype=torch.uint8, device="cpu")
        lease = whole.numpy()
        weakref.finalize(lease, _give_back, whole, kind).atexit = False
        return lease


_Place = tuple[torch.device, int]
"""The beginning of a range of memory: device and address."""


def _regions(flat: Mapping[str, Any]) -> dict[_Place, tuple[_Place, int]]:
    """Return the beginning and size of the memory that each storage shares with others, by the storage's beginning."""
    storages: dict[_Place, int] = {}
    for storage in _storages(flat):
        place = storage.device, storage.data_ptr()
        storages[place] = max(storages.get(place, 0), storage.nbytes())
    regions: dict[_Place, tuple[_Place, int]] = {}
    inside: list[_Place] = []
    for place in sorted(storages, key=lambda one: (str(one[0]), one[1])):
        device, start = place
        end = start + storages[place]
        if inside and inside[0][0] == device and start < inside[0][1] + regions[inside[0]][1]:
            inside.append(place)
            end = max(end, inside[0][1] + regions[inside[0]][1])
        else:
            inside = [place]
        regions |= dict.fromkeys(inside, (inside[0], end - inside[0][1]))
    return regions


def _kind(size: int, device: torch.device) -> _Kind:
    return size, device.type == "cuda" and size >= _PINNED


def _kinds(regions: Mapping[_Place, tuple[_Place, int]]) -> Counter[_Kind]:
    """Return how much memory of each kind a copy takes."""
    return Counter(_kind(size, place[0]) for place, (region, size) in regions.items() if place == region and size)


def _give_back(whole: torch.Tensor, kind: _Kind) -> None:
    _spare.setdefault(kind, []).append(whole)


def _staged(state_dict: dict[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    stager = _Stager(flat)
    try:
        return stager.stage(state_dict)
    finally:
        stager.close()


def _bare(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    if _local(tensor) is None:
        raise SaveFailed(
            f"'{fqn}' is of class {type(tensor).__name__}, which DCP's stager does not copy: leave storage.stage at "
            "auto, or set it to quantize"
        )
    return tensor.detach()


def _size(state_dict: dict[str, Any]) -> tuple[int | None, Counter[_Kind]]:
    """Return the bytes of all memory that the tensors of a state dict lie in, None as in `CopyCost`, and its kinds."""
    flat = flatten_state_dict(state_dict)[0]
    tensors = [_local(value) for value in flat.values() if isinstance(value, torch.Tensor)]
    local = [tensor for tensor in tensors if tensor is not None and tensor.device.type in ("cpu", "cuda")]
    if len(local) < len(tensors):
        return None, Counter()
    kinds = _kinds(_regions(flat))
    size = sum(kind[0] * count for kind, count in kinds.items())
    return None if size > 2 * sum(tensor.numel() * tensor.itemsize for tensor in local) else size, kinds


def _storages(flat: Mapping[str, Any]) -> Iterator[torch.UntypedStorage]:
    for value in flat.values():
        if isinstance(value, torch.Tensor) and (tensor := _local(value)) is not None:
            with suppress(Exception):  # a subclass or layout without memory of its own
                yield tensor.untyped_storage()


def _local(tensor: Any) -> torch.Tensor | None:
    """Return the tensor in this rank's memory; None: there may be others, which DCP's stager does not know."""
    if isinstance(tensor, ShardedTensor):
        return None
    found: torch.Tensor | None = getattr(tensor, "_local_tensor", tensor)
    return found
