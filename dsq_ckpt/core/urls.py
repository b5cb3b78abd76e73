"""Paths on object stores: `Path` values that calls of the operating system refuse."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PosixPath
from typing import Any, NoReturn

from dsq_ckpt.errors import NotLocal

_WITH_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # more than the letter of a drive


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, such as s3://bucket/run, or a `Path` of one, s3:/bucket/run.

    Taken as a local path, the latter would be an unexpected directory on this host.
    """
    return isinstance(path, RemotePath) or "://" in (text := os.fspath(path)) or _WITH_ONE_SLASH.match(text) is not None


class RemotePath(PosixPath):
    """The URL of a checkpoint, of a run or of one of their files, such as s3://bucket/run/step-000500.

    It is a `Path`, so that code for names, parents and joined paths is the same for all backends;
    `dsq_ckpt.storage.backend` accesses its content. Calls of the operating system with it raise an error, so that
    functions for local directories only refuse it.

    Raises:
        NotLocal: it is used as a path of the local file system.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if not self.parts or not self.parts[0].endswith(":"):  # a relative path
            return text
        protocol, _, rest = text.partition(":")
        return f"{protocol}://{rest.lstrip('/')}"

    def __fspath__(self) -> str:
        self._refuse()

    @property
    def root_url(self) -> str:
        """Protocol and bucket."""
        return str(self if len(self.parts) <= 2 else self.parents[-1])

    @property
    def parent(self) -> RemotePath:
        return super().parent if len(self.parts) > 2 else self

    @property
    def parents(self) -> Sequence[RemotePath]:
        """Parent paths, up to the bucket."""
        return [above for above in super().parents if len(above.parts) >= 2]

    def absolute(self) -> RemotePath:
        return self

    def is_symlink(self) -> bool:
        return False

    # Newer versions of Python pass the text of the path, not the path, to the operating system in these methods.
    def iterdir(self) -> NoReturn:
        self._refuse()

    def glob(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    rglob = walk = glob

    def _refuse(self) -> NoReturn:
        raise NotLocal(f"'{self}' is a URL, and this works on local directories only")


class RemoteError(OSError):
    """A failure of a request to an object store that is not caused by the file: access, bucket, network."""


def is_remote(path: Path) -> bool:
    """Return whether a path is on an object store."""
    return isinstance(path, RemotePath)
