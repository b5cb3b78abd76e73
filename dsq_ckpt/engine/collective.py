"""Saves over a `Communicator`: shards of named tensors of every rank are written to one checkpoint directory.

DCP plans and gathers for the storage writer. For DeepSpeed, MPI, gradient logs and `compress` this module does, around
the same `SavePipeline`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dsq_ckpt.core.collector import no_garbage_collection
from dsq_ckpt.core.interrupts import hold_signals, run_pending_handlers
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.core.nesting import Path as NestedPath
from dsq_ckpt.distributed.comm import Communicator, RankUnreachable, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.commit import SaveContents
from dsq_ckpt.engine.consistency import RankSettings, check_same_settings
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.local_state import LocalItems, LocalShard, LocalState, make_items, make_layout
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.engine.pipeline import SavePipeline
from dsq_ckpt.engine.tied import TiedItems
from dsq_ckpt.engine.writing import RankResult
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.plan import QuantizationPlan
from dsq_ckpt.storage import attachment_files, gc
from dsq_ckpt.storage.atomic_io import hidden_name
from dsq_ckpt.storage.container import FileInfo, checksum_file
from dsq_ckpt.storage.index import find_coverage_error


@dataclass
class _RankReport:
    """The result of one rank, sent to the coordinator."""

    result: RankResult
    tensors: dict[str, dict[str, Any]]
    objects: list[str]
    nesting: Nesting
    attachments: list[FileInfo]


@hold_signals()
def save_collectively(
    path: Path, state: Callable[[], LocalState], options: SaveOptions, comm: Communicator
) -> QuantizationPlan:
    """Save the shards of all ranks; collective over `comm`. On return the checkpoint is complete; on error none exists.

    Args:
        path: the checkpoint directory, absolute, on storage that all ranks share.
        state: returns the state of this rank; called within a collective so that its failure reaches the other ranks.
        options: equal on all ranks, except for the configuration keys that `consistency` exempts.
        comm: communicator of the ranks that save.

    Returns:
        The quantization plan of the checkpoint.

    Raises:
        DSQError: on all ranks, if any rank failed; earlier checkpoints are untouched.
    """
    with no_garbage_collection():
        return _CollectiveSave(path, options, comm).run(state)


class _CollectiveSave:
    """One save over a communicator: the steps of its pipeline, and the collectives between them."""

    def __init__(self, path: Path, options: SaveOptions, comm: Communicator) -> None:
        self._pipeline, self._comm = SavePipeline(path, options), comm
        self._path, self._fsync = path, options.config.storage.fsync
        self._state: LocalState
        self._items: LocalItems
        self._temporary_paths: dict[str, Path] = {}
        """Temporary names of this rank's attachments."""

    def run(self, state: Callable[[], LocalState]) -> QuantizationPlan:
        comm, pipeline = self._comm, self._pipeline
        prepared = gather_from_all_ranks(comm, lambda: self._prepare(state))
        check_same_settings([settings for settings, _ in prepared])
        layouts = [layout for _, layout in prepared]
        context: SaveContext | None = None
        try:
            context = gather_from_all_ranks(comm, lambda: None if comm.rank else self._agree(layouts))[0]
            assert context is not None
            reports = gather_from_all_ranks(comm, lambda: self._write(context))
            self._commit(context, reports)
        except BaseException as error:
            if context is not None:
                pipeline.options.history.remove(context.save_id)
            if not isinstance(error, RankUnreachable):  # else other ranks may still write
                pipeline.discard()
            raise
        finally:
            for temporary in self._temporary_paths.values():
                temporary.unlink(missing_ok=True)
        pipeline.options.history.add_committed(self._path, context.save_id)
        pipeline.announce()
        assert pipeline.plan is not None
        return pipeline.plan

    def _prepare(self, state: Callable[[], LocalState]) -> tuple[RankSettings, Layout]:
        options, local = self._pipeline.options, state()
        run_pending_handlers()
        items, replicas = make_items(local.shards, options), make_items(local.replicas, options)
        tied = TiedItems.find(items, replicas)
        self._state = local
        self._items = LocalItems(
            tied.select_stored(items), tied.select_stored(replicas), tied.primary_keys, local.gradients,
            local.objects.items(),
        )
        return self._pipeline.settings, make_layout(
            local.shards, options, bool(local.gradients), objects={**dict.fromkeys(local.objects), **local.settings}
        )

    def _agree(self, layouts: Sequence[Layout]) -> SaveContext:
        attached = bool(self._state.attachments)
        context = self._pipeline.agree(self._comm.size, layouts, attached=attached)
        if attached:
            attachment_files.back_up_plain_tag(self._path, self._fsync)
        return context

    def _write(self, context: SaveContext) -> _RankReport:
        """Quantize and write the files of this rank; write its attachments under temporary names."""
        local, pipeline, rank = self._state, self._pipeline, self._comm.rank
        with pipeline.workers() as workers:
            quantized = pipeline.quantize(context, self._items, self._comm, workers)
            result = pipeline.write(context, rank, quantized, workers)
        run_pending_handlers()
        files = []
        for name, write in local.attachments.items():
            temporary = hidden_name(self._path / name, context.save_id[:8])
            self._temporary_paths[name] = temporary
            attachment_files.write_attachment(temporary, partial(write, save_id=context.save_id), self._fsync)
            files.append(FileInfo(name, *checksum_file(temporary)))
        attachment_files.write_journal(self._path, context.save_id, rank, files, self._fsync)
        nesting = local.nesting if isinstance(local.nesting, Nesting) else Nesting(local.nesting)
        return _RankReport(result, _list_tensors(local.shards), list(local.objects), nesting, files)

    def _commit(self, context: SaveContext, reports: Sequence[_RankReport]) -> None:
        """Publish the attachments, then write index and manifest."""
        comm, contents = self._comm, list[SaveContents]()

        def publish() -> None:
            contents.append(_merge_reports(reports))  # fails on all ranks alike, before any file is renamed
            attachment_files.publish_attachments(self._path, self._temporary_paths, self._fsync)

        def commit() -> None:
            if comm.rank == 0:
                self._commit_on_coordinator(context, contents[0] if contents else _merge_reports(reports))

        try:
            if any(report.attachments for report in reports):
                run_on_all_ranks(comm, publish)
            run_on_all_ranks(comm, commit)
        except BaseException:
            if comm.rank == 0:
                with suppress(OSError):
                    attachment_files.restore_backups(self._path, context.save_id)
            raise

    def _commit_on_coordinator(self, context: SaveContext, contents: SaveContents) -> None:
        committed = self._pipeline.commit(context, contents)
        if not committed.flushed:
            return
        attachment_files.remove_backups(self._path, [file.name for file in contents.attachments])
        self._pipeline.retire()
        with suppress(OSError):  # files of an interrupted save to this path; younger ones belong to another save
            gc.collect_directory(self._path, time.time() - context.started)


