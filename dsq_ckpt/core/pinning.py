"""Pinned host memory, for fast copies from a GPU, that is not allocated by CUDA."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

import torch

from dsq_ckpt.core.notices import warn_safely

_refused_processes: set[int] = set()
"""Processes in which CUDA refused to pin memory, as for a limit of locked memory; they do not try again."""


def allocate_pinned(size: int, device: torch.device) -> torch.Tensor:
    """Allocate uint8[size] for copies from a GPU, pinned during the life of the tensor if CUDA allows it.

    Pages are shared with forked processes, such as workers of a data loader. Private pages would be copied for each of
    them, or, by older kernels, separated from the pages that the GPU writes to.
    """
    try:
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    except OSError:  # the number of mappings of a process is limited (vm.max_map_count)
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    if pin(memory, device):
        weakref.finalize(memory, _unpin_in_process, memory.data_ptr(), os.getpid()).atexit = False
    return memory


def pin(tensor: torch.Tensor, device: torch.device) -> bool:
    """Pin the memory of a CPU tensor for copies from a device until `unpin`; return whether CUDA allows it.

    If it does not, copies are slow; a warning says so once.
    """
    if os.getpid() in _refused_processes:
        return False
    with torch.cuda.device(device):  # or else the process would create a context on the first device
        status = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        if status:
            _refused_processes.add(os.getpid())
            with suppress(RuntimeError):  # clears the error, which the next launch of the training would raise
                torch.zeros(1, device=device)
    if status:
        warn_safely(
            f"CUDA could not pin {tensor.nbytes} bytes of memory (error {status}), so copies from {device} are slow; a "
            "limit of locked memory may be too low (ulimit -l)"
        )
    return not status


def unpin(address: int) -> None:
    """Undo `pin`; call it before the memory at this address is freed."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _unpin_in_process(address: int, process: int) -> None:
    if os.getpid() == process:  # a forked process cannot use CUDA, and has no pinned memory
        unpin(address)
