"""Python's garbage collector paused while much is made that stays."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let no garbage be collected in a block of the main thread that imports modules, or fills tables that stay.

    Python looks through all objects of the process whenever their number has grown by a quarter, as it does here after
    `import torch`. A collector that the program itself has paused before stays so. Other threads pause nothing: their
    pauses and the program's own would end each other.
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
        _paused = False
        gc.enable()


def _resume_in_child() -> None:
    """Let a child collect that was forked by another thread during a pause, which nothing would end there."""
    if _paused:
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
