"""Where checkpoints lie: the few operations on files that saves and loads need, of the local file system or another.

A backend appears as the type of a path: `storage_of(path)` is the local file system, or an object store for a URL.
Both keep the same contract (`tests/storage/test_backends.py`): a file appears complete or not at all, and what another
process wrote is there for everybody who has its name.

What differs is how checkpoints share files. Locally each checkpoint has hard links to files of its ancestors. Object
stores have no links, so there a manifest tells in which checkpoint of the run a file lies (`ManifestFile.held_by`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Protocol

from dsq_ckpt.core.regular import RegularFile, read_regular
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.storage.atomic_io import AtomicFile, make_directory, sync_directory


class Entry(NamedTuple):
    """A name in a directory, with what it has: size in bytes, and when it was written, seconds since the epoch.

    `changed` is None where the backend does not tell it.
    """

    name: str
    directory: bool
    size: int
    changed: float | None


def _entry_of(entry: os.DirEntry[str]) -> Entry:
    status, directory = entry.stat(follow_symlinks=False), False
    with suppress(OSError):  # a link that leads to itself
        directory = entry.is_dir()
    return Entry(entry.name, directory, status.st_size, max(status.st_mtime, status.st_ctime))


class OpenFile(Protocol):
    """A file that is read at any place by any thread; see `RegularFile`."""

    size: int

    def read(self, offset: int, size: int) -> bytes: ...

    def close(self) -> None: ...


class NewFile(Protocol):
    """A file that is being written; see `AtomicFile`."""

    @property
    def stream(self) -> IO[bytes]: ...

    def __enter__(self) -> NewFile: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def complete(self) -> None: ...

    def publish(self, exclusive: bool = False) -> None: ...

    def discard(self) -> None: ...


class Storage(Protocol):
    """Files by their paths. Every method raises OSError where something is unknown, FileNotFoundError for no file."""

    def entries(self, directory: Path) -> list[Entry]:
        """Return what lies directly in a directory; nothing where there is none."""

    def size(self, file: Path) -> int:
        """Return the size of a regular file in bytes."""

    def read(self, file: Path, limit: int) -> bytes:
        """Return all bytes of a file; CorruptCheckpoint if they are more than `limit`."""

    def open(self, file: Path) -> OpenFile:
        """Open a file for reads of ranges."""

    def create(self, file: Path, *, fsync: bool, mark: str | None = None, buffering: int = -1) -> NewFile:
        """Begin a file, which appears when it is published; its directory was made."""

    def remove(self, file: Path) -> None:
        """Remove a file, if it is there."""

    def make_directory(self, directory: Path, fsync: bool) -> None:
        """Make a directory, and those above, where the backend has such things."""

    def flush(self, directory: Path) -> None:
        """Return when names given in a directory survive a power failure."""


class _Local:
    """The local file system, or one that is mounted."""

    def entries(self, directory: Path) -> list[Entry]:
        found = []
        try:
            with os.scandir(directory) as scanned:
                for entry in scanned:
                    with suppress(FileNotFoundError):  # renamed or removed meanwhile
                        found.append(_entry_of(entry))
        except (FileNotFoundError, NotADirectoryError):
            pass
        return found

    def size(self, file: Path) -> int:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(2, "it is no regular file", str(file))
        return status.st_size

    def read(self, file: Path, limit: int) -> bytes:
        return read_regular(file, limit)

    def open(self, file: Path) -> RegularFile:
        return RegularFile(file)

    def create(self, file: Path, *, fsync: bool, mark: str | None = None, buffering: int = -1) -> AtomicFile:
        return AtomicFile(file, fsync, mark, buffering)

    def remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def make_directory(self, directory: Path, fsync: bool) -> None:
        make_directory(directory, fsync)

    def flush(self, directory: Path) -> None:
        sync_directory(directory)


_LOCAL = _Local()


def storage_of(path: Path) -> Storage:
    """Return the backend that a path belongs to."""
    return _remote() if is_remote(path) else _LOCAL


@cache
def _remote() -> Storage:
    from dsq_ckpt.storage.object_store import ObjectStore

    return ObjectStore()


def sizes(files: Iterable[Path]) -> dict[Path, int | OSError]:
    """Return the size of each file, or why it is unknown; few requests for many files of an object store."""
    found: dict[Path, int | OSError] = {}
    listed: dict[Path, dict[str, int]] = {}
    for file in files:
        storage = storage_of(file)
        try:
            if is_remote(file):
                if file.parent not in listed:
                    listed[file.parent] = {entry.name: entry.size for entry in storage.entries(file.parent)}
                if file.name in listed[file.parent]:
                    found[file] = listed[file.parent][file.name]
                    continue
            found[file] = storage.size(file)  # a listing may be behind
        except OSError as error:
            found[file] = error
    return found
