"""Causes of errors that torch has wrapped, for exports."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException


def find_cause(error: BaseException) -> BaseException:
    """Return the error in DCP's wrapper, or the OSError that caused it.

    On a full disk, torch's zip writer raises an error about an unexpected position, caused by the OSError.
    """
    if isinstance(error, CheckpointException):
        error = next((failure for failure, _ in error.failures.values()), error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error
