"""Memory that stays where it is, for fast copies from a GPU: of tensors that were allocated otherwise than by CUDA."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

import torch

from dsq_ckpt.core.notices import warn_safely

_refused_processes: set[int] = set()
"""Processes in which CUDA refused to pin memory, as for a limit of what may be locked; each asks once."""


def allocate_pinned(size: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes for copies from a GPU, uint8[size], pinned as long as this tensor is there, if CUDA allows.

    Pages are shared with forked processes, such as workers of a data loader. Others would be copied for each of these,
    or, by older kernels, parted from those that the GPU goes on to write to.
    """
    try:
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    except OSError:  # a process has so many mappings at most (vm.max_map_count)
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    if pin(memory, device):
        weakref.finalize(memory, _unpin_in_process, memory.data_ptr(), os.getpid()).atexit = False
    return memory


def pin(tensor: torch.Tensor, device: torch.device) -> bool:
    """Pin the memory of a CPU tensor for copies from a device until `unpin`.

    False: CUDA refuses, so that copies are slow, which is warned of once.
    """
    if os.getpid() in _refused_processes:
        return False
    with torch.cuda.device(device):  # else the first device gets a context of this process
        status = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        if status:
            _refused_processes.add(os.getpid())
            with suppress(RuntimeError):  # the error stays until the next launch, which is not to be one of training
                torch.zeros(1, device=device)
    if status:
        warn_safely(
            f"CUDA could not pin {tensor.nbytes} bytes of memory (error {status}), so copies from {device} are slow; a "
            "limit of locked memory may be too low (ulimit -l)"
        )
    return not status


def unpin(address: int) -> None:
    """Undo `pin`, before the memory at this address is freed."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _unpin_in_process(address: int, process: int) -> None:
    if os.getpid() == process:  # in a forked one CUDA cannot be used, and nothing is pinned
        unpin(address)
