"""Speed at which this process writes data files to directories."""

from __future__ import annotations

import os
import threading

_MOST_BYTES = 1 << 30
"""Bytes after which what was measured before counts half."""


class WriteSpeed:
    """Mean speed of the last files, with the time of their flushes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._seconds = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Count a file."""
        with self._lock:
            kept = 0.5 if self._bytes > _MOST_BYTES else 1.0
            self._bytes, self._seconds = kept * self._bytes + size, kept * self._seconds + seconds

    def get(self) -> float | None:
        """Return bytes per second; None before the first file."""
        with self._lock:
            return self._bytes / self._seconds if self._bytes and self._seconds else None

    def renew_lock(self) -> None:
        """Replace the lock, which a thread of the parent may have held when this process was forked."""
        self._lock = threading.Lock()


write_speed = WriteSpeed()
os.register_at_fork(after_in_child=write_speed.renew_lock)
