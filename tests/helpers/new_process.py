"""Restarts of a program in one process, for what saves with the default history and takes no other: integrations."""

from __future__ import annotations

import dsq_ckpt


def begin_new_process() -> None:
    """Let what follows save and load as a new process does, which knows no checkpoint.

    Callers of `save`, `load`, `Compressor` and `DSQStorageWriter` pass a `SaveHistory` instead.
    """
    dsq_ckpt.forget()
