"""`SaveContext`: the decisions of the coordinator about a save, made before any rank reads its tensors."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.engine import chain
from dsq_ckpt.engine.history import ParentRef, SaveHistory
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.engine.resume_limits import check_resume_limit, warn_of_uncounted_resumes
from dsq_ckpt.errors import DSQError
from dsq_ckpt.quantization.layout import Layout, ParentModel
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.runs import get_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveContext:
    """The decisions that all ranks of a save follow; plain data, sent in DCP's plans.

    Attributes:
        save_id: id of the save, of 16 hexadecimal digits.
        ranks: number of ranks that save.
        previous: the previous checkpoint of the run.
        parent: the checkpoint that this one is coded against; None for a keyframe.
        model: codebooks and scales of the parent.
        layout: the lossy tensors of all ranks, and how each is stored.
        exact: whether everything is stored exactly, whatever the configuration says; see `check_resume_limit`.
        lossy_resumes: number of restores of the run from a lossy checkpoint before.
        started: start of the save on the coordinator, in seconds since the epoch.
        refines_parent: whether refinement may be stored as the difference to the parent's, which is kept.
        reuses_parent: whether the next save is coded against the same parent; the codes of chunks that have a record
            in the parent are then not cached.
        new_weights: names of weights that are lossy and were not lossy in the previous checkpoint; empty unless this
            process saved that.
    """

    save_id: str
    ranks: int
    previous: ParentRef | None
    parent: ParentRef | None
    model: ParentModel | None
    layout: Layout
    exact: bool = False
    lossy_resumes: int = 0
    started: float = 0.0
    reuses_parent: bool = False
    refines_parent: bool = False
    new_weights: frozenset[str] = frozenset()


def make_context(path: Path, options: SaveOptions, ranks: int, layouts: Iterable[Layout]) -> SaveContext:
    """Choose the previous checkpoint and the parent of a save; on the coordinator.

    Only the coordinator reads the parent's codebooks, because they define the shape of the all-reduce.

    Args:
        path: directory of the new checkpoint.
        options: options of the save.
        ranks: number of ranks that save.
        layouts: layouts of all ranks.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: a parent named by the caller cannot be read.
    """
    layout = Layout.union(layouts)
    siblings = options.config.delta.siblings
    lineage = chain.find_lineage(path, options.parent, layout.shapes, options.history, siblings)
    search = options.config.search
    if lineage.previous is None and (search.max_lossy_resumes, search.max_run_loss) != (None, None):
        warn_of_uncounted_resumes(get_run(path), layout.shapes, options.history)
    exact = check_resume_limit(lineage.lossy_resumes, options.config)
    if exact is not None:
        warn(exact)

    differs = options.config.refinement.stores_differences

    def with_parent(parent: ParentRef | None) -> SaveContext:
        model = None if parent is None else _load_parent_model(parent, layout, options.history)
        return SaveContext(
            uuid.uuid4().hex[:16], ranks, lineage.previous, parent, model, layout, exact is not None,
            lineage.lossy_resumes, reuses_parent=parent is not None and 0 < parent.position < siblings,
            new_weights=_find_new_weights(layout, lineage.previous, options.history),
            refines_parent=parent is not None and differs and chain.has_refinement(path, parent),
        )

    if exact is not None:
        return with_parent(None)
    try:
        parent = chain.choose_parent(lineage.candidate, options.parent, options.config)
        logger.debug("%s: %s", path.name, "a keyframe" if parent is None else f"a delta against '{parent.path}'")
        return with_parent(parent)
    except DSQError as error:
        if options.parent != "auto":
            raise
        warn(f"the parent checkpoint cannot be read; writing a keyframe instead of a delta: {error}")
        return with_parent(None)


def _find_new_weights(layout: Layout, previous: ParentRef | None, history: SaveHistory) -> frozenset[str]:
    checkpoint = None if previous is None else history.find(previous.save_id)
    return frozenset() if checkpoint is None or checkpoint.lossy is None else layout.weights() - checkpoint.lossy


def _load_parent_model(parent: ParentRef, layout: Layout, history: SaveHistory) -> ParentModel:
    cached = history.find(parent.save_id)
    with Checkpoint(expand_path(parent.path), lazy=True) as checkpoint:
        if cached is None or cached.model is None or checkpoint.manifest.save_id != parent.save_id:
            model = checkpoint.to_parent_model()
        else:
            model = cached.model
            checkpoint.read_index_bytes()  # checks the index, which a load of the parent needs
        # Codebooks of values do not fit differences, and differences of two saves have different magnitudes.
        return ParentModel({}, {}, parent.depth) if layout.residual else model.restrict_to(layout)
