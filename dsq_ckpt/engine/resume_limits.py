"""Limits on the restores of a run from lossy state, which are counted within one run directory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.notices import warn
from dsq_ckpt.engine.history import SaveHistory, ensure_shapes
from dsq_ckpt.engine.shapes import Shapes, is_continuation
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.manifest import Manifest

_warned_runs: set[Path] = set()


def warn_of_uncounted_resumes(run: Path, shapes: Shapes, history: SaveHistory) -> None:
    """Warn, once for a run directory, if its first save follows a load from another one, whose restores do not count.

    Args:
        run: directory without checkpoints of the state that this process knows.
        shapes: shapes of all tensors of the state, by name.
        history: checkpoints that this process committed or loaded.
    """
    for checkpoint in history.checkpoints():
        if ensure_shapes(checkpoint) and checkpoint.shapes and is_continuation(shapes, checkpoint.shapes):
            break
    else:
        return
    if not checkpoint.loaded or run in _warned_runs:
        return
    with suppress(DSQError):
        manifest = Manifest.read(checkpoint.path)
        if resumes := manifest.lossy_resumes + manifest.lossy:
            _warned_runs.add(run)
            warn(
                "search.max_lossy_resumes and search.max_run_loss count the restores of one directory: "
                f"{resumes} up to that of '{checkpoint.path}' do not count in '{run}'; if this run goes on from there, "
                "save beside it"
            )


def check_resume_limit(resumes: int, config: DSQConfig) -> str | None:
    """Return a warning if the run has had so many lossy restores that it is now stored exactly, else None."""
    limit = config.search.max_lossy_resumes
    if limit is None or resumes < limit:
        return None
    return (
        f"the run was restored from lossy state {resumes} time(s), and search.max_lossy_resumes is {limit}: weights "
        "and optimizer state of this checkpoint are stored exactly"
    )
