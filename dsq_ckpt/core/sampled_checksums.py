"""Checksums of samples of tensors, equal for equal tensors on any device and in any sharding.

The elements of a sample lie at pseudorandom places of the whole tensor. Each rank sums those of its shard, weighted by
odd numbers that depend on the place, so the sums of all ranks add up to that of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dsq_ckpt.core.checksums import INTEGERS, mix_bits, odd_numbers

_SAMPLES = 512


class SampleSum(NamedTuple):
    """Sum of the elements of a sample that one rank has.

    Attributes:
        dtype: dtype of the tensor.
        shape: shape of the whole tensor.
        elements: number of these elements.
        total: their sum, in int64.
    """

    dtype: str
    shape: tuple[int, ...]
    elements: int
    total: int


@torch.no_grad()
def sum_sample(tensor: torch.Tensor) -> SampleSum | None:
    """Return the sum of this rank's elements of a sample; None for tensors without elements of numbers in memory.

    Of several ranks with the same shard of a DTensor, the first sums it.
    """
    if is_lazy(tensor) or tensor.is_nested:
        return None
    local, offsets, is_first = tensor.detach(), (0,) * tensor.dim(), True
    if isinstance(local, DTensor):
        coordinates, placements = local.device_mesh.get_coordinate(), local.placements
        if coordinates is None or any(placement.is_partial() for placement in placements):
            return None
        replicated = (at for at, placement in zip(coordinates, placements, strict=True) if placement.is_replicate())
        is_first = not any(replicated)
        (chunk,) = local.__create_chunk_list__()
        local, offsets = local.to_local(), tuple(chunk.offsets)
    is_plain = local.layout is torch.strided and not (
        local.is_quantized or local.is_meta or local.is_complex() or local.is_neg()
    )
    if not is_plain or hasattr(local, "__tensor_flatten__") or local.itemsize not in INTEGERS:
        return None
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if not is_first or not local.numel():
        return SampleSum(dtype, shape, 0, 0)
    count = min(_SAMPLES, tensor.numel())
    weights = odd_numbers(count, local.device)
    places = torch.arange(count, device=local.device) if count < _SAMPLES else (weights >> 1) % tensor.numel()
    inside, index = torch.ones_like(places, dtype=torch.bool), list[torch.Tensor]()
    for size, offset, local_size in zip(reversed(shape), reversed(offsets), reversed(local.shape), strict=True):
        place = places % size - offset
        inside &= (place >= 0) & (place < local_size)
        index.insert(0, place)
        places = places // size
    bits = local.view(INTEGERS[local.itemsize])
    sample = bits[tuple(place[inside] for place in index)] if index else bits.reshape(1)
    return SampleSum(dtype, shape, len(sample), int((mix_bits(sample) * weights[inside]).sum()))


def join_sums(sums: Sequence[SampleSum]) -> str | None:
    """Return dtype, shape and checksum of a tensor as text, from the sums of all ranks that have it.

    None: its elements are not all there, or ranks with the whole tensor have other values, as each may have a shard of
    a parallelism of its own.
    """
    dtype, shape = sums[0].dtype, sums[0].shape
    count = min(_SAMPLES, torch.Size(shape).numel())
    parts = [part for part in sums if part.elements]
    if not parts or any((part.dtype, part.shape) != (dtype, shape) for part in sums):
        return None
    if {(part.elements, part.total) for part in parts} == {(count, parts[0].total)}:
        total = parts[0].total
    elif sum(part.elements for part in parts) == count:
        total = sum(part.total for part in parts)
    else:
        return None
    return f"{dtype} {'x'.join(map(str, shape))} {total % (1 << 64):016x}"
