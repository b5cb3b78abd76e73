"""Memory that the training process and the checkpointing process share."""

from __future__ import annotations

import mmap
import os

import torch


class Arena:
    """Bytes in shared memory without a name: they are freed when the last process that maps them is gone, however it
    went, so that a killed job leaves nothing behind.

    Attributes:
        tensor: all of it, uint8.
        size: bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._pinned = False
        self._map = mmap.mmap(descriptor, max(size, 1))
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:size]

    @classmethod
    def create(cls, size: int) -> Arena:
        """New memory, all zeros; pages are taken when they are first written.

        Raises:
            OSError: there is not enough of it.
        """
        descriptor = os.memfd_create("dsq_ckpt")
        try:
            os.ftruncate(descriptor, max(size, 1))
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in it, at `offset` bytes, which `aligned` gave."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.tensor[offset : offset + size].view(dtype).view(shape)

    def pin(self) -> None:
        """Let a GPU write into it while the CPU does other things; where that is refused, copies wait."""
        if not self._pinned:
            status = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.size, 0)
            self._pinned = int(status) == 0

    def close(self) -> None:
        """Let go of it; tensors in it stay valid while they are referenced."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._pinned = False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def aligned(offset: int) -> int:
    """The next place at which any tensor may begin."""
    return -(-offset // 64) * 64
