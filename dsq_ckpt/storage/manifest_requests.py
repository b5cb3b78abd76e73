"""Requests for manifests on an object store: one for each manifest while a step is done, since each takes a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage.backend import get_storage


class _Kept(threading.local):
    """Manifests that a thread has read in the current block; None outside of one."""

    texts: dict[Path, bytes] | None = None


_kept = _Kept()


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


def read_manifest_text(path: Path, limit: int) -> bytes:
    """Return the bytes of a manifest; see `Storage.read`."""
    if _kept.texts is None or not is_remote(path):
        return get_storage(path).read(path, limit)
    if path not in _kept.texts:
        _kept.texts[path] = get_storage(path).read(path, limit)
    return _kept.texts[path]
