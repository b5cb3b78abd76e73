"""Paths that users give."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsq_ckpt.core.arguments import expect_path
from dsq_ckpt.core.urls import RemotePath, is_url
from dsq_ckpt.errors import CheckpointNotFound, ConfigError

_LOCAL = re.compile(r"\A(?:file|local):(?://|(?=/[^/]))", re.IGNORECASE)  # a `Path` of one has one slash
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://+[^/].*")


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave: a URL, or a local path with `~` and `~user` replaced by the home directory.

    Raises:
        ConfigError: it is a URL without a bucket, or with "..", or one of another form, such as with one slash.
    """
    if isinstance(path, RemotePath):
        return path
    text = _LOCAL.sub("", os.fspath(path), count=1)
    if not is_url(text):
        return Path(os.path.expanduser(text))
    if _URL.fullmatch(text) is None or ".." in text.split("/"):
        hint = "" if "://" in text else "; a `Path` takes one slash away, so give a str"
        raise ConfigError(
            f"path {text!r}: expected a URL such as 's3://bucket/run/step-000500', or a local directory{hint}"
        )
    return RemotePath(text)


def to_absolute(path: Path) -> Path:
    """Return a path from the root on; links and `..` stay.

    Raises:
        ConfigError: it begins at the working directory, which was deleted.
    """
    try:
        return path.absolute()
    except FileNotFoundError as error:
        raise ConfigError(
            f"'{path}' is relative to the working directory, which does not exist any more: change to another one, or "
            "give an absolute path"
        ) from error


def resolve_local_path(path: str | os.PathLike[str]) -> Path:
    """Return the local checkpoint directory that a user named, as an absolute path.

    Raises:
        ConfigError: it is a URL, or empty, or relative to a directory that was deleted.
    """
    expect_path("path", path)
    if is_url(path) and not _LOCAL.match(str(path)):
        raise ConfigError(f"path {str(path)!r}: expected a directory of the local file system")
    return resolve_checkpoint_path(path)


def resolve_checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint directory that a user named: a URL, or an absolute path.

    Raises:
        ConfigError: it is empty, a URL of another form than expected, or relative to a directory that was deleted.
    """
    expect_path("path", path)
    found = expand_path(path)
    if isinstance(found, RemotePath):
        return found
    if not os.fspath(path):
        raise ConfigError(f"path {os.fspath(path)!r}: expected a directory of the local file system, or a URL")
    return to_absolute(found)


def find_file_above(path: Path) -> Path | None:
    """Return the nearest path above one that exists and is no directory, so that nothing can lie below; None: none."""
    return next((above for above in path.parents if os.path.lexists(above) and not above.is_dir()), None)


def explain_absence(path: Path) -> str:
    """Return why nothing is at a path, as the end of a sentence."""
    file = find_file_above(path)
    return "does not exist" if file is None else f"leads through '{file}', which is no directory"


def require_checkpoint_path(path: str | os.PathLike[str] | None) -> Path:
    """Return the directory of a checkpoint to be read; whether it exists is not checked.

    Raises:
        CheckpointNotFound: it is None.
        ConfigError: it is empty.
    """
    if path is None:
        raise CheckpointNotFound(
            "no complete checkpoint: the path is None, as `dsq_ckpt.latest(run)` is for a run without one; check for "
            "None and begin a new run, or name a checkpoint directory"
        )
    return resolve_checkpoint_path(path)
