"""Number of restores of a run from lossy state.

Manifests record it. A process goes on from the number of what it loaded, in whichever directory that lies: each job of
a run may have a directory of its own, and the checkpoint may be a copy or a backup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.engine.history import KnownCheckpoint, ParentRef, SaveHistory, ensure_shapes
from dsq_ckpt.engine.shapes import Shapes, count_shared_elements, has_optimizer_state, is_continuation


def count_resumes(run: Path, shapes: Shapes, history: SaveHistory, last: ParentRef | None) -> int:
    """Return the lossy resumes of a state, which may have been loaded from another run directory.

    Args:
        run: run directory that the state is saved to.
        shapes: shapes of its tensors.
        history: checkpoints that this process committed or loaded.
        last: last checkpoint of the state in the run directory; only loads since then count besides.
    """
    if last is not None:
        newer = takewhile(lambda checkpoint: checkpoint.save_id != last.save_id, history.checkpoints())
        loaded = [checkpoint for checkpoint, _ in _iter_origins(shapes, newer) if checkpoint.loaded]
        return max([last.lossy_resumes, *(checkpoint.lossy_resumes for checkpoint in loaded)])
    origin, elements = (0, 0), count_shared_elements(shapes, shapes)
    for checkpoint, shared in _iter_origins(shapes, history.checkpoints()):
        if shared > origin[0]:  # a part of the state may have been saved by itself since
            origin = shared, checkpoint.lossy_resumes
        if shared == elements:
            break
    # In the run itself every loaded state counts, since tensors may have been renamed.
    counts = [checkpoint.lossy_resumes for checkpoint in history.checkpoints(run) if checkpoint.loaded]
    return max([origin[1], *counts])


def _iter_origins(
    shapes: Shapes, checkpoints: Iterable[KnownCheckpoint]
) -> Iterator[tuple[KnownCheckpoint, int]]:
    """Yield the checkpoints that a state may continue, with the numbers of shared elements.

    A checkpoint whose weights alone were loaded, or that has no optimizer state, is not continued by a state that has:
    a new optimizer begins a new run from these weights.
    """
    has_moments = has_optimizer_state(shapes)
    for checkpoint in checkpoints:
        if not ensure_shapes(checkpoint) or checkpoint.shapes is None:
            continue
        is_new_run = checkpoint.weights_alone or (has_moments and not has_optimizer_state(checkpoint.shapes))
        if not is_new_run and is_continuation(shapes, checkpoint.shapes):
            yield checkpoint, count_shared_elements(shapes, checkpoint.shapes)


def check_resume_limit(resumes: int, config: DSQConfig) -> str | None:
    """Return a warning if the run has had so many lossy restores that it is now stored exactly, else None."""
    limit = config.search.max_lossy_resumes
    if limit is None or resumes < limit:
        return None
    return (
        f"the run was restored from lossy state {resumes} time(s), and search.max_lossy_resumes is {limit}: weights "
        "and optimizer state of this checkpoint are stored exactly"
    )
