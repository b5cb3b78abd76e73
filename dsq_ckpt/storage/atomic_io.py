"""Files and directories that appear complete or not at all: hidden name, write, flush, rename.

A file is written under a hidden name beside its own, so that the rename stays on one file system. A rename survives a
power failure once the directory was flushed; callers flush directories themselves where they give several names.
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

NOT_ALL = "not all of which was written"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)  # a container's filter may refuse it
_LONGEST_WITHIN = 255 - len("..dsq-01234567.tmp")
"""Bytes of a name that leave room for what makes it hidden, on file systems whose names have at most 255."""
_HIDDEN = re.compile(r"\..+\.(?:dsq-)?[0-9a-f]{8}\.tmp")  # names without the mark: of earlier versions


def hidden_name(goal: Path, mark: str | None = None) -> Path:
    """Return the hidden name under which a file or directory is written.

    Args:
        goal: the name that it gets when it is complete.
        mark: 8 hexadecimal digits; None: random ones.
    """
    return goal.with_name(f".{within_hidden(goal.name)}.dsq-{mark or uuid.uuid4().hex[:8]}.tmp")


def within_hidden(name: str) -> str:
    """Return how a name stands in a hidden name: itself, or if that were too long its beginning and a digest."""
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST_WITHIN:
        return name
    digest = xxhash.xxh3_64_hexdigest(encoded)  # names that begin alike stay apart
    return f"{encoded[: _LONGEST_WITHIN - len(digest) - 1].decode(errors='ignore')}-{digest}"


def is_hidden(name: str) -> bool:
    """Return whether a file or directory of this name is being written, or was left by a process that was killed."""
    return _HIDDEN.fullmatch(name) is not None


@contextlib.contextmanager
def naming(path: Path, when: str) -> Iterator[None]:
    """Let errors of the operating system that name no file, such as a full disk, name `path`, followed by `when`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:  # without a number: one of this package
            raise
        raise _named(error, path, when) from error


def _named(error: OSError, path: Path, when: str) -> OSError:
    return OSError(error.errno, f"{error.strerror}, {when}", str(path))


def flush(stream: IO[bytes] | IO[str], fsync: bool) -> None:
    """Write out what a stream buffers, and flush its file to the device if `fsync`."""
    stream.flush()
    if fsync:
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory, so that names given in it survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with naming(directory, "while names in it were flushed to the device"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, fsync: bool) -> None:
    """Make a directory and its missing parents; with `fsync` their names survive a power failure.

    Raises:
        OSError: a directory cannot be made or flushed.
    """
    missing = list(itertools.takewhile(lambda directory: not directory.is_dir(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for made in missing[::-1] or ([path] if fsync else []):
        if fsync:
            sync_directory(made.parent)


class AtomicFile:
    """A new file under a hidden name, which `publish` renames; as a context manager it removes what was not published.

    Args:
        path: name of the complete file.
        fsync: flush the file to the device before the rename.
        mark: mark of the hidden name, see `hidden_name`.
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
        self.stream: IO[bytes] = open(self.hidden, "xb", buffering=buffering)  # noqa: SIM115

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()
        if isinstance(error, OSError) and error.filename is None:
            raise _named(error, self.path, NOT_ALL) from error

    def complete(self) -> None:
        """Flush and close the file, which keeps its hidden name."""
        if not self.stream.closed:
            flush(self.stream, self._fsync)
            self.stream.close()

    def publish(self, exclusive: bool = False) -> None:
        """Complete the file and rename it.

        Args:
            exclusive: replace nothing.

        Raises:
            FileExistsError: with `exclusive`, a file of this name is there.
        """
        self.complete()
        if exclusive:
            _rename_new(self.hidden, self.path)
        else:
            os.replace(self.hidden, self.path)

    def discard(self) -> None:
        """Close the file and remove its hidden name, if it has that still."""
        with contextlib.suppress(OSError):  # closing a file on a full disk fails again; the first error counts
            self.stream.close()
        with contextlib.suppress(OSError):
            self.hidden.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file(goal: Path) -> Iterator[IO[bytes]]:
    """Yield a stream whose file appears on leaving the block, flushed to the device; make missing parent directories.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    goal.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFile(goal, fsync=True) as file:
        yield file.stream
        file.publish()
        sync_directory(goal.parent)


@contextlib.contextmanager
def new_directory(goal: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden path for the block to make a directory at, which then gets its name; make missing parents.

    The block flushes the files and directories that it makes.

    Args:
        goal: the directory to appear.
        overwrite: replace what has this name.

    Raises:
        OSError: the directory cannot be made; or it is not empty, and is not to be overwritten.
    """
    goal.parent.mkdir(parents=True, exist_ok=True)
    hidden = hidden_name(goal)
    try:
        with naming(goal, NOT_ALL):
            yield hidden
            if overwrite:
                replace_directory(hidden, goal)
            else:
                os.rename(hidden, goal)
                sync_directory(goal.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def relink(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, in place of the file that has the name; there is always one or the other.

    Raises:
        OSError: the link cannot be made.
    """
    hidden = hidden_name(target)
    try:
        os.link(source, hidden)
        os.replace(hidden, target)
    finally:
        hidden.unlink(missing_ok=True)


def exchange(source: Path, target: Path) -> bool:
    """Let two files exchange their names; where the system cannot (only Linux does), let `source` replace `target`.

    A file that another process removes meanwhile does not come back, as it would by `os.replace`. Where names were
    exchanged, `source` has what was at `target`; else it is gone.

    Returns:
        Whether there was a `target`; if not, nothing is changed.

    Raises:
        OSError: neither can be done.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
            return True
        if ctypes.get_errno() not in _NO_EXCHANGE:
            with contextlib.suppress(FileNotFoundError):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))
            return False
    if not target.exists():
        return False
    os.replace(source, target)
    return True


def _rename_new(source: Path, target: Path) -> None:
    """Rename without replacing; where the file system cannot link, check and rename."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.replace(source, target)


def replace_directory(hidden: Path, goal: Path) -> None:
    """Rename a directory into place; an old one is renamed first, because directories cannot be replaced.

    Raises:
        OSError: the directory cannot be renamed; the old one is there.
    """
    backup = hidden.with_suffix(".old")
    old = os.path.lexists(goal)
    if old:
        os.rename(goal, backup)
    try:
        os.rename(hidden, goal)
    except OSError:
        if old:
            os.rename(backup, goal)
        raise
    sync_directory(goal.parent)
    if old:
        shutil.rmtree(backup)
