"""Steps of a save or a load that DCP calls and whose errors it sends to the other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dsq_ckpt.core.interrupts import hold_signals
from dsq_ckpt.errors import DSQError, described


@contextmanager
def dcp_step(error_type: type[DSQError]) -> Iterator[None]:
    """Hold signals, and replace an exception that cannot be pickled, such as that of a signal handler.

    DCP pickles the exception for the other ranks, which would wait forever if that failed.

    Args:
        error_type: type of the replacement.
    """
    try:
        with hold_signals():
            yield
    except BaseException as error:
        if not (dist.is_available() and dist.is_initialized()) or _is_picklable(error):
            raise
        raise error_type(described(error)) from error


def _is_picklable(error: BaseException) -> bool:
    try:
        return isinstance(pickle.loads(pickle.dumps(error)), BaseException)
    except Exception:  # a local class, or a constructor with other arguments than the text
        return False
