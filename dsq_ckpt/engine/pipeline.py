"""`SavePipeline`: one save, step by step, on one rank.

     1 agree      on the coordinator: what the checkpoint comes after, what it is coded against  -> SaveContext
     2 quantize   collective: sketch, one all-reduce, choose the configuration, quantize lazily  -> QuantizedState
     3 write      on each rank: its base and refinement file                                     -> RankResult
     4 commit     on the coordinator: index, then manifest.json                                  -> Committed
     5 retire     on the coordinator: refinements of older checkpoints are dropped
     6 announce   on the coordinator: the checkpoint is logged, and the caller's `on_save` is called
     discard      on the coordinator, after a step failed: the directory is left as it was found

Who drives the steps decides how ranks talk in between: DCP's plans (`dsq_ckpt.dcp`), or a communicator
(`engine.collective`: DeepSpeed, MPI, gradient logs, `compress`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsq_ckpt.core.autocast import no_autocast
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.engine import other_jobs
from dsq_ckpt.engine.commit import Committed, SaveContents, commit
from dsq_ckpt.engine.consistency import RankSettings
from dsq_ckpt.engine.context import SaveContext, negotiate
from dsq_ckpt.engine.history import ChunkCache, KnownCheckpoint
from dsq_ckpt.engine.local import LocalItems
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.engine.quantizing import QuantizedState, quantize
from dsq_ckpt.engine.result import SaveResult, announce
from dsq_ckpt.engine.retention import retire
from dsq_ckpt.engine.writing import RankResult, write_rank
from dsq_ckpt.errors import DSQError
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.frozen_tensors import ChangeWatch
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.plan import QuantizationPlan, as_configured
from dsq_ckpt.quantization.restored_values import load_counts, record_load_counts
from dsq_ckpt.storage.atomic_io import is_hidden
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.target_directory import TargetDirectory, refuse_target


class SavePipeline:
    """The steps of one save; an instance serves one.

    Args:
        path: directory of the checkpoint.
        options: arguments of the save.

    Attributes:
        started: when the save began, in seconds since the epoch.
        context: context of the save, once the ranks agreed on it.
        plan: how the state is stored, once it is quantized.
    """

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self.path, self.options, self.started = path, options, time.time()
        self.context: SaveContext | None = None
        self.plan: QuantizationPlan | None = None
        self._target: TargetDirectory | None = None
        self._parent: Manifest | None = None
        """Manifest of the checkpoint that it is coded against, which may be removed once its files are linked."""
        self._manifest: Manifest | None = None
        self._exact: set[str] = set()
        """Names of tensors that were not quantized on this rank."""
        self._watch = ChangeWatch()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # A background process only writes what the policy chose; the policy itself looks at the model in training.
        return {**self.__dict__, "options": replace(self.options, policy=as_configured), "_loads": load_counts()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        record_load_counts(state.pop("_loads"))
        self.__dict__.update(state)

    @property
    def settings(self) -> RankSettings:
        """Path and configuration, which must be equal on all ranks."""
        return RankSettings.of(self.path, self.options.config)

    def workers(self) -> Workers:
        """Return the threads of this save; a context manager."""
        storage = self.options.config.storage
        return Workers(storage.thread_count(), storage.block_elements)

    def agree(
        self, ranks: int, layouts: Iterable[Layout], *, attached: bool = False, staged: bool = False,
        save_id: str | None = None,
    ) -> SaveContext:
        """Decide what the checkpoint comes after and what it is coded against; before any rank writes.

        Args:
            ranks: number of ranks that save.
            layouts: layouts of all ranks.
            attached: whether files of other formats lie beside the checkpoint's own.
            staged: whether the state is only staged now; `resume` comes before any file is written.
            save_id: id of the save, where it was given out already.

        Raises:
            CheckpointExists, SaveFailed: nothing can be written at the path.
            CheckpointNotFound, CorruptCheckpoint: a parent named by the caller cannot be read.
        """
        self._land(attached)
        if self._process == os.getpid():  # DCP's background process does not know what the others saved
            other_jobs.look(self.path, ranks)
        context = negotiate(self.path, self.options, ranks, layouts)
        context = replace(context, started=self.started, save_id=save_id or context.save_id)
        return context if staged else self._claim(context)

    def resume(self, context: SaveContext) -> SaveContext:
        """Continue in the background with the context that was agreed on when the state was staged.

        Raises:
            CheckpointExists, SaveFailed: as in `agree`.
        """
        self._land(False)
        return self._claim(context)

    def quantize(
        self, context: SaveContext, local: LocalItems, comm: Communicator, workers: Workers
    ) -> QuantizedState:
        """Sketch, sum over ranks, choose the configuration, quantize lazily; collective over `comm`."""
        workers = workers.for_elements(_elements(item.key for item in (*local.items, *local.replicas)))
        state = quantize(self.options, context, local, comm, workers)
        self.plan, self._watch = state.plan, state.watch
        self._exact = {item.key.fqn for item in state.unquantized}
        return state

    @no_autocast()
    def write(self, context: SaveContext, rank: int, state: QuantizedState, workers: Workers) -> RankResult:
        """Write the files of this rank; see `write_rank`."""
        self.plan = state.plan
        workers = workers.for_elements(_elements(state.items))
        result, cache = write_rank(self.path, context, rank, state, workers, self.options.history)
        if not state.staged:
            self.remember(context, cache)
        elif (known := self.options.history.find(context.save_id)) is not None:
            known.cache.refs |= cache.refs
        return result

    def remember(self, context: SaveContext, cache: ChunkCache) -> None:
        """Keep the chunks that the next save is coded against, once this one is committed."""
        parent = None if context.parent is None else context.parent.save_id
        shares = parent if context.shared else None
        new = KnownCheckpoint(
            context.save_id, self.path.absolute(), context.layout.shapes, cache, shares=shares,
            lossy=context.layout.weights() - self._exact, watch=self._watch,
        )
        self.options.history.add_pending(new, context.previous, parent)

    def commit(self, context: SaveContext, contents: SaveContents) -> Committed:
        """Write index and manifest, once every rank wrote; see `commit`."""
        assert self.plan is not None
        committed = commit(self.path, self.options, context, contents, self.plan, self._parent)
        self._target = None  # from here on there is nothing to discard
        self._manifest = committed.manifest
        self.options.history.add_committed(self.path, context.save_id, committed.model)
        return committed

    def retire(self) -> None:
        """Drop the refinement of older checkpoints, once the commit is on the device.

        Not yet if the checkpoint has a hidden name: whoever gives it its name does that.
        """
        if not is_hidden(self.path.name):
            retire(self.path, self.options.config)

    def announce(self) -> None:
        """Tell of the committed checkpoint, once nothing of the save can fail; without effect on other ranks."""
        manifest = self._manifest
        if manifest is not None:
            announce(self.path, lambda: SaveResult.of(self.path, manifest), self.options.on_save)

    def discard(self) -> None:
        """Remove what a failed save left, once no rank writes any more; without effect on other ranks."""
        target, self._target = self._target, None
        if target is not None:
            target.discard()

    def _land(self, attached: bool) -> None:
        refuse_target(self.path, self.options.overwrite, attached=attached)
        self._target = TargetDirectory(self.path)

    def _claim(self, context: SaveContext) -> SaveContext:
        assert self._target is not None
        self._parent = None
        if context.parent is not None:
            with suppress(DSQError):  # it was removed; what needs its files says so
                found = Manifest.read(expand_path(context.parent.path))
                self._parent = found if found.save_id == context.parent.save_id else None
        self._target.claim(context.save_id, self._parent)
        self.context = context
        return context


def _elements(keys: Iterable[ChunkKey]) -> int:
    return sum(math.prod(key.shape) for key in keys)
