"""Gloo's side of process groups, kept for some seconds after its last use, whoever else drops it.

The thread of gloo that ran a collective signals its end before it frees the tensors, and needs the interpreter's lock
for that. DDP's reducer, if it is the last to hold the group, waits for that thread while it has the lock: a process
whose training ends just after a save hangs (seen with torch 2.13). A reference of Python's, if it is the last,
gives the lock back before it waits.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

_SECONDS = 60.0
"""From the last of our collectives past DCP's own last one; much longer, and other ranks see no end of the group."""

_lock = threading.Lock()
_kept: dict[Any, float] = {}  # backends, and until when
_timer: threading.Timer | None = None


def keep(group: dist.ProcessGroup) -> None:
    """Keep gloo's side of a group, if it has one; a thread in the background lets it go."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none for the CPU
        return
    if backend.name() != "gloo":
        return
    with _lock:
        _kept[backend] = time.monotonic() + _SECONDS
        _start(_SECONDS)


def _start(seconds: float) -> None:
    """Have a timer; where the system allows no more threads, the next save starts one."""
    global _timer
    if _timer is None:
        timer = threading.Timer(seconds, _expire)
        timer.daemon = True
        with suppress(RuntimeError):
            timer.start()
            _timer = timer


def _expire() -> None:
    global _timer
    now = time.monotonic()
    with _lock:
        gone = [backend for backend, until in _kept.items() if until <= now]
        for backend in gone:
            del _kept[backend]
        _timer = None
        if _kept:
            _start(min(_kept.values()) - now)
    gone.clear()  # not while others wait for the lock: it may take until gloo's threads have ended


def _release() -> None:
    """Let all go while there is an interpreter; the threads of gloo that need one would abort the process later."""
    with _lock:
        gone = list(_kept)
        _kept.clear()
    gone.clear()


def _forked() -> None:
    """Leave the backends of the parent for good: a fork has none of their threads, for which it would wait."""
    global _lock, _timer
    for backend in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
    _kept.clear()
    _lock, _timer = threading.Lock(), None


atexit.register(_release)
os.register_at_fork(after_in_child=_forked)
