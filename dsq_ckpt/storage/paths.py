"""Paths that users give."""

from __future__ import annotations

import os
from pathlib import Path

from dsq_ckpt.core.arguments import expect_path
from dsq_ckpt.errors import CheckpointNotFound, ConfigError


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave, with `~` and `~user` replaced by the home directory."""
    return Path(os.path.expanduser(path))


def absolute(path: Path) -> Path:
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


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint directory that a user named, as an absolute path.

    Raises:
        ConfigError: it is a URL, or empty, or relative to a directory that was deleted.
    """
    expect_path("path", path)
    text = os.fspath(path)
    if "://" in text or not text:
        raise ConfigError(f"path {text!r}: expected a directory of the local file system")
    return absolute(expanded(path))


def existing_path(path: str | os.PathLike[str] | None) -> Path:
    """Return the directory of a checkpoint to be read; whether it exists is not checked.

    Raises:
        CheckpointNotFound: it is None.
        ConfigError: it is a URL, or empty.
    """
    if path is None:
        raise CheckpointNotFound(
            "no complete checkpoint: the path is None, as `dsq_ckpt.latest(run)` is for a run without one; check for "
            "None and begin a new run, or name a checkpoint directory"
        )
    return local_path(path)
