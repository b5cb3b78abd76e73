"""Checkpoints that are removed or saved over while they are read, since training goes on."""

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

ConcurrentChange = Literal["removed", "replaced"]
REMOVAL_TIMEOUT = 1.0
"""Seconds in which a removal that was seen half done is expected to come to the manifest."""
POLL_INTERVAL = 0.05
"""Seconds between two looks at it."""


def detect_change(
    directory: Path, save_id: str | None, manifest: Manifest | None = None, deadline: float = -math.inf
) -> ConcurrentChange | None:
    """Return whether a checkpoint was removed or replaced; None: it is there, or that cannot be told.

    Programs that remove a directory remove its files in any order: for a moment the manifest is there, and others are
    not.

    Args:
        directory: its directory.
        save_id: its save id; None: its manifest could not be read.
        manifest: its manifest as it was read; while files that it names are not there, wait for it to go too.
        deadline: wait until then, by the monotonic clock.
    """
    while True:
        found = _compare_save_id(directory, save_id)
        if found is not None or manifest is None or time.monotonic() > deadline:
            return found
        if not find_missing_files(directory, manifest):
            return _compare_save_id(directory, save_id)
        time.sleep(POLL_INTERVAL)


def _compare_save_id(directory: Path, save_id: str | None) -> ConcurrentChange | None:
    try:
        return None if Manifest.read(directory).save_id == save_id else "replaced"
    except CheckpointNotFound:
        # A link that leads nowhere is damage, and not removed.
        there = not is_remote(directory) and os.path.lexists(directory / MANIFEST)
        return None if there else "removed"
    except DSQError:
        return None


def find_missing_files(directory: Path, manifest: Manifest, *, of_others: bool = False) -> list[str]:
    """Return the names of the files of a checkpoint that are not there.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        of_others: look only at those that lie in other checkpoints of the run.
    """
    files = {file.path_in(directory): file.name for file in manifest.files if file.held_by or not of_others}
    return [files[path] for path, size in read_sizes(files).items() if isinstance(size, FileNotFoundError)]
