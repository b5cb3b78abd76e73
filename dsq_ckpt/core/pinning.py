"""Memory that stays where it is, for fast copies from a GPU: of tensors that were allocated otherwise than by CUDA."""

from __future__ import annotations

import torch


def pin(tensor: torch.Tensor) -> bool:
    """Pin the memory of a CPU tensor until `unpin`; False: CUDA refuses, so that copies to it are slow."""
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    return int(status) == 0


def unpin(address: int) -> None:
    """Undo `pin`, before the memory at this address is freed."""
    torch.cuda.cudart().cudaHostUnregister(address)
