"""`CheckpointLocation`: the path of a writer or reader, which DCP may set."""

from __future__ import annotations

import os
from pathlib import Path

from dsq_ckpt.storage.paths import resolve_checkpoint_path


class CheckpointLocation:
    """A mixin for writers and readers with the path of a checkpoint, which DCP may set at each call.

    Attributes:
        path: the directory or URL of the checkpoint; None: not yet set.
    """

    path: Path | None

    @property
    def checkpoint_id(self) -> str | None:
        return None if self.path is None else str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether checkpoints can be at a path: all local ones, and URLs of fsspec."""
        return "::" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = resolve_checkpoint_path(checkpoint_id)
