"""Aliases of tensors: tensors with a storage of their own in the memory of others, for NumPy.

Once NumPy has a view of a tensor's memory, torch refuses to resize its storage from then on. Training resizes storages:
FSDP frees unsharded parameters that way, and its next step raises an error if it cannot. Therefore saves and loads
access the memory of the user's tensors through aliases.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from dsq_ckpt.core.address_ranges import count_spanned_bytes

_PLAIN_CLASSES = (torch.Tensor, nn.Parameter, nn.Buffer)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory with a storage of its own; the original storage must not be resized meanwhile.

    Tensors that NumPy cannot read directly (other devices, layouts and subclasses, lazy conjugates) are returned
    unchanged.
    """
    if type(tensor) not in _PLAIN_CLASSES or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor
    if not tensor.untyped_storage().data_ptr():
        return tensor
    if (problem := missing_memory_problem(tensor)) is not None:  # no kernel looks at the size of a storage
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} {problem}")
    if torch.is_inference_mode_enabled():  # other threads, outside of it, cannot write to an inference tensor
        with torch.inference_mode(False):
            return alias_of(tensor)
    return from_dlpack(to_dlpack(tensor.detach()))  # which keeps this memory if `tensor.data` is replaced


def missing_memory_problem(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has less memory than its shape needs; None: it has enough, or its device does not tell."""
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda") or not tensor.numel():
        return None
    needed = tensor.storage_offset() * tensor.itemsize + count_spanned_bytes(tensor)
    found = tensor.untyped_storage().nbytes()
    if found >= needed:
        return None
    return (
        f"needs a storage of {needed} bytes, and its own has {found}, as that of a parameter that FSDP has freed: "
        "gather it, or take a tensor that has its memory"
    )


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, uint8.

    One element counts as contiguous whatever its stride, such as a column of a matrix of one row has, and `view` alone
    keeps the stride.
    """
    flat = tensor.view(-1)
    return (flat if len(flat) > 1 else flat.as_strided(flat.shape, (1,))).view(torch.uint8)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a uint8 tensor in the host memory of a storage, with a storage of its own."""
    return torch.from_numpy(np.asarray(_ArrayInterface(storage)))


class _ArrayInterface:
    """NumPy's array interface of a storage's memory; it keeps the storage alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self.__array_interface__: dict[str, Any] = {
            "version": 3, "shape": (storage.nbytes(),), "typestr": "|u1", "data": (storage.data_ptr(), False),
        }
