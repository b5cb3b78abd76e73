"""Python's garbage collector paused while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no garbage be collected in a block that imports modules, or fills tables that stay.

    Python looks through all objects of the process whenever their number has grown by a quarter, as it does here after
    `import torch`. For a collector that the program itself has paused nothing changes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
