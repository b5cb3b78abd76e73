"""Compressed training checkpoints for PyTorch.

    import dsq_ckpt
    dsq_ckpt.save(state_dict, "run/step-000500")
    dsq_ckpt.load(state_dict, "run/step-000500")

`DSQStorageWriter` and `DSQStorageReader` are arguments of `torch.distributed.checkpoint`'s own functions.
"""

import importlib
from typing import Any

from dsq_ckpt.api import async_save, describe, load, save
from dsq_ckpt.chain import latest
from dsq_ckpt.compressor import Compressor
from dsq_ckpt.config import DSQConfig
from dsq_ckpt.dcp import DSQStorageReader, DSQStorageWriter
from dsq_ckpt.errors import (
    CheckpointExists,
    CheckpointNotFound,
    CodingError,
    ConfigError,
    CorruptCheckpoint,
    DSQError,
    LoadFailed,
    LossyTensor,
    NonFiniteTensor,
    SaveFailed,
    UnsupportedFormat,
)
from dsq_ckpt.merging import merge
from dsq_ckpt.oneshot import compress
from dsq_ckpt.remembered import forget
from dsq_ckpt.stored import decode
from dsq_ckpt.version import __version__


def __getattr__(name: str) -> Any:
    """`dsq_ckpt.lowdiff` when it is first asked for: saving checkpoints does without it."""
    if name == "lowdiff":
        return importlib.import_module("dsq_ckpt.lowdiff")
    raise AttributeError(f"module 'dsq_ckpt' has no attribute {name!r}")


__all__ = [
    "CheckpointExists",
    "CheckpointNotFound",
    "CodingError",
    "Compressor",
    "ConfigError",
    "CorruptCheckpoint",
    "DSQConfig",
    "DSQError",
    "DSQStorageReader",
    "DSQStorageWriter",
    "LoadFailed",
    "LossyTensor",
    "NonFiniteTensor",
    "SaveFailed",
    "UnsupportedFormat",
    "__version__",
    "async_save",
    "compress",
    "decode",
    "describe",
    "forget",
    "latest",
    "load",
    "merge",
    "save",
]
