"""Checksums of tensors, to detect changes of their values.

torch's version counter does not count changes through `.data`, and counts changes that were undone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
import xxhash

from dsq_ckpt.core.aliases import alias_of, flat_bytes
from dsq_ckpt.core.workers import Workers

_BLOCK_ELEMENTS = 1 << 20
"""Elements per block of the sum on other devices, which bounds its memory to 40 MiB."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes, by bytes of an element."""
_Key = TypeVar("_Key", bound=Hashable)


def checksums(tensors: Mapping[_Key, Callable[[], torch.Tensor]], workers: Workers) -> dict[_Key, Hashable]:
    """Return the checksum of the tensor that each function returns, by key, on this rank."""
    return dict(zip(tensors, workers.map(lambda tensor: checksum(tensor()), tensors.values()), strict=True))


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> Hashable:
    """Return a checksum of the bytes of a tensor, its dtype and shape; for subclasses, that of the inner tensors.

    On the CPU it is xxh3-64, at about 20 GB/s on one core. On other devices it is a weighted sum in int64, computed on
    the device.
    """
    if hasattr(tensor, "__tensor_flatten__"):  # a DTensor, a quantized tensor
        inner_tensors = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return tuple(checksum(inner_tensor) for inner_tensor in inner_tensors if isinstance(inner_tensor, torch.Tensor))
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor._version
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if tensor.device.type == "cpu":
        digest = xxhash.xxh3_64_intdigest(flat_bytes(alias_of(values)).numpy().data)
    else:
        digest = _weighted_sum(torch.view_as_real(values).view(-1) if values.is_complex() else values)
    return tensor.dtype, tensor.shape, digest


def _weighted_sum(values: torch.Tensor) -> int:
    """Return the sum of flat elements, as integers of their bits, weighted by odd numbers that depend on the place."""
    bits = values.view(INTEGERS[values.itemsize])
    odd = odd_numbers(min(_BLOCK_ELEMENTS, len(bits)), bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for block in bits.split(_BLOCK_ELEMENTS):
        total = total * 0x9E3779B1 + (mix_bits(block) * odd[: len(block)]).sum()
    return int(total)


def mix_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers for a weighted sum: a product with an odd number would keep the sign bit of a double."""
    wide = bits.long()
    return wide ^ (wide >> 32 & 0xFFFFFFFF)


def odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudorandom int64 numbers on a device: the outputs of splitmix64 for 1, 2, ..., made odd."""
    mixed = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return (mixed ^ (mixed >> 31 & (1 << 33) - 1)) | 1


def quote(names: list[Any]) -> str:
    """Return the first three names in quotes, and the number of the others."""
    suffix = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + suffix
