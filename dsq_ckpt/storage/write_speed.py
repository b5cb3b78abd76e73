"""Speed at which this process writes data files to directories."""

from __future__ import annotations

_MOST_BYTES = 1 << 30
"""Bytes after which what was measured before counts half."""


class WriteSpeed:
    """Mean speed of the last files, with the time of their flushes.

    Threads take no lock, which a fork could leave held: of two files that end at once one may not be counted.
    """

    def __init__(self) -> None:
        self._totals = 0.0, 0.0

    def add(self, size: int, seconds: float) -> None:
        """Count a file."""
        all_bytes, all_seconds = self._totals
        kept = 0.5 if all_bytes > _MOST_BYTES else 1.0
        self._totals = kept * all_bytes + size, kept * all_seconds + seconds

    def get(self) -> float | None:
        """Return bytes per second; None before the first file."""
        all_bytes, all_seconds = self._totals
        return all_bytes / all_seconds if all_bytes and all_seconds else None


write_speed = WriteSpeed()
