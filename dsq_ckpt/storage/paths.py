"""Paths passed by users."""

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
    """Return a user's path as a URL, or as a local path with `~` and `~user` expanded.

    Raises:
        ConfigError: it has a null character, or is a URL without a bucket, with "..", or malformed, such as with one
            slash.
    """
    if isinstance(path, RemotePath):
        return path
    text = _LOCAL.sub("", os.fspath(path), count=1)
    if "\0" in text:
        raise ConfigError(f"path {text!r}: expected no null character in it")
    if not is_url(text):
        return Path(os.path.expanduser(text))
    if _URL.fullmatch(text) is None or ".." in text.split("/"):
        hint = "" if "://" in text else "; a `Path` takes one slash away, so give a str"
        raise ConfigError(
            f"path {text!r}: expected a URL such as 's3://bucket/run/step-000500', or a local directory{hint}"
        )
    return RemotePath(text)


def to_absolute(path: Path) -> Path:
    """Return an absolute path; links and `..` are not resolved.

    Raises:
        ConfigError: the path is relative and the working directory was deleted.
    """
    try:
        return path.absolute()
    except FileNotFoundError as error:
        raise ConfigError(
            f"'{path}' is relative to the working directory, which does not exist any more: change to another one, or "
            "give an absolute path"
        ) from error


def resolve_local_path(path: str | os.PathLike[str]) -> Path:
    """Return a user's path of a local checkpoint directory as an absolute path.

    Raises:
        ConfigError: it is a URL, empty, or relative to a deleted directory.
    """
    expect_path("path", path)
    if is_url(path) and not _LOCAL.match(str(path)):
        raise ConfigError(f"path {str(path)!r}: expected a directory of the local file system")
    return resolve_checkpoint_path(path)


def resolve_checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return a user's path of a checkpoint directory as a URL or an absolute path.

    Raises:
        ConfigError: it is empty, a malformed URL, or relative to a deleted directory.
    """
    expect_path("path", path)
    resolved = expand_path(path)
    if isinstance(resolved, RemotePath):
        return resolved
    if not os.fspath(path):
        raise ConfigError(f"path {os.fspath(path)!r}: expected a directory of the local file system, or a URL")
    return to_absolute(resolved)


def find_file_above(path: Path) -> Path | None:
    """Return the nearest parent of a path that exists and is not a directory; None if there is none."""
    return next((above for above in path.parents if os.path.lexists(above) and not above.is_dir()), None)


def explain_absence(path: Path) -> str:
    """Return why a path does not exist, as the end of a sentence."""
    file = find_file_above(path)
    return "does not exist" if file is None else f"leads through '{file}', which is no directory"


def require_checkpoint_path(path: str | os.PathLike[str] | None) -> Path:
    """Return the path of a checkpoint to read; its existence is not checked.

    Raises:
        CheckpointNotFound: the path is None.
        ConfigError: the path is empty.
    """
    if path is None:
        raise CheckpointNotFound(
            "no complete checkpoint: the path is None, as `dsq_ckpt.latest(run)` is for a run without one; check for "
            "None and begin a new run, or name a checkpoint directory"
        )
    return resolve_checkpoint_path(path)
