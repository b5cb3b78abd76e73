"""Extended lifetime of gloo backends beyond the last Python reference to their process group.

The gloo thread that ran a collective signals completion before it frees the tensors, for which it needs the GIL. If
DDP's reducer holds the last reference to the group, it waits for that thread while it holds the GIL: a process whose
training ends just after a save hangs (seen with torch 2.13). A Python reference, if it is the last, releases the GIL
before it waits.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

_EXTRA_SECONDS = 2.0
"""Time for the gloo thread to get a processor and the GIL; for as long, other ranks do not see the group's end."""

_extended_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_ended_backends: list[Any] = []
"""Backends of groups that Python has dropped, oldest first."""
_release_lock = threading.Lock()
"""Held while a backend is released: a thread that waits for gloo while the interpreter exits aborts the process."""


def extend_lifetime(group: dist.ProcessGroup) -> None:
    """Let the gloo backend of a group, if it has one, outlive the group by `_EXTRA_SECONDS`."""
    if group in _extended_groups:
        return
    _extended_groups.add(group)
    with suppress(Exception):  # no backend for the CPU, or none of torch's
        backend = group._get_backend(torch.device("cpu"))
        if backend.name() == "gloo":
            weakref.finalize(group, _hold_backend, backend, os.getpid()).atexit = False


def _hold_backend(backend: Any, process: int) -> None:
    """Hold a backend for `_EXTRA_SECONDS`; called when its group is dropped."""
    if process != os.getpid():
        _leak(backend)
        return
    _ended_backends.append(backend)
    timer = threading.Timer(_EXTRA_SECONDS, _release_oldest)
    timer.daemon = True
    with suppress(RuntimeError):  # no more threads: it is released with the next one, or at exit
        timer.start()


def _release_oldest() -> None:
    """Release the oldest backend."""
    with _release_lock, suppress(IndexError):  # at the end of the process
        _ended_backends.pop(0)


def _release_all() -> None:
    """Release all backends at exit, after waiting for one that another thread releases."""
    with _release_lock:
        _ended_backends.clear()


def _leak(backend: Any) -> None:
    """Never release a backend of the parent process: its destructor would wait for threads that a fork lacks."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def _reset_after_fork() -> None:
    global _release_lock
    _release_lock = threading.Lock()
    for backend in _ended_backends:
        _leak(backend)
    _ended_backends.clear()


atexit.register(_release_all)  # gloo threads that need the interpreter would abort the process later
os.register_at_fork(after_in_child=_reset_after_fork)
