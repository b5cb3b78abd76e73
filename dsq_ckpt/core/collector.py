"""Pauses of Python's garbage collector while many objects are created that are no garbage for it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector in a block of the main thread that imports, fills tables, saves or loads.

    Python traverses all objects of the process whenever their number has grown by a quarter, as it would after
    `import torch`, and in a save of hundreds of tensors, all of whose objects are freed by their reference counts
    when it ends. A collector that the program has disabled before, or in `garbage_collection_of_program`, stays
    disabled. In other threads this does nothing, since their pauses and those of the program would end each other.
    """
    global _paused
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        _paused = True
        gc.disable()
        yield
    finally:
        if _paused:
            _paused = False
            gc.enable()


@contextmanager
def garbage_collection_of_program() -> Iterator[None]:
    """Interrupt the pause of `no_garbage_collection` for a function of the user, which may take long."""
    global _paused
    if not _paused or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        _paused = False
        gc.enable()
        yield
    finally:
        _paused = gc.isenabled()
        gc.disable()


def _resume_in_child() -> None:
    """End a pause in a child that was forked during it, perhaps by another thread, so that it would not end there."""
    global _paused
    if _paused:
        _paused = False
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
