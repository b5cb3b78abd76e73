"""Object stores by fsspec: s3://, gs://, az:// and others that fsspec has a package for.

An object appears when its upload completes. Its key belongs to one save, so only manifests are overwritten. There are
no links, renames or directories. Uploads run while a rank encodes. Transient failures are retried, by fsspec's package
and then here. A file system object is shared by the threads of a process, not by its children.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar, cast

from dsq_ckpt.core.urls import RemoteError, RemotePath
from dsq_ckpt.core.workers import submit
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.storage.backend import DirectoryEntry, check_size
from dsq_ckpt.storage.read_ahead import ReadAheadFile
from dsq_ckpt.storage.remote_errors import (
    AZURE_PROTOCOLS,
    GOOGLE_PROTOCOLS,
    get_protocol,
    is_denied,
    is_elsewhere,
    is_transient,
    no_bucket,
    require_faithful_names,
    translate_error,
    translate_setup_error,
)

_PIECE = 1 << 23
"""Bytes passed to an upload at once; a smaller file is sent by one request when it is complete."""
_MAX_PENDING = 4  # pieces waiting for upload, after which the writer waits
_MAX_ATTEMPTS = 4
_FIRST_WAIT = 0.25  # seconds
_T = TypeVar("_T")
_filesystems: dict[str, tuple[int, Any]] = {}
_buckets_found = set[str]()
"""URLs of buckets for which this was asked, and that exist or may not be asked for."""
_lock = threading.Lock()


def _reset_after_fork() -> None:
    """Reset the lock in a child, and leave file systems to the parent.

    A finalizer of adlfs would wait at the exit of the child for a thread that only the parent has.
    """
    global _lock
    _lock = threading.Lock()
    inherited = {id(system) for _pid, system in _filesystems.values()}
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and id(alive[0]) in inherited:
            finalizer.detach()


os.register_at_fork(after_in_child=_reset_after_fork)


class ObjectStore:
    """Storage backend of URLs."""

    def list_entries(self, directory: Path) -> list[DirectoryEntry]:
        def listed() -> list[dict[str, Any]]:
            system = _get_filesystem(directory)
            system.invalidate_cache()
            entries: list[dict[str, Any]] = system.ls(str(directory), detail=True)
            return entries

        try:
            listing = _retry(listed, directory)
        except FileNotFoundError:
            return []
        named = ((str(info["name"]).rstrip("/").rpartition("/")[2], info) for info in listing)
        return [
            DirectoryEntry(name, info["type"] == "directory", int(info.get("size") or 0), _get_modified(info))
            for name, info in named
            if name and str(info["name"]).strip("/") != _key(directory)  # a marker of the directory itself
        ]

    def size(self, file: Path) -> int:
        info = self._request(lambda: _get_filesystem(file).info(str(file)), file)
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "there is no such object", str(file))
        return int(info["size"])

    def exists(self, file: Path) -> bool:
        try:
            self._request(lambda: _read_range(file, 0, 1), file)  # to ask for the size of a missing object takes two
        except FileNotFoundError:
            return False
        return True

    def read(self, file: Path, limit: int) -> bytes:
        # A range, because s3fs would first ask for the size of a whole object.
        data = self._request(lambda: _read_range(file, 0, limit + 1), file)
        if len(data) > limit:
            raise CorruptCheckpoint(f"'{file}' has more than the {limit} bytes that such a file may have")
        return data

    def open(self, file: Path, expected: int | None = None) -> ReadAheadFile:
        size = self.size(file) if expected is None else expected

        def fetch(start: int, stop: int) -> bytes:
            is_last = expected is not None and stop == size

            def read_all() -> bytes:
                data = _read_range(file, start, stop + is_last)  # one byte more, which must not be there
                if len(data) != stop - start:
                    check_size(file, _size_now(file), expected)
                    raise ConnectionError(f"{len(data)} bytes came instead of {stop - start}, from {start} on")
                return data

            return _retry(read_all, file)

        return ReadAheadFile(size, fetch)

    def _request(self, call: Callable[[], Any], file: Path) -> Any:
        try:
            return _retry(call, file)
        except RemoteError:
            self.list_entries(file.parent)  # raises with a reason, which a response about one object may lack
            raise

    def create(self, file: Path, *, fsync: bool, mark: str | None = None, buffering: int = -1) -> Upload:
        return Upload(file)

    def remove(self, file: Path) -> None:
        with suppress(FileNotFoundError):
            _retry(lambda: _get_filesystem(file).rm_file(str(file)), file)

    def make_directory(self, directory: Path, fsync: bool) -> None:
        """Do nothing: keys need no directory."""

    def flush(self, directory: Path) -> None:
        """Do nothing: an upload that is complete is durable."""


class Upload:
    """Object being written; see `AtomicFile`. A thread sends the bytes written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = bytearray()
        self._sent: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[Any]] = deque()
        self._done = False

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    @property
    def stream(self) -> IO[bytes]:
        """Stream to write to: this upload, which only has the method `write`."""
        return cast(IO[bytes], self)

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes.

        Raises:
            OSError: earlier bytes cannot be sent.
        """
        self._buffer += data
        if len(self._buffer) >= _PIECE:
            if self._thread is None:
                self._sent = _retry(lambda: _get_filesystem(self.path).open(str(self.path), "wb"), self.path)
                self._thread = ThreadPoolExecutor(1, "dsq-upload")
            while len(self._pending) >= _MAX_PENDING:
                self._wait_for_piece()
            self._pending.append(submit(self._thread, self._sent.write, bytes(self._buffer), after=self._pending))
            self._buffer.clear()
        return len(data)

    def complete(self) -> None:
        """Do nothing: `publish` completes the object."""

    def publish(self, exclusive: bool = False) -> None:
        """Send the remaining bytes and complete the upload, so that the object appears.

        Args:
            exclusive: do not replace an object; atomic only for objects sent by one request.

        Raises:
            FileExistsError: with `exclusive`, there is another object of this name.
        """
        if self._thread is None:
            self._put(bytes(self._buffer), exclusive)
        else:
            while self._pending:
                self._wait_for_piece()
            if exclusive and _exists(self.path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
            _call(lambda: self._sent.write(bytes(self._buffer)), self.path)
            _call(self._sent.close, self.path)
            self._thread.shutdown()
        self._buffer.clear()
        self._done = True

    def discard(self) -> None:
        """Abort the upload unless it was published."""
        if self._done:
            return
        self._done = True
        self._buffer.clear()
        if self._thread is None:
            return
        self._thread.shutdown(cancel_futures=True)
        with suppress(Exception):  # the rest is for `dsq gc`, parts of an upload for the store's lifecycle rules
            self._sent.discard()
        with suppress(AttributeError):
            self._sent.closed = True  # otherwise its finalizer completes it
        from fsspec.spec import AbstractBufferedFile

        # A buffered upload has not created an object: one of this name is of another upload, such as an old manifest.
        if not isinstance(self._sent, AbstractBufferedFile):
            with suppress(Exception):
                _get_filesystem(self.path).rm_file(str(self.path))

    def _put(self, data: bytes, exclusive: bool) -> None:
        mode = {"mode": "create"} if exclusive else {}
        try:
            _retry(lambda: _get_filesystem(self.path).pipe_file(str(self.path), data, **mode), self.path)
        except FileExistsError:
            stored = _retry(lambda: _get_filesystem(self.path).cat_file(str(self.path)), self.path)
            if stored != data:  # else an earlier attempt of this request succeeded
                raise

    def _wait_for_piece(self) -> None:
        _call(self._pending.popleft().result, self.path)


def _get_filesystem(path: Path) -> Any:
    """Return fsspec's file system for a URL.

    Raises:
        ConfigError: fsspec, or its package for the protocol, is not installed, or has wrong settings.
    """
    assert isinstance(path, RemotePath)
    require_faithful_names(path)
    with _lock:
        filesystem = _filesystems.get(path.root_url)
        if filesystem is not None and filesystem[0] == os.getpid():
            return filesystem[1]
        try:
            from fsspec.core import url_to_fs

            system, _ = url_to_fs(path.root_url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError, TypeError) as error:
            raise translate_setup_error(error, path) from error
        _filesystems[path.root_url] = os.getpid(), system
        return system


def _read_range(file: Path, start: int, stop: int) -> bytes:
    """Return the bytes of an object from a start offset to a stop offset; fewer at its end."""
    try:
        return bytes(_get_filesystem(file).cat_file(str(file), start=start, end=stop))
    except Exception as error:
        if is_elsewhere(error) or isinstance(error, FileNotFoundError) or _size_now(file) > start:
            raise
        return b""  # stores refuse ranges that begin at the end, or after it


def _size_now(file: Path) -> int:
    """Return the size of an object in bytes, by a request that is not repeated."""
    return int(_get_filesystem(file).info(str(file))["size"])


def _retry(call: Callable[[], _T], path: Path) -> _T:
    """Return the result of a request, repeated after transient failures with exponential backoff.

    Raises:
        OSError: the request failed; the error names the URL and a remedy.
    """
    for attempt in range(_MAX_ATTEMPTS):
        try:
            return call()
        except Exception as error:
            if attempt == _MAX_ATTEMPTS - 1 or not is_transient(error):
                _require_bucket(error, path)
                raise translate_error(error, path) from error
        time.sleep(_FIRST_WAIT * 2**attempt * (1 + random.random()))
    raise AssertionError("the last attempt returns or raises")


def _call(call: Callable[[], _T], path: Path) -> _T:
    """Return the result of a request that cannot be repeated here, such as a part, which fsspec's package resends."""
    try:
        return call()
    except Exception as error:
        _require_bucket(error, path)
        raise translate_error(error, path) from error


