"""Kernels in Numba, which is imported when the first of them is called.

Its import, its registries and the machine code that it reads from files take half a second, and saves and loads with
the compiled library (`native`) call no kernel.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import update_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any

_KERNELS: list[Kernel] = []
_import_lock = threading.RLock()
_imported: ModuleType | None = None  # the module that imports Numba


class Kernel:
    """Function that Numba compiles when it is first called.

    Args:
        function: the kernel. Kernels that it calls are global names of its module, or of a module that is one.
        options: options of Numba's `njit`.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self._compiled: Any = None
        update_wrapper(self, function)
        _KERNELS.append(self)

    def __call__(self, *args: Any) -> Any:
        """Call the compiled kernel."""
        return (self.compiled() if self._compiled is None else self._compiled)(*args)

    def compiled(self) -> Any:
        """Return Numba's function. It takes the place of this object among the names of the module, and so do those of
        the kernels that it calls, as Numba calls nothing else.
        """
        if self._compiled is not None:  # others need not wait while a thread compiles
            return self._compiled
        compiler = _compiler()
        with compiler.global_compiler_lock:
            if self._compiled is None:
                own, names = self._function.__name__, self._function.__globals__
                used = self._function.__code__.co_names
                modules = [names[name] for name in used if isinstance(names.get(name), ModuleType)]
                for place in (names, *(module.__dict__ for module in modules)):
                    for name in used:
                        if isinstance(kernel := place.get(name), Kernel) and kernel is not self:
                            place[name] = kernel.compiled()
                self._compiled = compiler.make(self._function, self._options)
                if names.get(own) is self:
                    names[own] = self._compiled
        return self._compiled


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a function so that it is compiled when it is first called, and releases the GIL.

    In kernels loops are better than NumPy's sorts, assignments to slices and operations on arrays, each of which takes
    up to a second to compile.

    Args:
        function: the kernel.
        options: options of Numba's `njit`.
    """
    if function is None:
        return lambda decorated: Kernel(decorated, options)
    return Kernel(function, options)


def _compiler() -> ModuleType:
    """Return the module that imports Numba; a fork waits, since a child would not release the locks of imports.

    Raises:
        ModuleNotFoundError: Numba is missing.
    """
    global _imported
    if _imported is None:  # a thread that compiles never waits for the lock, so a fork may take it first
        with _import_lock:
            try:
                from dsq_ckpt.kernels import compiler
            except ModuleNotFoundError as error:
                if str(error.name).partition(".")[0] not in ("numba", "llvmlite"):
                    raise
                raise ModuleNotFoundError(
                    "Numba is missing, which does what the compiled library does not, and all of it without that "
                    "library: pip install numba", name=error.name,
                ) from error
            _imported = compiler
    return _imported


def count_compilations() -> int:
    """Return the number of kernels that this process compiled instead of reading their machine code from a file."""
    return _compiler().count_compilations() if any(kernel._compiled is not None for kernel in _KERNELS) else 0


def dispatchers() -> list[Any]:
    """Return Numba's functions of all kernels that were imported; empty if NUMBA_DISABLE_JIT is set."""
    for kernel in _KERNELS:
        kernel.compiled()
    kernels: list[Any] = _compiler().KERNELS
    return kernels


def cache_directories() -> list[Path]:
    """Return the directories of cached machine code; empty if none is writable."""
    return sorted({Path(kernel.stats.cache_path) for kernel in dispatchers() if kernel.stats.cache_path})


def load_registries() -> None:
    """Make Numba load its own functions, as before the first kernel is compiled or read from a file."""
    _compiler().load_registries()


def block_forks() -> AbstractContextManager[Any]:
    """Return a context during which forks and count_compilations of other threads wait."""
    lock: AbstractContextManager[Any] = _compiler().global_compiler_lock
    return lock


def _lock_before_fork() -> None:
    _import_lock.acquire()
    if _imported is not None:
        _imported.global_compiler_lock.acquire()


def _unlock_after_fork() -> None:
    if _imported is not None:
        _imported.global_compiler_lock.release()
    _import_lock.release()


# A fork while another thread imports Numba or compiles would leave the child with locks that no thread releases: of
# Numba, LLVM and the modules that Numba imports as it compiles. So a fork waits until the import is done, and the
# kernel that is being compiled. One function takes both locks, as what `compiler` registered while a fork waits would
# come too late for it.
os.register_at_fork(before=_lock_before_fork, after_in_parent=_unlock_after_fork, after_in_child=_unlock_after_fork)
