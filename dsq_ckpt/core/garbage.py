"""Python's collector of cyclic garbage, which a save or an import gives much to walk and nothing to free."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector of cyclic garbage for all threads; leave it off where it is off.

    A save makes tens of thousands of objects, which reference counts free at its end. Young as they are, they make the
    collector walk all objects of the process, modules of torch included, every few saves: a quarter of a second. Only
    the thread that trains may pause it, around what is short and calls no code of the user.
    """
    global _paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _paused = True
    try:
        yield
    finally:
        _paused = False
        gc.enable()


def _forked() -> None:
    if _paused:  # a thread forked, such as a data loader's; the one that saves is not in the child
        gc.enable()


os.register_at_fork(after_in_child=_forked)
