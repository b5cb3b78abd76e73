"""Numba's compiler for kernels; machine code is cached in files if a directory for them is writable."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher, cpu_target

from dsq_ckpt.core.collector import no_garbage_collection

KERNELS: list[Dispatcher] = []
"""All kernels of the package that were imported."""


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


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a function so that it is compiled when it is first called, and releases the GIL.

    In kernels loops are better than NumPy's sorts, assignments to slices and operations on arrays, each of which takes
    up to a second to compile.

    Args:
        function: the kernel.
        options: options of Numba's `njit`.
    """
    if function is None:
        return lambda decorated: jit(decorated, **options)
    try:
        kernel = njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no cache directory is writable: every process compiles the kernel
        kernel = njit(nogil=True, **options)(function)
    if isinstance(kernel, Dispatcher):  # else NUMBA_DISABLE_JIT is set
        kernel.__class__ = _Kernel
        KERNELS.append(kernel)
        cache_file = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
        if type(cache_file) is IndexDataCacheFile:
            cache_file.__class__ = _TolerantIndex
    return kernel


def count_compilations() -> int:
    """Return the number of kernels that this process compiled instead of reading their machine code from a file."""
    return sum(
        sum(kernel.stats.cache_misses.values()) if kernel.stats.cache_path else len(kernel.signatures)
        for kernel in KERNELS
    )


def cache_directories() -> list[Path]:
    """Return the directories of cached machine code; empty if none is writable."""
    return sorted({Path(kernel.stats.cache_path) for kernel in KERNELS if kernel.stats.cache_path})


def load_registries() -> None:
    """Make Numba load its own functions, as before the first kernel is compiled or read from a file."""
    if KERNELS:  # else NUMBA_DISABLE_JIT is set
        with block_forks(), no_garbage_collection():
            cpu_target.target_context.refresh()


def block_forks() -> AbstractContextManager[Any]:
    """Return a context during which forks and count_compilations of other threads wait."""
    lock: AbstractContextManager[Any] = global_compiler_lock
    return lock


# A fork while another thread compiles would leave the child with locks that no thread releases: of Numba, LLVM and the
# modules that Numba imports as it compiles. So a fork waits until the kernel that is being compiled is done.
os.register_at_fork(
    before=global_compiler_lock.acquire, after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)
