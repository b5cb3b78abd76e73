"""Steps of a save or a load that DCP calls, and whose errors it sends to the other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dsq_ckpt.core.interrupts import hold_signals
from dsq_ckpt.errors import DSQError, described


@contextmanager
def step_of_dcp(otherwise: type[DSQError]) -> Iterator[None]:
    """Hold signals, and raise `otherwise` in place of what cannot be sent, as of a handler's own class.

    DCP pickles what is raised here, and the other ranks would wait for one that fails at that.
    """
    try:
        with hold_signals():
            yield
    except BaseException as error:
        if not (dist.is_available() and dist.is_initialized()) or _sendable(error):
            raise
        raise otherwise(described(error)) from error


def _sendable(error: BaseException) -> bool:
    try:
        return isinstance(pickle.loads(pickle.dumps(error)), BaseException)
    except Exception:  # a class in a function, or one that takes other arguments than its text
        return False
