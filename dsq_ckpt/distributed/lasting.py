"""Gloo's side of process groups, which outlives Python's last reference to a group by a moment.

The thread of gloo that ran a collective signals its end before it frees the tensors, and needs the interpreter's lock
for that. DDP's reducer, if it is the last to hold the group, waits for that thread while it has the lock: a process
whose training ends just after a save hangs (seen with torch 2.13). A reference of Python's, if it is the last, gives
the lock back before it waits.
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

_SECONDS = 2.0
"""That gloo's thread may wait for a processor and the lock; as long, other ranks do not see that the group is gone."""

_known: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_ended: list[Any] = []
"""Backends of groups that Python has dropped, the oldest first."""
_letting_go = threading.Lock()
"""Held while a backend goes: a thread that waits for gloo's while the interpreter exits would abort the process."""


def keep(group: dist.ProcessGroup) -> None:
    """Let gloo's side of a group, if it has one, outlive the group by a moment."""
    if group in _known:
        return
    _known.add(group)
    with suppress(Exception):  # it has no backend for the CPU, or none of torch's
        backend = group._get_backend(torch.device("cpu"))
        if backend.name() == "gloo":
            weakref.finalize(group, _end, backend, os.getpid()).atexit = False


def _end(backend: Any, process: int) -> None:
    """Hold a backend for a moment; called when its group is dropped."""
    if process != os.getpid():
        _leave(backend)
        return
    _ended.append(backend)
    timer = threading.Timer(_SECONDS, _let_go)
    timer.daemon = True
    with suppress(RuntimeError):  # no more threads: it goes with the next one, or when the process ends
        timer.start()


def _let_go() -> None:
    """Drop the oldest backend."""
    with _letting_go, suppress(IndexError):  # at the end of the process
        _ended.pop(0)


def _let_all_go() -> None:
    """Drop all backends at the end of the process, and wait for one that another thread drops."""
    with _letting_go:
        _ended.clear()


def _leave(backend: Any) -> None:
    """Leave a backend of the parent for good: a fork has none of its threads, for which it would wait."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def _forked() -> None:
    global _letting_go
    _letting_go = threading.Lock()
    for backend in _ended:
        _leave(backend)
    _ended.clear()


atexit.register(_let_all_go)  # gloo's threads that need an interpreter would abort the process later
os.register_at_fork(after_in_child=_forked)
