"""Values of one name that differ between ranks, of which one is stored.

DCP takes values that several ranks have under one name for copies, and lets one of them write each, not always the
same rank. But random states, positions in a data set and the like are each rank's own, an average may be updated on one
rank alone, and the experts of each may have the names of others'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from dsq_ckpt.core.aliases import alias_of
from dsq_ckpt.core.autocast import without_autocast
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.unchanged import named
from dsq_ckpt.quantization.nature import on_host

_LARGEST = 1 << 16  # bytes of a text or tensor
_MOST = 1 << 14  # parts of a list
_DEEPEST = 16
_GLANCE = 16
"""Elements of a matrix that tell whether ranks have the same one, about."""
PLAIN = (int, float, complex, bool, str, bytes, type(None))


@without_autocast()
def digests(state: Mapping[str, Any]) -> dict[str, int]:
    """Return digests of the values that ranks are compared by.

    These are numbers, text, small tensors of integers on the CPU, and a few elements of each matrix of floats.

    Args:
        state: flat state dict. Lists, tuples and dicts of such values count, other objects do not: equal ones may be
            pickled to different bytes. Vectors of floats, such as statistics of batches, may differ.
    """
    matrices = {name: _few(value) for name, value in state.items() if _is_matrix(value)}
    seen = zip(matrices, on_host(list(matrices.values())), strict=True)
    found = {name: xxhash.xxh3_64_intdigest(np.asarray(few).tobytes()) for name, few in seen}
    for name, value in state.items():
        if name in matrices:
            continue
        parts = list(islice(_parts(value, 0), _MOST + 1))
        known = len(parts) <= _MOST and None not in parts
        if known and name.rpartition(".")[2] != "params":  # of a group: each rank's own experts have names of their own
            found[name] = xxhash.xxh3_64_intdigest(b"\0".join(part for part in parts if part is not None))
    return found


def warn_of_differing(ranks: Iterable[Mapping[str, int]]) -> None:
    """Warn of the names whose digests differ between ranks."""
    if names := differing(ranks):
        warn(
            f"{named(names)} is not the same on all ranks, and the value of one of them is stored, as by dcp.save, for "
            "each name perhaps another's: give what belongs to a rank a name of its own, such as f'rng-{rank}' (not "
            "buffers that DDP makes equal again)"
        )


def differing(ranks: Iterable[Mapping[str, int]]) -> list[str]:
    """Return the names whose digests differ between the ranks that have them, sorted."""
    first: dict[str, int] = {}
    return sorted({name for own in ranks for name, value in own.items() if first.setdefault(name, value) != value})


def _parts(value: Any, depth: int) -> Iterator[bytes | None]:
    """Yield the bytes that make up a value; None for what cannot be compared, or is too large or too deep for it."""
    if depth > _DEEPEST or (isinstance(value, str | bytes) and len(value) > _LARGEST):
        yield None
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
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biu" and value.nbytes <= _LARGEST:
        yield value.tobytes()
    elif type(value) is torch.Tensor and _is_small(value):
        yield alias_of(value.detach()).reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield None


def _is_small(tensor: torch.Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not tensor.is_floating_point() and not tensor.is_complex() and tensor.nbytes <= _LARGEST


def _is_matrix(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter) and value.ndim > 1 and value.is_floating_point()
        and value.layout == torch.strided and not value.is_quantized and not value.is_meta
    )


def _few(matrix: torch.Tensor) -> torch.Tensor:
    """Return a few elements, at even distances along each dimension; no other is read."""
    along = max(2, round(_GLANCE ** (1 / matrix.ndim)))
    return matrix.detach()[tuple(slice(None, None, -(-size // along) or 1) for size in matrix.shape)].reshape(-1)