def _merge_reports(reports: Sequence[_RankReport]) -> SaveContents:
    """Return the contents of the checkpoint, from the reports of all ranks.

    Raises:
        SaveFailed: a tensor is not covered by its chunks, or two ranks wrote the same chunk or object.
    """
    tensors: dict[str, dict[str, Any]] = {}
    paths: dict[str, NestedPath] = {}
    writers: dict[ChunkKey | str, int] = {}
    for rank, report in enumerate(reports):
        paths.update(report.nesting)
        for name in report.objects:
            _add_unique(writers, name, rank)
        for fqn, tensor in report.tensors.items():
            entry = tensors.setdefault(fqn, {**tensor, "chunks": []})
            _check_same(fqn, entry, tensor)
            for key in tensor["chunks"]:
                _add_unique(writers, key, rank)
            entry["chunks"] += tensor["chunks"]
    for fqn, tensor in tensors.items():
        if problem := find_coverage_error(tensor["shape"], [(key.offsets, key.shape) for key in tensor["chunks"]]):
            raise SaveFailed(f"'{fqn}' of shape {tensor['shape']} was given so that {problem}")
    return SaveContents(
        [report.result for report in reports], tensors, [name for report in reports for name in report.objects],
        Nesting.merged(paths, [report.nesting for report in reports]).as_json(),
        [file for report in reports for file in report.attachments],
    )


def _add_unique(writers: dict[ChunkKey | str, int], key: ChunkKey | str, rank: int) -> None:
    if key in writers:
        raise SaveFailed(f"{key} was given by rank {writers[key]} and by rank {rank}; only one of them may write it")
    writers[key] = rank


def _list_tensors(shards: Sequence[LocalShard]) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = {}
    for shard in shards:
        dtype = str(shard.dtype).removeprefix("torch.")
        tensor = {"dtype": dtype, "shape": list(shard.size), "chunks": [shard.key]}
        entry = tensors.setdefault(shard.key.fqn, {**tensor, "chunks": []})
        _check_same(shard.key.fqn, entry, tensor)
        entry["chunks"].append(shard.key)
    return tensors


def _check_same(fqn: str, first: dict[str, Any], tensor: dict[str, Any]) -> None:
    for what in ("dtype", "shape"):
        if first[what] != tensor[what]:
            raise SaveFailed(f"parts of '{fqn}' were given with {what} {first[what]} and {tensor[what]}")
