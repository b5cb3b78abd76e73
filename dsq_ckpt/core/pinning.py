"""Memory that stays where it is, for fast copies from a GPU: of tensors that were allocated otherwise than by CUDA."""

from __future__ import annotations

import mmap
import os
import weakref

import torch


def pinned_memory(size: int) -> torch.Tensor:
    """Allocate bytes for copies from a GPU, uint8[size], pinned as long as this tensor is there, if CUDA allows.

    Pages are shared with forked processes. Of others, as of `torch.empty`, this process would get a copy when it writes
    to them after a fork, such as of a data loader's workers, while the GPU goes on to write to the original.
    """
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    if pin(memory):
        weakref.finalize(memory, _unpin_here, memory.data_ptr(), os.getpid()).atexit = False
    return memory


def pin(tensor: torch.Tensor) -> bool:
    """Pin the memory of a CPU tensor until `unpin`; False: CUDA refuses, so that copies to it are slow."""
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    return int(status) == 0


def unpin(address: int) -> None:
    """Undo `pin`, before the memory at this address is freed."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _unpin_here(address: int, process: int) -> None:
    if os.getpid() == process:  # in a forked one CUDA cannot be used, and nothing is pinned
        unpin(address)
