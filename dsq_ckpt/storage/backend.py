"""Storage backends: the file operations of saves and loads, on the local file system or an object store.

The type of a path selects the backend: `get_storage` returns the object store for a URL, else the local file system.
Both keep one contract (`tests/storage/test_backends.py`): a file appears complete or not at all, and once it appears
every process can read it by its name.

They differ in how checkpoints share files. Locally each checkpoint has hard links to files of its ancestors. Object
stores have no links; there the manifest names the checkpoint of the run that holds a file (`ManifestFile.held_by`).
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

from dsq_ckpt.core.regular_files import RegularFile, read_regular
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.core.workers import map_concurrently
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.storage.atomic_io import AtomicFile, make_directory, sync_directory

MAX_REQUESTS = 16
"""Most requests to an object store at a time."""


class DirectoryEntry(NamedTuple):
    """Entry of a directory.

    Attributes:
        name: name in the directory.
        is_directory: whether it is a directory.
        size: bytes.
        modified: time of the last change, seconds since the epoch; None if the backend does not report it.
    """

    name: str
    is_directory: bool
    size: int
    modified: float | None


def _to_entry(entry: os.DirEntry[str]) -> DirectoryEntry:
    status, directory = entry.stat(follow_symlinks=False), False
    with suppress(OSError):  # a link that leads to itself
        directory = entry.is_dir()
    return DirectoryEntry(entry.name, directory, status.st_size, max(status.st_mtime, status.st_ctime))


class ReadableFile(Protocol):
    """File open for reads of ranges, by any thread; see `RegularFile`."""

    size: int

    def read(self, offset: int, size: int) -> bytes: ...

    def close(self) -> None: ...


class WritableFile(Protocol):
    """File being written; see `AtomicFile`."""

    @property
    def stream(self) -> IO[bytes]: ...

    def __enter__(self) -> WritableFile: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def complete(self) -> None: ...

    def publish(self, exclusive: bool = False) -> None: ...

    def discard(self) -> None: ...


class Storage(Protocol):
    """File operations by path. Methods raise FileNotFoundError for a missing file, OSError for other failures."""

    def list_entries(self, directory: Path) -> list[DirectoryEntry]:
        """Return what lies directly in a directory; nothing where there is none."""

    def size(self, file: Path) -> int:
        """Return the size of a regular file in bytes."""

    def exists(self, file: Path) -> bool:
        """Return whether there is a regular file."""

    def read(self, file: Path, limit: int) -> bytes:
        """Return all bytes of a file. Raise CorruptCheckpoint if there are more than `limit`."""

    def open(self, file: Path, expected: int | None = None) -> ReadableFile:
        """Open a file for reads of ranges.

        Args:
            file: the file.
            expected: required size in bytes; None: any.

        Raises:
            CorruptCheckpoint: it has another size. An object store finds this at the first read that fails or reaches
                the end, since to ask for a size takes a request.
        """

    def create(self, file: Path, *, fsync: bool, mark: str | None = None, buffering: int = -1) -> WritableFile:
        """Return a new file in an existing directory. It appears when it is published."""

    def remove(self, file: Path) -> None:
        """Remove a file if it exists."""

    def make_directory(self, directory: Path, fsync: bool) -> None:
        """Create a directory and its missing parents, if the backend has directories."""

    def flush(self, directory: Path) -> None:
        """Flush a directory, so that renames in it survive a power failure."""


class _LocalStorage:
    """Local or mounted file system."""

    def list_entries(self, directory: Path) -> list[DirectoryEntry]:
        entries = []
        try:
            with os.scandir(directory) as scanned:
                for entry in scanned:
                    with suppress(FileNotFoundError):  # renamed or removed meanwhile
                        entries.append(_to_entry(entry))
        except (FileNotFoundError, NotADirectoryError):
            pass
        return entries

    def size(self, file: Path) -> int:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(2, "it is no regular file", str(file))
        return status.st_size

    def exists(self, file: Path) -> bool:
        try:
            self.size(file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def read(self, file: Path, limit: int) -> bytes:
        return read_regular(file, limit)

    def open(self, file: Path, expected: int | None = None) -> RegularFile:
        opened = RegularFile(file)
        try:
            check_size(file, opened.size, expected)
        except BaseException:
            opened.close()
            raise
        return opened

    def create(self, file: Path, *, fsync: bool, mark: str | None = None, buffering: int = -1) -> AtomicFile:
        return AtomicFile(file, fsync, mark, buffering)

    def remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def make_directory(self, directory: Path, fsync: bool) -> None:
        make_directory(directory, fsync)

    def flush(self, directory: Path) -> None:
        sync_directory(directory)


_LOCAL = _LocalStorage()


def get_storage(path: Path) -> Storage:
    """Return the backend of a path."""
    return _get_object_store() if is_remote(path) else _LOCAL


@cache
def _get_object_store() -> Storage:
    from dsq_ckpt.storage.object_store import ObjectStore

    return ObjectStore()


def check_size(file: Path, size: int, expected: int | None) -> None:
    """Raise CorruptCheckpoint if a size in bytes is not the expected one; None: any."""
    if expected not in (None, size):
        raise CorruptCheckpoint(
            f"'{file}' has {size} bytes, expected {expected}: truncated or overwritten; restore it or load another "
            "checkpoint"
        )


def read_sizes(files: Iterable[Path]) -> dict[Path, int | OSError]:
    """Return the size of each file, or the error of reading it. On an object store list each directory once."""
    files = list(files)
    directories = list({file.parent: None for file in files if is_remote(file)})
    listed = dict(zip(directories, map_concurrently(_list_sizes, directories, MAX_REQUESTS), strict=True))
    sizes: dict[Path, int | OSError] = {}
    for file in files:
        try:
            listing = listed.get(file.parent, {})
            if isinstance(listing, OSError):
                raise listing
            size = listing.get(file.name)  # a listing may be behind
            sizes[file] = get_storage(file).size(file) if size is None else size
        except OSError as error:
            sizes[file] = error
    return sizes


def _list_sizes(directory: Path) -> dict[str, int] | OSError:
    try:
        return {entry.name: entry.size for entry in get_storage(directory).list_entries(directory)}
    except OSError as error:
        return error
