"""Descriptors that a process holds of certain files; those of other files come and go with threads of other tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

Identity = tuple[int, int]
"""Device and inode."""


def identity(file: int | str | os.PathLike[str]) -> Identity:
    """Return what a file, given by a descriptor or path, is known by."""
    status = os.stat(file)
    return status.st_dev, status.st_ino


def count_descriptors(files: Collection[Identity]) -> int:
    """Return how many descriptors this process has of these files."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            count += identity(int(name)) in files
    return count
