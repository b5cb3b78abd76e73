"""Requests for manifests on an object store: one for each manifest while a step is done, since each takes a while."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage.backend import get_storage


class _Kept(threading.local):
    """Manifests that a thread has read in the current block; None outside of one."""

    texts: dict[Path, bytes] | None = None
    change: int = 0
    """Value of `_change` when they were read."""


_kept = _Kept()
_changes = itertools.count(1)
_change = 0
"""Number of the last change of a manifest by any thread of this process."""


def _reset_after_fork() -> None:
    """End the block in a child, which does not return from it."""
    _kept.texts = None


os.register_at_fork(after_in_child=_reset_after_fork)


@contextmanager
def one_request_each() -> Iterator[None]:
    """Read each manifest of an object store once in this block, in this thread; those that are missing, each time."""
    if _kept.texts is not None:  # within another block
        yield
        return
    _kept.texts = {}
    try:
        yield
    finally:
        _kept.texts = None


def forget() -> None:
    """Read manifests anew, such as to see whether another process has changed one."""
    if _kept.texts is not None:
        _kept.texts.clear()


def forget_on_all_threads() -> None:
    """Read manifests anew on all threads of this process, which has changed one."""
    global _change
    _change = next(_changes)


def read_manifest_text(path: Path, limit: int) -> bytes:
    """Return the bytes of a manifest; see `Storage.read`."""
    if _kept.texts is None or not is_remote(path):
        return get_storage(path).read(path, limit)
    if _kept.change != _change:
        _kept.texts.clear()
        _kept.change = _change  # before the read, during which there may be another change
    if path not in _kept.texts:
        _kept.texts[path] = get_storage(path).read(path, limit)
    return _kept.texts[path]
