"""Detection of checkpoints that are removed or replaced while they are read, as training continues."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Literal

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.storage.backend import read_sizes
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from dsq_ckpt.storage.manifest_requests import forget

ConcurrentChange = Literal["removed", "replaced"]
REMOVAL_TIMEOUT = 1.0
"""Seconds after which a removal in progress is expected to have removed the manifest."""
POLL_INTERVAL = 0.05
"""Seconds between two checks."""


def detect_change(
    directory: Path, save_id: str | None, manifest: Manifest | None = None, deadline: float = -math.inf
) -> ConcurrentChange | None:
    """Return whether a checkpoint was removed or replaced; None if it exists, or if that is unknown.

    Programs remove the files of a directory in any order, so the manifest may be removed after other files.

    Args:
        directory: directory of the checkpoint.
        save_id: its save id; None: its manifest could not be read.
        manifest: its manifest; while files that it lists are missing, wait for its removal.
        deadline: end of the wait, by the monotonic clock.
    """
    while True:
        change = _compare_save_id(directory, save_id)
        if change is not None or manifest is None or time.monotonic() > deadline:
            return change
        if not find_missing_files(directory, manifest):
            return _compare_save_id(directory, save_id)
        time.sleep(POLL_INTERVAL)


def read_current_checksum(directory: Path, manifest: Manifest, deadline: float = -math.inf) -> str | None:
    """Return the checksum of the manifest now in a directory; empty without one; None if it cannot be read.

    Args:
        directory: directory of a checkpoint.
        manifest: its manifest, as it was read; while that is unchanged and files that it lists are missing, wait for
            its removal.
        deadline: end of the wait, by the monotonic clock.
    """
    checksum = _read_checksum(directory)
    if checksum != manifest.checksum or time.monotonic() > deadline:
        return checksum
    detect_change(directory, manifest.save_id, manifest, deadline)
    return _read_checksum(directory)


def _read_checksum(directory: Path) -> str | None:
    forget()
    try:
        return Manifest.read(directory).checksum
    except CheckpointNotFound:
        return ""
    except DSQError:
        return None


def _compare_save_id(directory: Path, save_id: str | None) -> ConcurrentChange | None:
    forget()
    try:
        return None if Manifest.read(directory).save_id == save_id else "replaced"
    except CheckpointNotFound:
        # A dangling link is damage, not a removal.
        exists = not is_remote(directory) and os.path.lexists(directory / MANIFEST)
        return None if exists else "removed"
    except DSQError:
        return None


def find_missing_files(directory: Path, manifest: Manifest, *, of_others: bool = False) -> list[str]:
    """Return the names of the missing files of a checkpoint.

    Args:
        directory: directory of the checkpoint.
        manifest: its manifest.
        of_others: check only files that lie in other checkpoints of the run.
    """
    files = {file.path_in(directory): file.name for file in manifest.files if file.held_by or not of_others}
    return [files[path] for path, size in read_sizes(files).items() if isinstance(size, FileNotFoundError)]
