"""Removal of checkpoints that is deferred while a thread saves their successor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.integrations.lightning.checkpoint_paths import path_exists, remove_checkpoint
from dsq_ckpt.storage.runs import get_run


class DeferredRemovals:
    """A queue of checkpoints to remove: at once, or after the next save if a thread saves.

    `AsyncCheckpointIO` saves in a thread, and asks for the removal of the previous checkpoint while the thread still
    saves. The previous checkpoint is the parent of the new one, and the only complete checkpoint until then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Path | None = None  # the path that a thread saves to
        self._newest_by_run: dict[Path, Path] = {}  # newest checkpoint that a thread saved, by run directory
        self._deferred: set[Path] = set()

    @contextmanager
    def defer_during_save(self, path: Path) -> Iterator[None]:
        """Defer removals while a checkpoint is saved in this context; then remove its predecessors."""
        in_thread = threading.current_thread() is not threading.main_thread()
        with self._lock:
            self._current = path if in_thread else None
            self._deferred.discard(path)
        try:
            yield
        finally:
            with self._lock:
                self._current = None
        with self._lock:
            self._newest_by_run.pop(get_run(path), None)
            if in_thread:
                self._newest_by_run[get_run(path)] = path
            due = self._deferred - set(self._newest_by_run.values())
            self._deferred -= due
        for due_path in due:
            remove_checkpoint(due_path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, now or after the next save."""
        with self._lock:
            if self._current is not None and path != self._current and not path_exists(path):
                warn(f"'{path}' is to be removed before it is saved, and will stay: saves take longer than training")
                return
            if self._current is not None or path in self._newest_by_run.values():
                self._deferred.add(path)
                return
        remove_checkpoint(path)
