"""Files that the system begins to write to the device while more is being written to them.

Otherwise it begins when the file is flushed, so that a save waits for the device after its work and not beside it.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

_STEP = 1 << 22  # bytes after which the system is asked again
_SYNC_FILE_RANGE_WRITE = 2  # <fcntl.h>: begin to write pages that are not yet being written, and do not wait


def open_new(path: Path, fsync: bool, buffering: int) -> IO[bytes]:
    """Open a new file for binary writing; with `fsync`, the system is asked to write it to the device as it grows.

    Nothing is promised before the file is flushed, and the flush reports all errors.

    Args:
        path: path of the file, which must not exist.
        fsync: whether the file will be flushed to the device.
        buffering: buffer size in bytes; -1: the default.

    Raises:
        OSError: the file cannot be created.
    """
    if not fsync:
        return open(path, "xb", buffering=buffering)
    return io.BufferedWriter(_EagerFile(os.fspath(path), "xb"), io.DEFAULT_BUFFER_SIZE if buffering < 0 else buffering)


class _EagerFile(io.FileIO):
    """File that asks the system to write each `_STEP` bytes to the device, as soon as they are in it."""

    _asked = 0
    """Bytes up to which the system was asked to write."""

    def write(self, data: Any) -> int:
        """Write bytes as `io.FileIO` does."""
        count = super().write(data)
        if (size := self.tell()) - self._asked >= _STEP:
            start_writeback(self.fileno(), self._asked, size - self._asked)
            self._asked = size
        return count


def start_writeback(descriptor: int, offset: int, size: int) -> bool:
    """Ask the system to begin to write a part of a file to the device; return False where it cannot."""
    function = _sync_file_range()
    return function is not None and function(descriptor, offset, size, _SYNC_FILE_RANGE_WRITE) == 0


@functools.cache  # a library that is opened again has classes of its own, which only the garbage collector frees
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system's function; None where there is none."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    return function
