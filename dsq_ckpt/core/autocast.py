"""Disabling of autocast in the caller's thread, in which a save may run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def no_autocast() -> Iterator[None]:
    """Disable autocast; a context manager or decorator.

    Autocast rounds matrix products to its dtype, so that results for the same weights would differ inside of it, and
    raises an error when tensors of another 16-bit dtype are concatenated.
    """
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
