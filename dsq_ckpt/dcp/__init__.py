"""The storage writer and reader for torch.distributed.checkpoint."""

from dsq_ckpt.dcp.reader import DSQStorageReader
from dsq_ckpt.dcp.writer import DSQStorageWriter

__all__ = ["DSQStorageReader", "DSQStorageWriter"]
