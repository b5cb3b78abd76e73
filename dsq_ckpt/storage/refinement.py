"""Whether a checkpoint is read with its refinement layer."""

from __future__ import annotations

import os
from typing import Literal

from dsq_ckpt.errors import CheckpointNotFound, ConfigError
from dsq_ckpt.storage.manifest import Manifest

RefinementOption = Literal["auto"] | bool

_BASE_HINT = "pass refinement=False for the base layer alone (`dsq export --refinement base`)"


def check_refinement(asked: RefinementOption) -> RefinementOption:
    """Return an argument `refinement` as it is.

    Raises:
        ConfigError: it is neither True, nor False, nor "auto".
    """
    if asked is not True and asked is not False and asked != "auto":
        raise ConfigError(f"refinement is {asked!r}, expected True, False (the base layer alone) or 'auto'")
    return asked


def uses_refinement(manifest: Manifest, asked: RefinementOption, path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is read with its refinement layer.

    Raises:
        CheckpointNotFound: the layer is needed and the checkpoint has none; with exact tensors alone it needs none.
    """
    state = manifest.refinement
    if asked is True and state == "none" and manifest.groups:
        raise CheckpointNotFound(
            f"'{path}' has no refinement layer, it was saved without one; save with refinement_bits above 0, or "
            + _BASE_HINT
        )
    if asked is True and state == "dropped":
        raise CheckpointNotFound(
            f"'{path}' has no refinement layer any more: it dropped its refinement when a newer checkpoint was "
            f"committed (refinement.keep_last); read the newest checkpoint, which `dsq log` shows, or {_BASE_HINT}"
        )
    return asked is not False and state == "kept"
