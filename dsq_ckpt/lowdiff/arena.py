"""Shared memory between the training process and the checkpointing process."""

from __future__ import annotations

import mmap
import os

import torch

from dsq_ckpt.core.pinning import pin, unpin


class Arena:
    """A block of anonymous shared memory.

    The kernel frees it when the last process that maps it ends, so a killed job leaves nothing behind.

    Attributes:
        tensor: the whole block, uint8[size].
        size: size of the block in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._pinned = False
        self._map = mmap.mmap(descriptor, max(size, 1))
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:size]

    @classmethod
    def create(cls, size: int) -> Arena:
        """Allocate a block of zeros; pages are committed on the first write.

        Raises:
            OSError: the machine has not enough shared memory.
        """
        descriptor = os.memfd_create("dsq_ckpt")
        try:
            os.ftruncate(descriptor, max(size, 1))
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor at `offset` bytes, a multiple of 64. It shares the arena's memory."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.tensor[offset : offset + size].view(dtype).view(shape)

    def pin(self, device: torch.device) -> None:
        """Pin the memory for asynchronous copies from a GPU. Copies are synchronous if CUDA refuses."""
        if not self._pinned:
            self._pinned = pin(self.tensor, device)

    def close(self) -> None:
        """Release the memory; tensors in it stay valid while they are referenced."""
        if self._pinned:
            unpin(self.tensor.data_ptr())
            self._pinned = False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def align(offset: int) -> int:
    """Return the next offset in bytes at which a tensor of any dtype may begin."""
    return -(-offset // 64) * 64
