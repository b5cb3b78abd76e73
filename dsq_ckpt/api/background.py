"""The asynchronous save of this process that is under way, and the process groups that such saves run on."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from dsq_ckpt.distributed.comm import timeout_of
from dsq_ckpt.errors import described

logger = logging.getLogger(__name__)

_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_world: dist.ProcessGroup | None = None
_future: Future[Any] | None = None
_inherited: list[Any] = []  # a group that is freed in a forked child waits for threads that are not there


def _forked() -> None:
    """In a child: the save under way is its parent's, whose thread is not here to end it."""
    global _future, _groups, _world
    _inherited.append((_groups, _world))
    _future, _groups, _world = None, {}, None


os.register_at_fork(after_in_child=_forked)


def group(like: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group of its own for the saving thread, over the ranks of `like`; collective when new."""
    global _world
    if not (dist.is_available() and dist.is_initialized()):
        _groups.clear()
        _world = None
        return None
    if _world is not dist.group.WORLD:  # torch.distributed was ended, and begun again
        _groups.clear()
        _world = dist.group.WORLD
    base = like if like is not None else _world
    assert base is not None
    if base not in _groups:  # ranks outside of `like` do not take part in its making
        ranks = dist.get_process_group_ranks(base)
        _groups[base] = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=like is not None, timeout=timeout_of(base)
        )
    return _groups[base]


def begun(future: Future[Any]) -> None:
    """Take note of a save, which the next one waits for."""
    global _future
    _future = future


def wait() -> None:
    """Wait for the previous save. Its failure is its future's to raise; it is logged too, should nobody ask."""
    global _future
    if _future is not None:
        failure = _future.exception()
        _future = None
        if failure is not None:
            logger.warning("the last asynchronous save failed: %s", described(failure))
