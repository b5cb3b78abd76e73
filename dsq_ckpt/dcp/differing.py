"""Values of one name that differ between ranks, of which one is stored.

DCP takes values that several ranks have under one name for copies, and lets one of them write each: for large tensors
not always the same rank (`small_plans.py`). But random states, positions in a data set and the like are each rank's
own, an average may be updated on one rank alone, and the experts of each may have the names of others'.
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

from dsq_ckpt.core.aliases import alias_of
from dsq_ckpt.core.autocast import no_autocast
from dsq_ckpt.core.checksums import quote
from dsq_ckpt.core.nesting import Place
from dsq_ckpt.core.notices import warn
from dsq_ckpt.dcp.groups_of_ranks import is_of_group, lists_of_names, options_of_groups
from dsq_ckpt.quantization.exact_values import values_on_host
from dsq_ckpt.quantization.groups import MODELS

_LARGEST = 1 << 16  # bytes of integers, and of text, that are all compared
_MOST = 1 << 14  # parts of a list, from its beginning
_DEEPEST = 16
_GLANCE = 16
"""Elements of a matrix, or of many integers, that tell whether ranks have the same ones, about."""
_USUAL = (torch.Tensor, torch.nn.Parameter)
PLAIN = (int, float, complex, bool, str, bytes, type(None))


@no_autocast()
@torch.no_grad()
def digests(state: Mapping[str, Any]) -> dict[Place, int]:
    """Return digests of the values that ranks are compared by.

    These are numbers, text, small tensors of integers on the CPU, a few elements of each matrix, and of other tensors
    of integers, and what options an optimizer's groups have, whose tensors of floats count too. Copies of a shard are
    compared with each other. GPUs are waited for once.

    Args:
        state: flat state dict. Lists, tuples and dicts of such values count, other objects do not: equal ones may be
            pickled to different bytes. Vectors of floats, such as statistics of batches, may differ, and so may single
            ones of a model: observers keep the range of a rank's activations so.
    """
    found: dict[Place, int] = {}
    few: dict[Place, torch.Tensor] = {}
    names_of_groups = lists_of_names(state)
    for name, value in {**state, **options_of_groups(state)}.items():
        if name in names_of_groups:
            continue
        of_model, of_group = name.partition(".")[0].lower() in MODELS, is_of_group(name)
        for place, own in _pieces(name, value):
            if isinstance(own, torch.Tensor) and not _is_small(own):
                if _is_compared(own, of_group) and not (of_model and own.ndim == 0 and own.is_floating_point()):
                    few[place] = _few(own)
                continue
            parts = list(islice(_parts(own, 0), _MOST))
            if None not in parts:
                found[place] = xxhash.xxh3_64_intdigest(b"\0".join(part for part in parts if part is not None))
    for place, seen in zip(few, values_on_host(list(few.values())), strict=True):
        found[place] = xxhash.xxh3_64_intdigest(np.asarray(seen, np.float64).tobytes())
    return found


def warn_of_differing(ranks: Iterable[Mapping[Place, int]]) -> None:
    """Warn of the names whose digests differ between ranks."""
    names = differing(ranks)
    if of_groups := [name for name in names if is_of_group(name)]:
        warn(
            f"{quote(of_groups)} is not the same on all ranks, and the options of one of them are stored, for each "
            "perhaps another's: a load gives these to the group on all ranks. Make the same groups, in the same order "
            "and with the same options, on all of them, with an empty list where a rank has no parameters of one"
        )
    if names := [name for name in names if not is_of_group(name)]:
        warn(
            f"{quote(names)} is not the same on all ranks, and the value of one of them is stored: that of the lowest "
            "rank, or of tensors over 64 KiB that of any rank, for each name perhaps another's. Give what belongs to a "
            "rank a name of its own, such as f'rng-{rank}' (not buffers that DDP makes equal again)"
        )


def differing(ranks: Iterable[Mapping[Place, int]]) -> list[str]:
    """Return the names whose digests differ between the ranks that have them, sorted."""
    first: dict[Place, int] = {}
    unlike = {place for own in ranks for place, value in own.items() if first.setdefault(place, value) != value}
    return sorted({place if isinstance(place, str) else place[0] for place in unlike})


def _pieces(name: str, value: Any) -> Iterator[tuple[Place, Any]]:
    """Yield what this rank has of a value, each by what DCP takes for the same on other ranks."""
    if isinstance(value, DTensor):
        local = value.to_local()
        if value.device_mesh.get_coordinate() is not None and type(local) in _USUAL:
            (chunk,) = value.__create_chunk_list__()
            yield (name, tuple(chunk.offsets)), local
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield (name, tuple(shard.metadata.shard_offsets)), shard.tensor
    else:
        yield name, value


def _parts(value: Any, depth: int) -> Iterator[bytes | None]:
    """Yield bytes that make up a value, some of a large one; None for what cannot be compared, or is too deep."""
    if depth > _DEEPEST:
        yield None
    elif type(value) in (str, bytes) and len(value) > _LARGEST:
        yield f"{type(value).__name__} {len(value)}".encode()
        yield from _parts(value[:: -(-len(value) // _LARGEST) | 1], depth + 1)  # odd: numbers have 2, 4 or 8 bytes
    elif type(value) in PLAIN:
        text = hex(value) if type(value) is int else repr(value)  # Python refuses thousands of decimal digits
        yield text.encode(errors="surrogatepass")
    elif type(value) in (list, tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for part in value:
            yield from _parts(part, depth + 1)
    elif type(value) is dict:
        yield f"dict {len(value)}".encode()
        for key, part in value.items():
            yield from _parts(key, depth + 1)
            yield from _parts(part, depth + 1)
    elif isinstance(value, np.generic) and value.dtype.kind in "biufc":
        yield from _parts(value.item(), depth + 1)  # as it is stored
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biu" and value.nbytes <= _LARGEST:
        yield value.tobytes()
    elif isinstance(value, np.ndarray) and value.dtype.kind in ("biu" if value.ndim == 1 else "biufc"):
        yield repr(value[_spread(value.shape)].tolist()).encode()
    elif type(value) in _USUAL and _is_small(value):
        yield alias_of(value.detach()).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and _is_compared(value):
        yield repr(_few(value).tolist()).encode()
    else:
        yield None


def _is_compared(tensor: torch.Tensor, vectors: bool = False) -> bool:
    usual = type(tensor) in _USUAL and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return usual and (vectors or _is_integral(tensor) or tensor.ndim != 1)


def _is_integral(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _is_small(tensor: torch.Tensor) -> bool:
    return _is_compared(tensor) and _is_integral(tensor) and tensor.device.type == "cpu" and tensor.nbytes <= _LARGEST


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements as real numbers that float64 holds; no other is read."""
    few = tensor.detach()[_spread(tensor.shape)].reshape(-1)
    if few.is_complex():
        return torch.view_as_real(few.resolve_conj()).reshape(-1)
    return few.long().contiguous().view(torch.int32) if _is_integral(few) else few


def _spread(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the places of a few elements, at even distances along each dimension."""
    along = max(2, round(_GLANCE ** (1 / max(1, len(shape)))))
    return tuple(slice(None, None, -(-size // along) or 1) for size in shape)
