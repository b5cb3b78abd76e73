"""Reads of ranges of a remote file in windows: a request takes as long as the transfer of a megabyte."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

WINDOW = 1 << 21
"""Bytes of a window; a longer read is a request of its own."""
_MAX_CACHED_BYTES = 1 << 28
"""Bytes of cached windows per process, least recently used first out: a chain is read from many files at once."""


class ReadAheadFile:
    """Remote file open for reads of ranges, by any thread; see `RegularFile`.

    Args:
        size: size of the file in bytes; it must not change.
        fetch: returns the bytes from a start offset to a stop offset, exclusive.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self.size = size
        self._fetch = fetch

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer at the end of the file.

        Raises:
            OSError: they cannot be read.
        """
        stop = min(offset + size, self.size)
        if stop <= offset:
            return b""
        if stop - offset > WINDOW:
            return self._fetch(offset, stop)
        parts = []
        for index in range(offset // WINDOW, -(-stop // WINDOW)):
            start = index * WINDOW
            parts.append(self._read_window(index)[max(offset - start, 0) : stop - start])
        return b"".join(parts)

    def close(self) -> None:
        """Drop the cached windows of the file."""
        with _lock:
            for key in [key for key in _windows if key[0] is self]:
                del _windows[key]

    def _read_window(self, index: int) -> bytes:
        key = self, index
        with _lock:
            cached = _windows.get(key)
            if cached is not None:
                _windows.move_to_end(key)
            else:
                future: Future[bytes] = Future()
                _windows[key] = future
                while len(_windows) * WINDOW > _MAX_CACHED_BYTES:
                    _windows.popitem(last=False)
        if cached is not None:
            return cached.result()
        try:
            data = self._fetch(index * WINDOW, min((index + 1) * WINDOW, self.size))
        except BaseException as error:
            with _lock:
                _windows.pop(key, None)
            future.set_exception(error)
            raise
        future.set_result(data)
        return data


_windows: OrderedDict[tuple[ReadAheadFile, int], Future[bytes]] = OrderedDict()
_lock = threading.Lock()


def _reset_after_fork() -> None:
    """Reset the lock and the cache in a child, which lacks the threads that held or filled them."""
    global _lock
    _lock = threading.Lock()
    _windows.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
