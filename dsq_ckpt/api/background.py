"""The asynchronous save of this process that is under way, and the process groups that such saves run on."""

from __future__ import annotations

import atexit
import logging
import os
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from dsq_ckpt.distributed.beside import group_beside
from dsq_ckpt.distributed.comm import timeout_of
from dsq_ckpt.engine.result import is_telling
from dsq_ckpt.errors import described

logger = logging.getLogger(__name__)

_groups: WeakKeyDictionary[dist.ProcessGroup, ref[dist.ProcessGroup]] = WeakKeyDictionary()
"""The group for saves beside each group of the training. torch.distributed alone keeps them alive, until it is ended: a
reference from here would leave their threads running, and one that frees a tensor while Python exits aborts."""
_future: Future[Any] | None = None
_inherited: list[Any] = []  # a group that is freed in a forked child waits for threads that are not there


def _forked() -> None:
    """Reset a child, which lacks the thread of its parent's save in the background."""
    global _future, _groups
    _inherited.append([group() for group in _groups.values()])
    _future, _groups = None, WeakKeyDictionary()


os.register_at_fork(after_in_child=_forked)


def group(like: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group of its own for the saving thread, over the ranks of `like`; collective when new."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    base = like if like is not None else dist.group.WORLD
    assert base is not None
    known = _groups.get(base)
    found = known() if known is not None else None
    if found is None:  # ranks outside of `like` do not take part in its making
        found = group_beside(like, timeout_of(base))
        _groups[base] = ref(found)
    return found


def begun(future: Future[Any]) -> None:
    """Take note of a save, which the next one waits for."""
    global _future
    _future = future


def wait() -> None:
    """Wait for the previous save. Its failure is its future's to raise; it is logged too, should nobody ask."""
    global _future
    if is_telling():  # its own save, which is complete, and would wait for what waits here
        return
    if (pending := _future) is not None:
        failure = pending.exception()
        if _future is pending:  # another thread, such as torchft's, may have waited too, and begun the next
            _future = None
        _tell(failure)


def _tell(failure: BaseException | None) -> None:
    if failure is not None:
        logger.warning("the last asynchronous save failed: %s", described(failure))


def _at_exit() -> None:
    """Tell of the last save, which no other one waited for; the interpreter has waited for its thread."""
    if _future is not None and _future.done():
        _tell(_future.exception())


atexit.register(_at_exit)
