"""Regular files opened for reading: no special files, which could block, and a limited number of descriptors."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsq_ckpt.core.urls import RemoteError
from dsq_ckpt.errors import CorruptCheckpoint, DSQError, LoadFailed

_MAX_OPEN_FILES = 64
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_EXTERNAL_ERRORS = (
    *_TOO_MANY_FILES, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT,
    errno.EHOSTDOWN,
)
"""Errors whose cause is outside of the file, which may be intact."""


class RegularFile:
    """A file with random read access from any thread.

    Its descriptor is closed when more than 64 files are in use, and opened again when needed: resharding a long chain
    takes more files than a process may have open.

    Attributes:
        path: path of the file.
        size: size in bytes when it was opened.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._users = 0
        with self._acquire() as descriptor:
            self.size = os.fstat(descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer at the end of the file.

        Raises:
            OSError: they cannot be read.
        """
        with self._acquire() as descriptor:
            data = os.pread(descriptor, size, offset)
            while data and len(data) < size:  # the kernel returns at most 2 GiB per call
                chunk = os.pread(descriptor, size - len(data), offset + len(data))
                if not chunk:
                    break
                data += chunk
        return data

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill `out` with bytes from `offset` on; return their number, which is smaller at the end of the file.

        Raises:
            OSError: they cannot be read.
        """
        bytes_read = 0
        with self._acquire() as descriptor:
            while bytes_read < len(out) and (count := os.preadv(descriptor, [out[bytes_read:]], offset + bytes_read)):
                bytes_read += count
        return bytes_read

    def close(self) -> None:
        """Close the descriptor; no thread may be reading."""
        with _lock:
            _in_use.pop(self, None)
            self._close_descriptor()

    @contextmanager
    def _acquire(self) -> Iterator[int]:
        with _lock:
            if self._descriptor is None:
                self._descriptor = _open_descriptor(self.path)
            descriptor = self._descriptor
            _in_use.pop(self, None)
            _in_use[self] = None  # in order of last use
            self._users += 1
        try:
            yield descriptor
        finally:
            with _lock:
                self._users -= 1

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_in_use: dict[RegularFile, None] = {}
_lock = threading.Lock()


def _reset_after_fork() -> None:
    """Reset a forked child, which does not have the threads that held the lock or were reading."""
    global _lock
    _lock = threading.Lock()
    for file in _in_use:
        file._users = 0


os.register_at_fork(after_in_child=_reset_after_fork)


def _open_descriptor(path: Path) -> int:
    _close_idle_files(_MAX_OPEN_FILES - 1)
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno not in _TOO_MANY_FILES:
            raise
        _close_idle_files(0)
        return open_regular(path)


def _close_idle_files(limit: int) -> None:
    """Close the least recently used descriptors without readers, until at most `limit` are open."""
    for file in [file for file in _in_use if not file._users][: max(len(_in_use) - limit, 0)]:
        del _in_use[file]
        file._close_descriptor()


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; links are followed.

    Raises:
        OSError: it cannot be opened, or is a directory, a FIFO (which would block), a device or a socket.
    """
    _check_regular(os.stat(path), path)  # before opening it, since opening a device may have side effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, limit: int) -> bytes:
    """Return all bytes of a file.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        CorruptCheckpoint: it has more than `limit` bytes.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptCheckpoint(f"'{path}' has {size} bytes, more than the {limit} that such a file may have")
        return file.read(size)


def unreadable_error(path: Path, error: OSError) -> DSQError:
    """Return the error for a file of a checkpoint that cannot be read."""
    if error.errno in _TOO_MANY_FILES:
        return LoadFailed(
            f"'{path}' cannot be opened: {error.strerror}; close files, or raise the limit (ulimit -n), and load again"
        )
    if error.errno in _EXTERNAL_ERRORS or isinstance(error, RemoteError):
        return LoadFailed(f"'{path}' cannot be read: {error.strerror}")
    return CorruptCheckpoint(
        f"'{path}' cannot be read ({error.strerror}) although the manifest names it; restore the file or load another "
        "checkpoint"
    )


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
