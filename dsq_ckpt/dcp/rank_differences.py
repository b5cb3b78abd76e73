"""Detection of values with the same name that differ between ranks; only one of them is stored.

DCP takes values of several ranks with the same name for replicas, and one rank writes each: for large tensors not
always the same rank (`replica_assignment.py`). But random states and positions in a data set belong to a rank, an
average may be updated on one rank only, and experts on different ranks may have the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from dsq_ckpt.core.aliases import alias_of, flat_bytes
from dsq_ckpt.core.autocast import no_autocast
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.nesting import Place
from dsq_ckpt.core.notices import warn
from dsq_ckpt.dcp.parameter_groups import find_group_options, find_parameter_lists, is_group_name
from dsq_ckpt.quantization.exact_values import values_on_host
from dsq_ckpt.quantization.groups import MODEL_KEYS

_MAX_BYTES = 1 << 16  # integers and text up to this size are compared completely
_MAX_PARTS = 1 << 14  # compared parts of a list, from its beginning
_MAX_DEPTH = 16
_SAMPLE_SIZE = 16
"""Approximate number of compared elements of a matrix, or of many integers."""
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
PLAIN_TYPES = (int, float, complex, bool, str, bytes, type(None))


@no_autocast()
@torch.no_grad()
def compute_digests(state: Mapping[str, Any]) -> dict[Place, int]:
    """Return digests of the values that are compared between ranks.

    These are numbers, text, small integer tensors on the CPU, a few elements of each matrix and of other integer
    tensors, and the options of an optimizer's parameter groups, including float tensors. Replicas of a shard are
    compared with each other. GPUs are synchronized once.

    Args:
        state: flat state dict. Lists, tuples and dicts of such values are compared, other objects are not, since equal
            ones may be pickled to different bytes. Float vectors, such as statistics of batches, may differ, and so may
            float scalars of a model, such as the activation range of an observer.
    """
    digests: dict[Place, int] = {}
    samples: dict[Place, torch.Tensor] = {}
    names_of_groups = find_parameter_lists(state)
    for name, value in {**state, **find_group_options(state)}.items():
        if name in names_of_groups:
            continue
        of_model, of_group = name.partition(".")[0].lower() in MODEL_KEYS, is_group_name(name)
        for place, local in _iterate_local_parts(name, value):
            if isinstance(local, torch.Tensor) and not _is_small(local):
                if _is_compared(local, of_group) and not (of_model and local.ndim == 0 and local.is_floating_point()):
                    samples[place] = _sample(local)
                continue
            parts = list(islice(_serialize(local, 0), _MAX_PARTS))
            if None not in parts:
                digests[place] = xxhash.xxh3_64_intdigest(b"\0".join(part for part in parts if part is not None))
    for place, values in zip(samples, values_on_host(list(samples.values())), strict=True):
        digests[place] = xxhash.xxh3_64_intdigest(np.asarray(values, np.float64).tobytes())
    return digests


def warn_of_differences(ranks: Iterable[Mapping[Place, int]]) -> None:
    """Warn of the names whose digests differ between ranks."""
    names = find_differing_names(ranks)
    if of_groups := [name for name in names if is_group_name(name)]:
        warn(
            f"{quote(of_groups)} is not the same on all ranks, and the options of one of them are stored, for each "
            "perhaps another's: a load gives these to the group on all ranks. Make the same groups, in the same order "
            "and with the same options, on all of them, with an empty list where a rank has no parameters of one"
        )
    if names := [name for name in names if not is_group_name(name)]:
        warn(
            f"{quote(names)} is not the same on all ranks, and the value of one of them is stored: that of the lowest "
            "rank, or of tensors over 64 KiB that of any rank, for each name perhaps another's. Give what belongs to a "
            "rank a name of its own, such as f'rng-{rank}' (not buffers that DDP makes equal again)"
        )


def find_differing_names(ranks: Iterable[Mapping[Place, int]]) -> list[str]:
    """Return the names whose digests differ between the ranks that have them, sorted."""
    first: dict[Place, int] = {}
    unlike = {key for digests in ranks for key, value in digests.items() if first.setdefault(key, value) != value}
    return sorted({key if isinstance(key, str) else key[0] for key in unlike})


def _iterate_local_parts(name: str, value: Any) -> Iterator[tuple[Place, Any]]:
    """Yield the local parts of a value, each with the key by which DCP identifies replicas."""
    if isinstance(value, DTensor):
        local = value.to_local()
        if value.device_mesh.get_coordinate() is not None and type(local) in _TENSOR_TYPES:
            (chunk,) = value.__create_chunk_list__()
            yield (name, tuple(chunk.offsets)), local
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield (name, tuple(shard.metadata.shard_offsets)), shard.tensor
    else:
        yield name, value


def _serialize(value: Any, depth: int) -> Iterator[bytes | None]:
    """Yield bytes that represent a value, or a sample of a large one; None if it cannot be compared or is too deep."""
    if depth > _MAX_DEPTH:
        yield None
    elif type(value) in (str, bytes) and len(value) > _MAX_BYTES:
        yield f"{type(value).__name__} {len(value)}".encode()
        step = -(-len(value) // _MAX_BYTES) | 1  # odd, since numbers have 2, 4 or 8 bytes
        yield from _serialize(value[::step], depth + 1)
    elif type(value) in PLAIN_TYPES:
        text = hex(value) if type(value) is int else repr(value)  # Python refuses thousands of decimal digits
        yield text.encode(errors="surrogatepass")
    elif type(value) in (list, tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for entry in value:
            yield from _serialize(entry, depth + 1)
    elif type(value) is dict:
        yield f"dict {len(value)}".encode()
        for key, entry in value.items():
            yield from _serialize(key, depth + 1)
            yield from _serialize(entry, depth + 1)
    elif isinstance(value, np.generic) and value.dtype.kind in "biufc":
        yield from _serialize(value.item(), depth + 1)  # as it is stored
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biu" and value.nbytes <= _MAX_BYTES:
        yield value.tobytes()
    elif isinstance(value, np.ndarray) and value.dtype.kind in ("biu" if value.ndim == 1 else "biufc"):
        yield repr(value[_get_sample_slices(value.shape)].tolist()).encode()
    elif type(value) in _TENSOR_TYPES and _is_small(value):
        yield flat_bytes(alias_of(value.detach()).contiguous()).numpy().tobytes()
    elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and _is_compared(value):
        yield repr(_sample(value).tolist()).encode()
    else:
        yield None


def _is_compared(tensor: torch.Tensor, vectors: bool = False) -> bool:
    if type(tensor) not in _TENSOR_TYPES or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    return vectors or _is_integral(tensor) or tensor.ndim != 1


def _is_integral(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _is_small(tensor: torch.Tensor) -> bool:
    return _is_compared(tensor) and _is_integral(tensor) and tensor.device.type == "cpu" and tensor.nbytes <= _MAX_BYTES


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements as real numbers that float64 represents exactly; no other elements are read."""
    sample = tensor.detach()[_get_sample_slices(tensor.shape)].reshape(-1)
    if sample.is_complex():
        return torch.view_as_real(sample.resolve_conj()).reshape(-1)
    return sample.long().contiguous().view(torch.int32) if _is_integral(sample) else sample


def _get_sample_slices(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return slices of a few elements, evenly spaced along each dimension."""
    along = max(2, round(_SAMPLE_SIZE ** (1 / max(1, len(shape)))))
    return tuple(slice(None, None, -(-size // along) or 1) for size in shape)
