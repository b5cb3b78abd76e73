"""Autocast of the caller's thread, which a save may run in, switched off while values are read for themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def no_autocast() -> Iterator[None]:
    """Compute in the dtypes that tensors have; for a block of code, or as a decorator.

    Autocast rounds products of matrices to its dtype, so that the same weights would be told apart otherwise inside
    of it, and refuses to join halves of a dtype that is not its own.
    """
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
