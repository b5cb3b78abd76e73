"""Removals that Lightning asks for while a thread still saves the checkpoint that is to take over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.integrations.lightning.placing import is_there, remove
from dsq_ckpt.storage.runs import get_run


class Removals:
    """Checkpoints to remove: at once, or after the next save where a thread saves.

    `AsyncCheckpointIO` leaves a save to a thread, and then asks at once for the removal of the checkpoint before it,
    which the save is coded against, and which is the only one until the save is complete.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saving: Path | None = None  # by a thread
        self._newest: dict[Path, Path] = {}  # saved by a thread, by run directory
        self._later: set[Path] = set()

    @contextmanager
    def saving(self, path: Path) -> Iterator[None]:
        """Save a checkpoint in the block; then remove what it takes over from."""
        in_thread = threading.current_thread() is not threading.main_thread()
        with self._lock:
            self._saving = path if in_thread else None
            self._later.discard(path)
        try:
            yield
        finally:
            with self._lock:
                self._saving = None
        with self._lock:
            self._newest.pop(get_run(path), None)
            if in_thread:
                self._newest[get_run(path)] = path
            gone = self._later - set(self._newest.values())
            self._later -= gone
        for one in gone:
            remove(one)

    def ask(self, path: Path) -> None:
        """Remove a checkpoint, now or later."""
        with self._lock:
            if self._saving is not None and path != self._saving and not is_there(path):
                warn(f"'{path}' is to be removed before it is saved, and will stay: saves take longer than training")
                return
            if self._saving is not None or path in self._newest.values():
                self._later.add(path)
                return
        remove(path)
