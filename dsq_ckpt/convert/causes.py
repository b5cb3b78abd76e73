"""The error of an export that a user is told, below those that torch wraps it in."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException


def cause_of(error: BaseException) -> BaseException:
    """Return the error for the user: the one in DCP's wrapper, or an operating system's error that caused it.

    On a full disk torch's zip writer raises an error about an unexpected position, caused by the OSError.
    """
    if isinstance(error, CheckpointException):
        error = next((failure for failure, _ in error.failures.values()), error)
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return error
