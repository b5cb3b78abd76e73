"""A checkpoint as a nested state dict, without a state dict to load into."""

from __future__ import annotations

import os
from typing import Any

from dsq_ckpt.convert.export import OpenedCheckpoint
from dsq_ckpt.storage.refinement import RefinementOption


def read_checkpoint(
    source: str | os.PathLike[str], *, refinement: RefinementOption = "auto", allow_pickle: bool = False
) -> dict[str, Any]:
    """Return the saved nested state dict, with whole tensors on the CPU.

    Args:
        source: a checkpoint directory.
        refinement: as in `dsq_ckpt.load`.
        allow_pickle: unpickle objects of any class.
    """
    with OpenedCheckpoint(source, refinement, None, done="read") as opened:
        return opened.to_nested(allow_pickle)
