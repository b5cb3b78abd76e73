"""The pending asynchronous save of this process, and the process groups of asynchronous saves."""

from __future__ import annotations

import atexit
import logging
import os
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from dsq_ckpt.distributed.comm import get_group_timeout
from dsq_ckpt.distributed.gloo_groups import new_gloo_group
from dsq_ckpt.engine.result import is_in_on_save
from dsq_ckpt.errors import described

logger = logging.getLogger(__name__)

_groups: WeakKeyDictionary[dist.ProcessGroup, ref[dist.ProcessGroup]] = WeakKeyDictionary()
"""Group for saves, by group of the training. The references are weak, so that `destroy_process_group` ends the threads
of these groups: a thread that frees a tensor while Python exits aborts the process."""
_pending: Future[Any] | None = None
_inherited: list[Any] = []  # keeps groups alive in a forked child: freeing one waits for threads of the parent


def _reset_after_fork() -> None:
    """Reset a forked child, which does not have the thread of its parent's pending save."""
    global _pending, _groups
    _inherited.append([reference() for reference in _groups.values()])
    _pending, _groups = None, WeakKeyDictionary()


os.register_at_fork(after_in_child=_reset_after_fork)


def get_group(like: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a separate gloo group for the saving thread, over the ranks of `like`; collective when it is new."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    base = like if like is not None else dist.group.WORLD
    assert base is not None
    reference = _groups.get(base)
    group = reference() if reference is not None else None
    if group is None:  # ranks outside of `like` do not take part in its creation
        group = new_gloo_group(like, get_group_timeout(base))
        _groups[base] = ref(group)
    return group


def set_pending(future: Future[Any]) -> None:
    """Set the pending save, for which the next save waits."""
    global _pending
    _pending = future


def wait() -> None:
    """Wait for the pending save. Its future raises its error; the error is logged too, in case nobody reads it."""
    global _pending
    if is_in_on_save():  # called by `on_save` of the pending save itself: waiting for it would be a deadlock
        return
    if (pending := _pending) is not None:
        failure = pending.exception()
        if _pending is pending:  # another thread, such as torchft's, may have waited too and started the next save
            _pending = None
        _log_failure(failure)


def _log_failure(failure: BaseException | None) -> None:
    if failure is not None:
        logger.warning("the last asynchronous save failed: %s", described(failure))


def _log_last_failure() -> None:
    """Log a failure of the last save, for which no other save waited; the interpreter has joined its thread."""
    if _pending is not None and _pending.done():
        _log_failure(_pending.exception())


atexit.register(_log_last_failure)
