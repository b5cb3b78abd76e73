"""Restarts of a program in one process, for what saves with the default history and takes no other: integrations."""

from __future__ import annotations

from dsq_ckpt.engine.history import default_history


def begin_new_process() -> None:
    """Let what follows save and load as a new process does, which knows no checkpoint.

    Callers of `save`, `load`, `Compressor` and `DSQStorageWriter` pass a `SaveHistory` instead.
    """
    default_history().clear()
