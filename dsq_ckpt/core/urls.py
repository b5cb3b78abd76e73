"""Paths on object stores: values like any path, of which no call of the operating system can make use."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PosixPath
from typing import Any, NoReturn

from dsq_ckpt.errors import NotLocal

_WITH_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # more than the letter of a drive


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path that a user gave is a URL, such as s3://bucket/run, or a `Path` of one, s3:/bucket/run.

    As a local path the latter would be a directory of this host that nobody looks for.
    """
    return isinstance(path, RemotePath) or "://" in (text := os.fspath(path)) or _WITH_ONE_SLASH.match(text) is not None


class RemotePath(PosixPath):
    """The URL of a checkpoint, of a run or of one of their files, such as s3://bucket/run/step-000500.

    It is a `Path`, so that names, parents and joined paths are written once for all backends; what lies there is told
    by `dsq_ckpt.storage.backend`. Whatever asks the operating system for such a path raises an error, so that a call
    that works on local directories only says so.

    Raises:
        NotLocal: from any use as a path of the local file system.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if not self.parts or not self.parts[0].endswith(":"):  # relative to another
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
        """The paths above, up to the bucket."""
        return [above for above in super().parents if len(above.parts) >= 2]

    def absolute(self) -> RemotePath:
        return self

    def is_symlink(self) -> bool:
        return False

    # Newer versions of Python pass the text of a path to the operating system here, not the path.
    def iterdir(self) -> NoReturn:
        self._refuse()

    def glob(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    rglob = walk = glob

    def _refuse(self) -> NoReturn:
        raise NotLocal(f"'{self}' is a URL, and this works on local directories only")


class RemoteError(OSError):
    """A request to an object store failed for a reason that says nothing about the file: access, bucket, network."""


def is_remote(path: Path) -> bool:
    """Return whether a path is on an object store."""
    return isinstance(path, RemotePath)
