"""Conversion of DCP's errors and warnings into those that users of `save` and `load` see."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dsq_ckpt.core.interrupts import get_handler_error
from dsq_ckpt.distributed.comm import RemoteFailure
from dsq_ckpt.errors import DSQError, SaveFailed, described


class _SingleProcessFilter(threading.local):
    """Warning filter for DCP's warning about a single process, for one thread or for all threads.

    `warnings.catch_warnings` would reset the registry of warnings that Python shows once, so that they would repeat
    after each save. It has the attributes of a compiled pattern, for code that copies filters, as to other processes.
    """

    pattern = "torch.distributed is disabled, unavailable or uninitialized"
    in_this_thread = False
    in_all_threads = False

    def match(self, text: str) -> bool:
        """Return whether to ignore a text; the `warnings` module calls it as the method of a pattern."""
        silent = self.in_this_thread or _SingleProcessFilter.in_all_threads
        return silent and text.startswith(self.pattern)

    def __reduce__(self) -> str:
        return "_single_process_filter"

    def ignore(self, in_all_threads: bool) -> None:
        """Ignore the warning from now on, with precedence over filters that were added since."""
        self.in_this_thread = True
        _SingleProcessFilter.in_all_threads |= in_all_threads
        filters: list[Any] = warnings.filters  # type: ignore[assignment]
        if not any(entry[1] is self for entry in filters[:1]):
            filters.insert(0, ("ignore", self, Warning, None, 0))


_single_process_filter = _SingleProcessFilter()


@contextmanager
def unwrap_dcp_errors(
    error_type: type[DSQError], own_rank: int, undo: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Raise the error of the lowest rank that failed in place of DCP's `CheckpointException`, which is its cause.

    `CheckpointException` is a `BaseException`, so `except Exception` around a save would miss it. A `BaseException`
    such as KeyboardInterrupt is raised unchanged on its own rank.

    Args:
        error_type: class of the error that replaces an exception of another package.
        own_rank: this process's rank.
        undo: called on all ranks before the error is raised.
    """
    try:
        yield
    except CheckpointException as bundle:
        undo()
        raise unwrap_dcp_error(bundle, error_type, own_rank) from bundle
    except RuntimeError as error:  # a collective failed, between the steps whose errors DCP gathers
        if not (dist.is_available() and dist.is_initialized()):
            raise
        raise error_type(
            f"rank {dist.get_rank()}: {type(error).__name__}: {error}; if it could not reach another rank, that one or "
            "its host is gone"
        ) from error


def unwrap_dcp_error(bundle: CheckpointException, error_type: type[DSQError], own_rank: int | None) -> BaseException:
    """Return the error of the lowest rank that failed itself, with the rank in its message."""
    failures = {rank: failure[0] for rank, failure in bundle.failures.items()}
    own_failure = None if own_rank is None else failures.get(own_rank)
    if own_failure is not None and not isinstance(own_failure, Exception):
        return own_failure
    causes = {rank: error for rank, error in failures.items() if not isinstance(error, RemoteFailure)}
    rank, error = min((causes or failures).items(), key=lambda pair: pair[0])
    prefix = f"rank {rank}: " if dist.is_available() and dist.is_initialized() else ""
    if isinstance(error, DSQError):
        return type(error)(f"{prefix}{error}")
    return error_type(prefix + described(error))


@contextmanager
def explain_exit() -> Iterator[None]:
    """Raise an error with an explanation if no thread can be started since the interpreter is exiting.

    Raises:
        SaveFailed: it is exiting.
    """
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
def no_single_process_warning(no_dist: bool) -> Iterator[None]:
    """Silence DCP's warning about a single process in the block, if `no_dist`."""
    if not no_dist:
        yield
        return
    _single_process_filter.ignore(False)
    try:
        yield
    finally:
        _single_process_filter.in_this_thread = False


@contextmanager
def no_dcp_traceback() -> Iterator[None]:
    """Keep DCP from logging the traceback of a `DSQError` or of an error of a signal handler: the caller gets it."""

    def passes(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None  # exc_info may be False
        is_known = isinstance(error, DSQError) or (error is not None and error is get_handler_error())
        return not (is_known and record.module == "state_dict_loader")

    root = logging.getLogger()  # DCP's module uses the root logger
    root.addFilter(passes)
    try:
        yield
    finally:
        root.removeFilter(passes)


def silence_single_process_warning() -> None:
    """Silence DCP's warning about a single process until the process ends, since DCP's own threads emit it."""
    _single_process_filter.ignore(True)
