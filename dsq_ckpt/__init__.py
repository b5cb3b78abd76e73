"""Compressed training checkpoints for PyTorch.

    import dsq_ckpt
    dsq_ckpt.save(state_dict, "run/step-000500")
    dsq_ckpt.load(state_dict, "run/step-000500")

`DSQStorageWriter` and `DSQStorageReader` are arguments of `torch.distributed.checkpoint`'s own functions. Modules are
imported when something of them is first asked for, so that the command line need not wait for torch.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dsq_ckpt.core.collector import no_garbage_collection
from dsq_ckpt.version import __version__

if TYPE_CHECKING:
    from dsq_ckpt.api.compressor import Compressor
    from dsq_ckpt.api.exploring import Tradeoff, explore
    from dsq_ckpt.api.loading import load
    from dsq_ckpt.api.oneshot import compress
    from dsq_ckpt.api.saving import async_save, save
    from dsq_ckpt.config.schema import DSQConfig
    from dsq_ckpt.dcp import DSQStorageReader, DSQStorageWriter
    from dsq_ckpt.engine.chain import latest
    from dsq_ckpt.engine.history import SaveHistory
    from dsq_ckpt.engine.merging import merge
    from dsq_ckpt.engine.result import SaveResult
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
        NotLocal,
        SaveFailed,
        UnsupportedFormat,
    )
    from dsq_ckpt.storage.description import describe
    from dsq_ckpt.storage.pickle_refs import decode

_MODULES = {
    "api.loading": ("load",),
    "api.saving": ("async_save", "save"),
    "engine.chain": ("latest",),
    "api.compressor": ("Compressor",),
    "config.schema": ("DSQConfig",),
    "dcp": ("DSQStorageReader", "DSQStorageWriter"),
    "storage.description": ("describe",),
    "errors": (
        "CheckpointExists", "CheckpointNotFound", "CodingError", "ConfigError", "CorruptCheckpoint", "DSQError",
        "LoadFailed", "LossyTensor", "NonFiniteTensor", "NotLocal", "SaveFailed", "UnsupportedFormat",
    ),
    "engine.merging": ("merge",),
    "api.exploring": ("Tradeoff", "explore"),
    "api.oneshot": ("compress",),
    "engine.history": ("SaveHistory",),
    "engine.result": ("SaveResult",),
    "storage.pickle_refs": ("decode",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, when it is first asked for."""
    if name in _MODULE_OF:
        with no_garbage_collection():
            value = getattr(importlib.import_module(f"dsq_ckpt.{_MODULE_OF[name]}"), name)
    elif not name.startswith("_") and find_spec(f"dsq_ckpt.{name}") is not None:
        value = importlib.import_module(f"dsq_ckpt.{name}")
    else:
        raise AttributeError(f"module 'dsq_ckpt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names and the modules of the package, whether they are imported already or not."""
    from pkgutil import iter_modules

    modules = {module.name for module in iter_modules(__path__) if not module.name.startswith("_")}
    return sorted({*__all__, *modules} - {"triton_kernels"})  # needs Triton, which not every installation has


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
    "NotLocal",
    "SaveFailed",
    "SaveHistory",
    "SaveResult",
    "Tradeoff",
    "UnsupportedFormat",
    "__version__",
    "async_save",
    "compress",
    "decode",
    "describe",
    "explore",
    "latest",
    "load",
    "merge",
    "save",
]
