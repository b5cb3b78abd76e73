"""Regular files opened for reading: nothing that could block, and few of them at a time."""

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

_AT_ONCE = 64
_FULL = (errno.EMFILE, errno.ENFILE)
_OUTSIDE = (
    *_FULL, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN,
)
"""Reasons that say nothing about the file itself."""


class RegularFile:
    """A file that is read at any place by any thread.

    Its descriptor is closed where more than 64 files are in use, and opened again when it is needed: resharding a long
    chain takes more files than a process may have open.

    Attributes:
        path: path of the file.
        size: in bytes, when it was opened.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._users = 0
        with self._held() as descriptor:
            self.size = os.fstat(descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer at the end of the file.

        Raises:
            OSError: they cannot be read.
        """
        with self._held() as descriptor:
            data = os.pread(descriptor, size, offset)
            while data and len(data) < size:  # the kernel returns at most 2 GiB at once
                more = os.pread(descriptor, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
        return data

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill `out` with bytes from `offset` on; return how many there are, fewer at the end of the file.

        Raises:
            OSError: they cannot be read.
        """
        done = 0
        with self._held() as descriptor:
            while done < len(out) and (more := os.preadv(descriptor, [out[done:]], offset + done)):
                done += more
        return done

    def close(self) -> None:
        """Close the descriptor; nobody may be reading."""
        with _lock:
            _in_use.pop(self, None)
            self._release()

    @contextmanager
    def _held(self) -> Iterator[int]:
        with _lock:
            if self._descriptor is None:
                self._descriptor = _descriptor_of(self.path)
            descriptor = self._descriptor
            _in_use.pop(self, None)
            _in_use[self] = None  # the last one is that used last
            self._users += 1
        try:
            yield descriptor
        finally:
            with _lock:
                self._users -= 1

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_in_use: dict[RegularFile, None] = {}
_lock = threading.Lock()


def _forked() -> None:
    """Reset a child, which lacks the threads that held the lock or were reading."""
    global _lock
    _lock = threading.Lock()
    for file in _in_use:
        file._users = 0


os.register_at_fork(after_in_child=_forked)


def _descriptor_of(path: Path) -> int:
    _make_room(_AT_ONCE - 1)
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _make_room(0)
        return open_regular(path)


def _make_room(left: int) -> None:
    """Close the descriptors used longest ago, but those that are being read, until so many are left."""
    for file in [file for file in _in_use if not file._users][: max(len(_in_use) - left, 0)]:
        del _in_use[file]
        file._release()


def open_regular(path: Path) -> int:
    """Open a file for reading; the descriptor. Links are followed.

    Raises:
        OSError: it cannot be opened, or is a directory, a FIFO (which would block), a device or a socket.
    """
    _refuse_special(os.stat(path), path)  # first: opening a device may do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_special(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, limit: int) -> bytes:
    """Return all bytes of a file.

    Raises:
        OSError: it cannot be read, or is not regular.
        CorruptCheckpoint: it has more than `limit` bytes.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptCheckpoint(f"'{path}' has {size} bytes, more than the {limit} that such a file may have")
        return file.read(size)


def unreadable(path: Path, error: OSError) -> DSQError:
    """Return the error to raise for a file of a checkpoint that cannot be read."""
    if error.errno in _FULL:
        return LoadFailed(
            f"'{path}' cannot be opened: {error.strerror}; close files, or raise the limit (ulimit -n), and load again"
        )
    if error.errno in _OUTSIDE or isinstance(error, RemoteError):
        return LoadFailed(f"'{path}' cannot be read: {error.strerror}")
    return CorruptCheckpoint(
        f"'{path}' cannot be read ({error.strerror}) although the manifest names it; restore the file or load another "
        "checkpoint"
    )


def _refuse_special(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
