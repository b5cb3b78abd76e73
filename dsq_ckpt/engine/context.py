"""`SaveContext`: the decisions of the coordinator about a save, before any rank reads its tensors."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.notices import warn
from dsq_ckpt.engine import chain
from dsq_ckpt.engine.chain import Lineage
from dsq_ckpt.engine.history import ParentRef, SaveHistory
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.errors import DSQError
from dsq_ckpt.quantization.layout import Layout, ParentModel
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.paths import expand_path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveContext:
    """The decisions that all ranks of a save follow; plain data, which travels in DCP's plans.

    Attributes:
        save_id: id of the save, of 16 hexadecimal digits.
        ranks: number of ranks that save.
        previous: the checkpoint that it comes after in its run.
        parent: the checkpoint that it is coded against; None for a keyframe.
        model: codebooks and scales of the parent.
        layout: the lossy tensors of all ranks, and how each is stored.
        exact: whether everything is stored exactly, whatever the configuration says; see `too_many_resumes`.
        lossy_resumes: how often the run was restored from a lossy checkpoint before.
        started: when the save began on the coordinator, in seconds since the epoch.
        shared: whether the next save is to be coded against the same parent, so that codes are not kept that have one.
        appeared: names of weights that are lossy, and were not in the previous checkpoint, where this process saved it.
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
    shared: bool = False
    appeared: frozenset[str] = frozenset()


def negotiate(path: Path, options: SaveOptions, ranks: int, layouts: Iterable[Layout]) -> SaveContext:
    """Decide what a checkpoint comes after and what it is coded against; on the coordinator.

    The coordinator alone reads the parent's codebooks, since the shape of the all-reduce follows from them.

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
    lineage = chain.lineage(path, options.parent, layout.shapes, options.history, siblings)
    exact = too_many_resumes(lineage.lossy_resumes, options.config)
    if exact is not None:
        warn(exact)

    def context(lineage: Lineage, parent: ParentRef | None) -> SaveContext:
        model = None if parent is None else _model(parent, layout, options.history)
        return SaveContext(
            uuid.uuid4().hex[:16], ranks, lineage.previous, parent, model, layout, exact is not None,
            lineage.lossy_resumes, shared=parent is not None and 0 < parent.place < siblings,
            appeared=_appeared(layout, lineage.previous, options.history),
        )

    if exact is not None:
        return context(lineage, None)
    try:
        parent = chain.choose_parent(lineage.base, options.parent, options.config)
        logger.debug("%s: %s", path.name, "a keyframe" if parent is None else f"a delta against '{parent.path}'")
        return context(lineage, parent)
    except DSQError as error:
        if options.parent != "auto":
            raise
        warn(f"the parent checkpoint cannot be read; writing a keyframe instead of a delta: {error}")
        return context(lineage, None)


def too_many_resumes(resumes: int, config: DSQConfig) -> str | None:
    """Return a warning if the run was restored from lossy state so often that it is to be stored exactly from now on.

    None: it was not.
    """
    limit = config.search.max_lossy_resumes
    if limit is None or resumes < limit:
        return None
    return (
        f"the run was restored from lossy state {resumes} time(s), and search.max_lossy_resumes is {limit}: weights "
        "and optimizer state of this checkpoint are stored exactly"
    )


def _appeared(layout: Layout, previous: ParentRef | None, history: SaveHistory) -> frozenset[str]:
    known = None if previous is None else history.find(previous.save_id)
    return frozenset() if known is None or known.lossy is None else layout.weights() - known.lossy


def _model(parent: ParentRef, layout: Layout, history: SaveHistory) -> ParentModel:
    known = history.find(parent.save_id)
    with Checkpoint(expand_path(parent.path), lazy=True) as checkpoint:
        if known is None or known.model is None or checkpoint.manifest.save_id != parent.save_id:
            model = checkpoint.to_parent_model()
        else:
            model = known.model
            checkpoint.read_index_bytes()  # which a load of the parent needs, if not this save
        # Codebooks of values do not fit differences, and those of other differences have other sizes.
        return ParentModel({}, {}, parent.depth) if layout.residual else model.usable_for(layout)
