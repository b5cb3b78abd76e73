"""`SavePipeline`: the steps of one save on one rank.

     1 agree      coordinator: choose the previous checkpoint and the parent                    -> SaveContext
     2 quantize   collective: sketch, one all-reduce, choose the configuration, quantize lazily -> QuantizedState
     3 write      each rank: write its base and refinement file                                 -> RankResult
     4 commit     coordinator: write the index, then manifest.json                              -> CommitResult
     5 retire     coordinator: drop the refinement of older checkpoints
     6 announce   coordinator: log the checkpoint and call the caller's `on_save`
     discard      coordinator, after a failed step: restore the directory to its former state

The driver of the steps defines how ranks communicate between them: through DCP's plans (`dsq_ckpt.dcp`), or through a
communicator (`engine.collective`: DeepSpeed, MPI, gradient logs, `compress`).
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
from dsq_ckpt.engine.commit import CommitResult, SaveContents, commit
from dsq_ckpt.engine.consistency import RankSettings
from dsq_ckpt.engine.context import SaveContext, make_context
from dsq_ckpt.engine.history import ChunkCache, KnownCheckpoint
from dsq_ckpt.engine.local_state import LocalItems
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.engine.quantizing import QuantizedState, quantize_state
from dsq_ckpt.engine.result import SaveResult, announce
from dsq_ckpt.engine.retention import retire
from dsq_ckpt.engine.writing import RankResult, write_rank
from dsq_ckpt.errors import DSQError
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.frozen_tensors import ChangeWatch
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.plan import QuantizationPlan, plan_as_configured
from dsq_ckpt.quantization.restored_values import load_counts, record_load_counts
from dsq_ckpt.storage.atomic_io import is_hidden
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.manifest_requests import one_request_each
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.target_directory import TargetDirectory, refuse_target


class SavePipeline:
    """The steps of one save. An instance serves one save only.

    Args:
        path: directory of the checkpoint.
        options: arguments of the save.

    Attributes:
        started: start of the save, in seconds since the epoch.
        context: context of the save; None until the ranks agreed on it.
        plan: quantization plan; None until the state is quantized.
    """

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self.path, self.options, self.started = path, options, time.time()
        self.context: SaveContext | None = None
        self.plan: QuantizationPlan | None = None
        self._target: TargetDirectory | None = None
        self._parent: Manifest | None = None
        """Manifest of the parent, kept because the parent may be removed once its files are linked."""
        self._manifest: Manifest | None = None
        self._unquantized_names: set[str] = set()
        """Names of tensors that are not quantized on this rank."""
        self._watch = ChangeWatch()
        self._process_id = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # A background process only writes the chosen plan; the policy itself needs the model of the training process.
        return {**self.__dict__, "options": replace(self.options, policy=plan_as_configured), "_loads": load_counts()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        record_load_counts(state.pop("_loads"))
        self.__dict__.update(state)

    @property
    def settings(self) -> RankSettings:
        """Path and configuration of this rank; they must be equal on all ranks."""
        return RankSettings.of(self.path, self.options.config)

    def workers(self) -> Workers:
        """Return a context manager over the worker threads of this save."""
        storage = self.options.config.storage
        return Workers(storage.thread_count(), storage.block_elements)

    @one_request_each()
    def agree(
        self, ranks: int, layouts: Iterable[Layout], *, attached: bool = False, staged: bool = False,
        save_id: str | None = None,
    ) -> SaveContext:
        """Choose the previous checkpoint and the parent, before any rank writes; on the coordinator.

        Args:
            ranks: number of ranks that save.
            layouts: layouts of all ranks.
            attached: whether files of other formats lie beside the checkpoint's own.
            staged: whether the state is only staged now; `resume` must then be called before any file is written.
            save_id: id of the save; None: a new one.

        Raises:
            CheckpointExists, SaveFailed: nothing can be written at the path.
            CheckpointNotFound, CorruptCheckpoint: a parent named by the caller cannot be read.
        """
        self._check_target(attached)
        if self._process_id == os.getpid():  # DCP's background process does not know the checkpoints of its parent
            other_jobs.warn_of_other_job(self.path, ranks)
        context = make_context(self.path, self.options, ranks, layouts)
        context = replace(context, started=self.started, save_id=save_id or context.save_id)
        return context if staged else self._claim_target(context)

    def resume(self, context: SaveContext) -> SaveContext:
        """Continue in the background with the context that was made when the state was staged.

        Raises:
            CheckpointExists, SaveFailed: as in `agree`.
        """
        self._check_target(False)
        return self._claim_target(context)

    def quantize(
        self, context: SaveContext, local: LocalItems, comm: Communicator, workers: Workers
    ) -> QuantizedState:
        """Sketch, sum over ranks, choose the configuration and quantize lazily; collective over `comm`."""
        workers = workers.for_elements(_count_elements(item.key for item in (*local.items, *local.replicas)))
        state = quantize_state(self.options, context, local, comm, workers)
        self.plan, self._watch = state.plan, state.watch
        self._unquantized_names = {item.key.fqn for item in state.unquantized}
        return state

    @no_autocast()
    def write(self, context: SaveContext, rank: int, state: QuantizedState, workers: Workers) -> RankResult:
        """Write the files of this rank; see `write_rank`."""
        self.plan = state.plan
        workers = workers.for_elements(_count_elements(state.items))
        result, cache = write_rank(self.path, context, rank, state, workers, self.options.history)
        if not state.is_staged:
            self.add_to_history(context, cache)
        elif (checkpoint := self.options.history.find(context.save_id)) is not None:
            checkpoint.cache.refs |= cache.refs
            checkpoint.cache.refinement |= cache.refinement
            checkpoint.cache.back_off = cache.back_off
        return result

    def add_to_history(self, context: SaveContext, cache: ChunkCache) -> None:
        """Add the checkpoint to the history as pending, with the chunks that the next save is coded against."""
        parent = None if context.parent is None else context.parent.save_id
        shared_parent = parent if context.reuses_parent else None
        new = KnownCheckpoint(
            context.save_id, self.path.absolute(), context.layout.shapes, cache, shared_parent=shared_parent,
            lossy=context.layout.weights() - self._unquantized_names, watch=self._watch,
        )
        self.options.history.add_pending(new, context.previous, parent)

    def commit(self, context: SaveContext, contents: SaveContents) -> CommitResult:
        """Write index and manifest once every rank has written; see `commit`."""
        assert self.plan is not None
        committed = commit(self.path, self.options, context, contents, self.plan, self._parent)
        self._target = None  # the checkpoint is complete: nothing is left to discard
        self._manifest = committed.manifest
        self.options.history.add_committed(self.path, context.save_id, committed.model)
        return committed

    def retire(self) -> None:
        """Drop the refinement of older checkpoints, once the commit is on the device.

        A checkpoint with a hidden name is skipped; its publisher drops them.
        """
        if not is_hidden(self.path.name):
            retire(self.path, self.options.config)

    def announce(self) -> None:
        """Log the committed checkpoint and call `on_save`, once the save cannot fail; no effect on other ranks."""
        manifest = self._manifest
        if manifest is not None:
            announce(self.path, lambda: SaveResult.of(self.path, manifest), self.options.on_save)

    def discard(self) -> None:
        """Remove the files of a failed save, once no rank writes any more; no effect on other ranks."""
        target, self._target = self._target, None
        if target is not None:
            target.discard()

    def _check_target(self, attached: bool) -> None:
        refuse_target(self.path, self.options.overwrite, attached=attached)
        self._target = TargetDirectory(self.path)

    def _claim_target(self, context: SaveContext) -> SaveContext:
        assert self._target is not None
        self._parent = None
        if context.parent is not None:
            with suppress(DSQError):  # it was removed; the steps that need its files raise
                manifest = Manifest.read(expand_path(context.parent.path))
                self._parent = manifest if manifest.save_id == context.parent.save_id else None
        self._target.claim(context.save_id, self._parent)
        self.context = context
        return context


def _count_elements(keys: Iterable[ChunkKey]) -> int:
    return sum(math.prod(key.shape) for key in keys)