def _require_bucket(error: Exception, path: Path) -> None:
    """Raise RemoteError if an object is missing because its bucket is, which gcsfs and adlfs do not tell apart."""
    protocol = get_protocol(path)
    if not isinstance(error, FileNotFoundError) or protocol not in (*GOOGLE_PROTOCOLS, *AZURE_PROTOCOLS):
        return
    assert isinstance(path, RemotePath)
    root = path.root_url
    if root in _buckets_found:
        return
    system = _get_filesystem(path)
    try:
        if protocol in GOOGLE_PROTOCOLS:  # not everyone who may list objects may ask for the bucket
            system.ls(root, detail=False, max_results=1)
        else:
            system.info(root)
    except FileNotFoundError:
        raise no_bucket(path, "no such bucket or container") from error
    except Exception as unknown:  # it may be there
        if not is_denied(unknown):  # another time there may be an answer
            return
    _buckets_found.add(root)


def _exists(path: Path) -> bool:
    try:
        _retry(lambda: _get_filesystem(path).info(str(path)), path)
    except FileNotFoundError:
        return False
    return True


def _get_modified(info: dict[str, Any]) -> float | None:
    """Return the time of an object's last write, under the key used by its fsspec package; None if there is none."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        with suppress(ValueError):
            if isinstance(value, str):
                value = datetime.fromisoformat(value)
            if isinstance(value, datetime):
                return value.timestamp()
    return None


def _key(path: Path) -> str:
    return str(path).partition("://")[2].strip("/")
