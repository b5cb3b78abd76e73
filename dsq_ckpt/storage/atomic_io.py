"""Atomic creation of files and directories: write under a hidden name, flush, rename.

The hidden name is in the directory of the final name, so that the rename stays on one file system. A rename survives a
power failure once the directory is flushed. Callers that rename several files flush the directory once, themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import xxhash

from dsq_ckpt.storage.writeback import open_new

INCOMPLETE = "not all of which was written"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>
_SYNC_UNSUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
_EXCHANGE_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)  # a container's filter may refuse it
_MAX_NAME_BYTES = 255 - len("..dsq-01234567.tmp")
"""Largest name in bytes to which prefix and suffix of a hidden name can be added within the limit of 255."""
_HIDDEN = re.compile(r"\..+\.(?:dsq-)?[0-9a-f]{8}\.tmp")  # names without the mark: of earlier versions


def hidden_name(goal: Path, mark: str | None = None) -> Path:
    """Return the hidden path under which a file or directory is written.

    Args:
        goal: final path.
        mark: 8 hexadecimal digits, random if None.
    """
    return goal.with_name(f".{shorten_name(goal.name)}.dsq-{mark or uuid.uuid4().hex[:8]}.tmp")


def shorten_name(name: str) -> str:
    """Return the name as it appears in a hidden name. Replace the end of a long name by a digest."""
    encoded = os.fsencode(name)
    if len(encoded) <= _MAX_NAME_BYTES:
        return name
    digest = xxhash.xxh3_64_hexdigest(encoded)  # names that begin alike stay apart
    return f"{encoded[: _MAX_NAME_BYTES - len(digest) - 1].decode(errors='ignore')}-{digest}"


def is_hidden(name: str) -> bool:
    """Return whether the name is a hidden name: of a write in progress, or left by a process that was killed."""
    return _HIDDEN.fullmatch(name) is not None


@contextlib.contextmanager
def add_path_to_errors(path: Path, when: str) -> Iterator[None]:
    """Add `path` and `when` to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:  # without a number: one of this package
            raise
        raise _add_path(error, path, when) from error


def _add_path(error: OSError, path: Path, when: str) -> OSError:
    return OSError(error.errno, f"{error.strerror}, {when}", str(path))


