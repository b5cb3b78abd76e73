"""The argument `refinement` of loads and exports."""

from __future__ import annotations

import os
from typing import Literal

from dsq_ckpt.errors import CheckpointNotFound, ConfigError
from dsq_ckpt.storage.manifest import Manifest

RefinementOption = Literal["auto"] | bool

_BASE_HINT = "pass refinement=False for the base layer alone (`dsq export --refinement base`)"


def check_refinement(refinement: RefinementOption) -> RefinementOption:
    """Return the argument `refinement` unchanged.

    Raises:
        ConfigError: it is not True, False or "auto".
    """
    if refinement is not True and refinement is not False and refinement != "auto":
        raise ConfigError(f"refinement is {refinement!r}, expected True, False (the base layer alone) or 'auto'")
    return refinement


def uses_refinement(manifest: Manifest, refinement: RefinementOption, path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is read with its refinement layer.

    Raises:
        CheckpointNotFound: `refinement` is True and a checkpoint with quantized tensors has no refinement layer.
    """
    state = manifest.refinement
    if refinement is True and state == "none" and manifest.groups:
        raise CheckpointNotFound(
            f"'{path}' has no refinement layer, it was saved without one; save with refinement_bits above 0, or "
            + _BASE_HINT
        )
    if refinement is True and state == "dropped":
        raise CheckpointNotFound(
            f"'{path}' has no refinement layer any more: it dropped its refinement when a newer checkpoint was "
            f"committed (refinement.keep_last); read the newest checkpoint, which `dsq log` shows, or {_BASE_HINT}"
        )
    return refinement is not False and state == "kept"
