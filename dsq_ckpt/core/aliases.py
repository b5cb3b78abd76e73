"""Tensors in the memory of others, for NumPy.

Once NumPy has seen a tensor's memory, torch refuses to resize its storage, for good. Training does resize storages:
FSDP frees unsharded parameters so, and raises in its next step if it cannot. So a save reads, and a load fills, the
memory of the user's tensors through tensors with a storage of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN_CLASSES = (torch.Tensor, nn.Parameter, nn.Buffer)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the memory of another, with a storage of its own, which must not be resized meanwhile.

    What NumPy does not read as it is (other devices, layouts and subclasses, lazy conjugates) is returned itself.
    """
    if type(tensor) not in _PLAIN_CLASSES or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor
    storage = tensor.untyped_storage()
    if not storage.data_ptr():
        return tensor
    own = bytes_of(storage).untyped_storage()
    with torch.inference_mode(False):  # a tensor that is made in it can only be written to in it, by no other thread
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return made.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage in host memory, uint8, in its memory, as a tensor with a storage of its own."""
    return torch.from_numpy(np.asarray(_ArrayInterface(storage)))


class _ArrayInterface:
    """The memory of a storage, by NumPy's interface; it keeps the storage alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self.__array_interface__: dict[str, Any] = {
            "version": 3, "shape": (storage.nbytes(),), "typestr": "|u1", "data": (storage.data_ptr(), False),
        }