def flush(stream: IO[bytes] | IO[str], fsync: bool) -> None:
    """Flush the buffer of a stream and, with `fsync`, its file to the device."""
    stream.flush()
    if fsync:
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory to the device, so that renames in it survive a power failure.

    Some file systems, such as those of network shares and of shared folders, cannot flush a directory. They write names
    in an order of their own, which is all that there is.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with add_path_to_errors(directory, "while names in it were flushed to the device"):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _SYNC_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path, fsync: bool) -> None:
    """Create a directory and its missing parents. With `fsync` they survive a power failure.

    Raises:
        OSError: a directory cannot be created or flushed.
    """
    missing = list(itertools.takewhile(lambda directory: not directory.is_dir(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for created in missing[::-1] or ([path] if fsync else []):
        if fsync:
            sync_directory(created.parent)


class AtomicFile:
    """New file under a hidden name, renamed by `publish`. On exit of the context an unpublished file is removed.

    Args:
        path: final path.
        fsync: flush the file to the device before the rename.
        mark: see `hidden_name`.
        buffering: buffer size in bytes, see `open`.

    Attributes:
        stream: the open file, for binary writing.
        hidden: path of the file until it is published.

    Raises:
        OSError: the file cannot be written; the error names it.
    """

    def __init__(self, path: Path, fsync: bool, mark: str | None = None, buffering: int = -1) -> None:
        self.path, self.hidden = path, hidden_name(path, mark)
        self._fsync = fsync
        self.stream: IO[bytes] = open_new(self.hidden, fsync, buffering)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()
        if isinstance(error, OSError) and error.filename is None:
            raise _add_path(error, self.path, INCOMPLETE) from error

    def complete(self) -> None:
        """Flush and close the file. It keeps its hidden name."""
        if not self.stream.closed:
            flush(self.stream, self._fsync)
            self.stream.close()

    def publish(self, exclusive: bool = False) -> None:
        """Complete the file and rename it.

        Args:
            exclusive: do not replace an existing file.

        Raises:
            FileExistsError: with `exclusive`, the file exists.
        """
        self.complete()
        if exclusive:
            _rename_exclusive(self.hidden, self.path)
        else:
            os.replace(self.hidden, self.path)

    def discard(self) -> None:
        """Close the file and remove it if it was not published."""
        with contextlib.suppress(OSError):  # closing a file on a full disk fails again; the first error counts
            self.stream.close()
        with contextlib.suppress(OSError):
            self.hidden.unlink(missing_ok=True)


@contextlib.contextmanager
def create_file(goal: Path) -> Iterator[IO[bytes]]:
    """Yield a stream for a new file, published and flushed to the device on exit. Create missing parent directories.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    goal.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFile(goal, fsync=True) as file:
        yield file.stream
        file.publish()
        sync_directory(goal.parent)


@contextlib.contextmanager
def create_directory(goal: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden path, at which the block creates a directory, and rename it to `goal` on exit.

    Missing parents are created. The block flushes the files and directories that it creates.

    Args:
        goal: final path of the directory.
        overwrite: replace an existing file or directory.

    Raises:
        OSError: the directory cannot be created; or it is not empty, and `overwrite` is False.
    """
    goal.parent.mkdir(parents=True, exist_ok=True)
    hidden = hidden_name(goal)
    try:
        with add_path_to_errors(goal, INCOMPLETE):
            yield hidden
            if overwrite:
                replace_directory(hidden, goal)
            else:
                os.rename(hidden, goal)
                sync_directory(goal.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def relink(source: Path, target: Path) -> None:
    """Atomically replace `target` by a hard link to `source`.

    Raises:
        OSError: the link cannot be created.
    """
    hidden = hidden_name(target)
    try:
        os.link(source, hidden)
        os.replace(hidden, target)
    finally:
        hidden.unlink(missing_ok=True)


def exchange_names(source: Path, target: Path) -> bool:
    """Exchange the names of two files, or replace `target` by `source` where the system (not Linux) cannot exchange.

    Unlike `os.replace`, an exchange does not recreate a `target` that another process has removed. After an exchange
    `source` has the former content of `target`; after a replacement it does not exist.

    Returns:
        Whether `target` existed. If not, nothing is changed.

    Raises:
        OSError: neither is possible.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
            return True
        if ctypes.get_errno() not in _EXCHANGE_UNSUPPORTED:
            with contextlib.suppress(FileNotFoundError):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))
            return False
    if not target.exists():
        return False
    os.replace(source, target)
    return True


def _rename_exclusive(source: Path, target: Path) -> None:
    """Rename without replacing. Check and rename where the file system has no hard links."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.replace(source, target)


_NOT_RENAMED = (
    "this directory cannot be renamed, as one on an overlay file system that came with a container's image; remove it "
    "first, or choose another path"
)


def replace_directory(hidden: Path, goal: Path, *, backup: Path | None = None, fsync: bool = True) -> None:
    """Rename a directory to `goal`. Rename what is there first, since a rename cannot replace a directory.

    Args:
        hidden: the new directory.
        goal: its final path; an old directory, file or symbolic link there is removed at the end.
        backup: path of the old one until then; None: a hidden path.
        fsync: flush the names to the device.

    Raises:
        OSError: the directory cannot be renamed; the old one is back in its place.
    """
    backup = backup or hidden.with_suffix(".old")
    old = os.path.lexists(goal)
    if old:
        try:
            os.rename(goal, backup)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise OSError(error.errno, _NOT_RENAMED, str(goal)) from error
    try:
        os.rename(hidden, goal)
    except BaseException:  # also an interrupt, which may have come when the new directory had its name already
        if old and not os.path.lexists(goal):
            os.rename(backup, goal)
        raise
    if fsync:
        sync_directory(goal.parent)
    if old and backup.is_dir() and not backup.is_symlink():
        shutil.rmtree(backup)
    elif old:
        backup.unlink()
