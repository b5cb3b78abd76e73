"""Targets of saves and exports: they appear complete or not at all, and never in place of something unasked."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dsq_ckpt.container import sync_directory
from dsq_ckpt.errors import CheckpointExists, SaveFailed
from dsq_ckpt.manifest import is_complete


def refuse(goal: Path, overwrite: bool) -> None:
    """Nothing is replaced unasked.

    Raises:
        CheckpointExists: the target exists, and is not to be overwritten.
    """
    if os.path.lexists(goal) and not overwrite:
        raise CheckpointExists(f"'{goal}' exists; choose another target or overwrite it (--overwrite)")


def refuse_checkpoint(path: Path, overwrite: bool) -> None:
    """No checkpoint is replaced unasked; what an interrupted save left is no checkpoint.

    Raises:
        CheckpointExists: a complete checkpoint is there, and is not to be overwritten.
        SaveFailed: something is there that is no directory.
    """
    if is_complete(path) and not overwrite:
        raise CheckpointExists(
            f"'{path}' holds a complete checkpoint; choose another path, or overwrite it (overwrite=True, --overwrite)"
        )
    if os.path.lexists(path) and not path.is_dir():
        raise SaveFailed(f"'{path}' exists and is not a directory; choose another path for the checkpoint")


@contextmanager
def temporary(goal: Path) -> Iterator[Path]:
    """A hidden name beside the target, so that the last rename stays on one file system; gone afterwards."""
    goal.parent.mkdir(parents=True, exist_ok=True)
    path = goal.with_name(f".{goal.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield path
    finally:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def publish(stream: IO[bytes], hidden: Path, goal: Path) -> None:
    """Flush a finished file to the device and give it its name."""
    stream.flush()
    os.fsync(stream.fileno())
    os.replace(hidden, goal)
    sync_directory(goal.parent)


def replace_directory(hidden: Path, goal: Path) -> None:
    """Rename a directory into place; an old one steps aside first, because directories cannot be replaced."""
    aside = goal.with_name(f".{goal.name}.{uuid.uuid4().hex[:8]}.old")
    old = os.path.lexists(goal)
    if old:
        os.rename(goal, aside)
    try:
        os.rename(hidden, goal)
    except OSError:
        if old:
            os.rename(aside, goal)
        raise
    sync_directory(goal.parent)
    if old:
        shutil.rmtree(aside)
