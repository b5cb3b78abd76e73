"""Numba's compiler for kernels; machine code is cached in files if a directory for them is writable.

`jit` imports this module, and Numba with it, when the first kernel is called.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba import config, njit, types
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher, cpu_target

from dsq_ckpt.core.collector import no_garbage_collection

KERNELS: list[Dispatcher] = []
"""All kernels of the package that were made."""


class _Kernel(CPUDispatcher):
    """Kernel that is compiled once for all values of an integer argument.

    Where one kernel calls another with a literal, Numba would compile it for this value too: a sixth of the time.
    """

    def get_call_template(self, args: Any, kws: Any) -> Any:
        named = {name: types.unliteral(argument) for name, argument in dict(kws).items()}
        return super().get_call_template(tuple(types.unliteral(argument) for argument in args), named)


class _TolerantIndex(IndexDataCacheFile):
    """Index of cached machine code that counts as empty if it cannot be read.

    Numba unpickles the signatures in an index before it compares the source's time stamp. An index of an older version
    of this package may name classes that are gone, and then every call of the kernel would fail.
    """

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception:
            return {}


def make(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Return Numba's function, which is compiled when it is first called, and releases the GIL.

    Args:
        function: the kernel.
        options: options of Numba's `njit`.
    """
    try:
        kernel = njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no cache directory is writable: every process compiles the kernel
        kernel = njit(nogil=True, **options)(function)
    if isinstance(kernel, Dispatcher):  # else NUMBA_DISABLE_JIT is set
        with suppress(OSError):
            _copy_shipped_cache(kernel)
        kernel.__class__ = _Kernel
        KERNELS.append(kernel)
        cache_file = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
        if type(cache_file) is IndexDataCacheFile:
            cache_file.__class__ = _TolerantIndex
    return kernel


def _copy_shipped_cache(kernel: Dispatcher) -> None:
    """Copy machine code shipped beside a read-only package to this user's cache.

    Numba reads only caches that it can write, so it would compile again the kernels that an image was built with.
    """
    source, directory = Path(kernel.py_func.__code__.co_filename), kernel.stats.cache_path
    shipped = source.parent / "__pycache__"
    if not directory or shipped == Path(directory) or os.access(shipped, os.W_OK):
        return
    for file in shipped.glob(f"{source.stem}.{kernel.py_func.__qualname__}-*.nb[ci]"):
        target = Path(directory) / file.name
        if not target.exists():
            copy = target.with_name(f".{file.name}.{os.getpid()}")
            try:
                shutil.copyfile(file, copy)
                copy.replace(target)  # so that no other process reads a part of it
            finally:
                copy.unlink(missing_ok=True)


def count_compilations() -> int:
    """Return the number of kernels that this process compiled instead of reading their machine code from a file."""
    return sum(
        sum(kernel.stats.cache_misses.values()) if kernel.stats.cache_path else len(kernel.signatures)
        for kernel in KERNELS
    )


def load_registries() -> None:
    """Make Numba load its own functions, as before the first kernel is compiled or read from a file."""
    if not getattr(config, "DISABLE_JIT", False):
        with global_compiler_lock, no_garbage_collection():
            cpu_target.target_context.refresh()
