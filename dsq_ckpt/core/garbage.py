"""Python's collector of cyclic garbage, which a save or an import gives much to walk and nothing to free."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector of cyclic garbage for all threads; leave it off where it is off.

    A save makes tens of thousands of objects, which reference counts free at its end. Young as they are, they make the
    collector walk all objects of the process, modules of torch included, every few saves: a quarter of a second. Only
    the thread that trains may pause it, around what is short and calls no code of the user.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
