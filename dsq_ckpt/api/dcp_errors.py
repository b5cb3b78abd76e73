"""Errors and warnings of DCP's functions, as users of `save` and `load` see them."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dsq_ckpt.core.interrupts import raised_by_handler
from dsq_ckpt.distributed.comm import Elsewhere
from dsq_ckpt.errors import DSQError, SaveFailed, described


class _Alone(threading.local):
    """A filter of DCP's warning about a single process: in this thread while `here`, in all once `everywhere`.

    `warnings.catch_warnings` would let all warnings that Python gives once come again after each save. Others that copy
    filters, as to processes, find a pattern in it.
    """

    pattern = "torch.distributed is disabled, unavailable or uninitialized"
    here = False
    everywhere = False

    def match(self, text: str) -> bool:
        """Return whether a text is to be ignored; `warnings` calls it in place of a pattern's method."""
        silent = self.here or _Alone.everywhere
        return silent and text.startswith(self.pattern)

    def __reduce__(self) -> str:
        return "_alone"

    def ignore(self, everywhere: bool) -> None:
        """Ignore that warning from now on, whatever filters were set meanwhile."""
        self.here = True
        _Alone.everywhere |= everywhere
        filters: list[Any] = warnings.filters  # type: ignore[assignment]
        if not any(one[1] is self for one in filters[:1]):
            filters.insert(0, ("ignore", self, Warning, None, 0))


_alone = _Alone()


@contextmanager
def plain_errors(
    otherwise: type[DSQError], own_rank: int, undo: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Raise the error of the first rank that failed, in place of DCP's `CheckpointException`, which stays the cause.

    `CheckpointException` is not an `Exception`, so `except Exception` around a save would miss it. An exception that
    is no `Exception`, such as KeyboardInterrupt, is raised unchanged on its own rank.

    Args:
        otherwise: class of the error that replaces an exception of another package.
        own_rank: this process's rank.
        undo: called before the error is raised, when all ranks have failed.
    """
    try:
        yield
    except CheckpointException as bundle:
        undo()
        raise plain_error(bundle, otherwise, own_rank) from bundle
    except RuntimeError as error:  # of a collective, between the steps whose errors DCP bundles
        if not (dist.is_available() and dist.is_initialized()):
            raise
        raise otherwise(
            f"rank {dist.get_rank()}: {type(error).__name__}: {error}; if it could not reach another rank, that one or "
            "its host is gone"
        ) from error


def plain_error(bundle: CheckpointException, otherwise: type[DSQError], own_rank: int | None) -> BaseException:
    """Return the error for the user: that of the lowest rank that failed by itself, with the rank in its message."""
    failures = {rank: failure[0] for rank, failure in bundle.failures.items()}
    mine = None if own_rank is None else failures.get(own_rank)
    if mine is not None and not isinstance(mine, Exception):
        return mine
    own = {rank: error for rank, error in failures.items() if not isinstance(error, Elsewhere)}
    rank, error = min((own or failures).items(), key=lambda pair: pair[0])
    prefix = f"rank {rank}: " if dist.is_available() and dist.is_initialized() else ""
    if isinstance(error, DSQError):
        return type(error)(f"{prefix}{error}")
    return otherwise(prefix + described(error))


@contextmanager
def explain_exit() -> Iterator[None]:
    """Raise an error that says why no thread can be started, as in a function of `atexit`."""
    try:
        yield
    except RuntimeError as error:
        if "cannot schedule new futures" not in str(error) and "at interpreter shutdown" not in str(error):
            raise
        raise SaveFailed(
            "the interpreter is exiting, and begins nothing in the background any more: call dsq_ckpt.save here, which "
            "saves before it returns"
        ) from error


@contextmanager
def without_warning(no_dist: bool) -> Iterator[None]:
    """Silence DCP's warning about a single process if `no_dist` was asked for."""
    if not no_dist:
        yield
        return
    _alone.ignore(False)
    try:
        yield
    finally:
        _alone.here = False


@contextmanager
def without_traceback() -> Iterator[None]:
    """Keep DCP from printing the traceback of an error that the caller gets: one of this package, or of a handler."""

    def passes(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None  # False where a caller gave False
        known = isinstance(error, DSQError) or (error is not None and error is raised_by_handler())
        return not (known and record.module == "state_dict_loader")

    root = logging.getLogger()  # by which that module logs
    root.addFilter(passes)
    try:
        yield
    finally:
        root.removeFilter(passes)


def silence() -> None:
    """Silence DCP's warning about a single process until the process ends, for saves in threads of DCP."""
    _alone.ignore(True)
