"""`DSQStorageReader`: compressed checkpoints through `dcp.load`, into any number of ranks and any sharding."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.address_ranges import AddressRanges, address_range
from dsq_ckpt.core.aliases import alias_of, missing_memory_problem
from dsq_ckpt.core.arguments import expect, expect_flags
from dsq_ckpt.core.arrays import Codes
from dsq_ckpt.core.hints import pattern_hint
from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.dcp.checkpoint_location import CheckpointLocation
from dsq_ckpt.dcp.items import done_future
from dsq_ckpt.dcp.load_warnings import warn_of_unloaded
from dsq_ckpt.dcp.nested_planners import NestedLoadPlanner
from dsq_ckpt.dcp.planner_data import decode
from dsq_ckpt.dcp.steps import dcp_step
from dsq_ckpt.dcp.tied_targets import TiedTargets, check_shared_elements
from dsq_ckpt.distributed.comm import extend_group_lifetimes
from dsq_ckpt.distributed.job import get_job_size
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.chain import describe_base_loss
from dsq_ckpt.engine.history import ChunkCache, SaveHistory, default_history
from dsq_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, DSQError, LoadFailed, LossyTensor
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.quantization.restored_values import record_load
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.chunk_load import ChunkLoad, CodeReuse, decode_all
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.record_fields import parse_dtype
from dsq_ckpt.storage.refinement import RefinementOption, check_refinement, uses_refinement
from dsq_ckpt.storage.shard import RecordRef

logger = logging.getLogger(__name__)


class DSQStorageReader(CheckpointLocation, StorageReader):
    """A reader of compressed checkpoints, for `dcp.load`.

    Each stored chunk is decoded once, as far as this rank reads it, and sliced. The checkpoint becomes the parent of
    the next save in its run.

    Args:
        path: the checkpoint directory; may be given as `checkpoint_id` of `dcp.load` instead.
        refinement: True: require the refinement layer; False: load the base layer alone; "auto": load the refinement
            layer where it was kept.
        exact: patterns (or one) of names that must have been stored bit for bit; each must match a stored tensor.
        allow_cast: load into tensors of another dtype than was saved.
        threads: worker threads; 0 as in `StorageConfig`.
        history: history that the checkpoint is added to; None: that of the process.

    Raises:
        LossyTensor: an `exact` name was stored lossy, or a dtype differs without `allow_cast`.
        CheckpointNotFound, CorruptCheckpoint, UnsupportedFormat: from the methods DCP calls.

    Example:
        >>> from torch.distributed import checkpoint as dcp
        >>> result = dsq_ckpt.save({"w": torch.ones(256, 256)}, "run/step-000500")
        >>> state = {"w": torch.zeros(256, 256)}
        >>> dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader("run/step-000500"))
        >>> torch.allclose(state["w"], torch.ones(256, 256), rtol=0.01)
        True
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        refinement: RefinementOption = "auto",
        exact: Sequence[str] = (),
        allow_cast: bool = False,
        threads: int = 0,
        history: SaveHistory | None = None,
    ) -> None:
        self.path = None if path is None else resolve_checkpoint_path(path)
        expect_flags(allow_cast=allow_cast)
        self._refinement = check_refinement(refinement)
        self._exact = (exact,) if isinstance(exact, str) else tuple(exact)
        self._allow_cast = allow_cast
        self._storage = StorageConfig(threads=threads)
        expect("history", history, SaveHistory | None, "a SaveHistory")
        self._history = default_history() if history is None else history
        self._save_id: str | None = None
        self._log_level = logging.INFO
        self._requested_names: set[str] | None = None
        """On the coordinator, names that are requested by all ranks of the job; None: others may load separately."""
        self._last_checkpoint: Checkpoint | None = None
        """The checkpoint as first opened by this load; closed, and kept for its index."""
        self.read_error: DSQError | None = None
        """The error of `read_metadata` in the last load; DCP itself only passes on its text."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._save_id = None

    # No **kwargs: with them DCP would continue without the other ranks if this fails.
    def read_metadata(self) -> Metadata:
        self._save_id = self.read_error = None  # a reader may be reused after the checkpoint was replaced
        try:
            with self._open() as checkpoint:
                self._save_id = checkpoint.manifest.save_id
                return make_metadata(checkpoint)
        except DSQError as error:
            self.read_error = error
            if isinstance(error, CorruptCheckpoint):
                self._history.mark_suspect()
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._log_level = logging.INFO if is_coordinator else logging.DEBUG  # of the message on this rank's load

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        extend_group_lifetimes()  # DCP's collectives may be the last of this process
        return replace(plan, storage_data=(self._save_id, self.checkpoint_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Decide for all ranks whether the refinement is used, since it may be dropped at any time."""
        # A planner that rebuilds the plans drops the storage_data of a reader.
        _check_same_save([plan.storage_data for plan in plans if plan.storage_data is not None])
        has_all = len(plans) >= get_job_size()
        self._requested_names = {item.storage_index.fqn for plan in plans for item in plan.items} if has_all else None
        with self._open() as checkpoint:
            self._check_guards(checkpoint)
            refined = self._uses_refinement(checkpoint)
            if not refined and self._refinement == "auto" and checkpoint.manifest.refinement == "dropped":
                warn(
                    f"{describe_base_loss(checkpoint.directory, checkpoint.manifest)}. Where the base layer is meant, "
                    "pass refinement=False (to dsq_ckpt.load, Compressor.load or DSQStorageReader)"
                )
        return [replace(plan, storage_data=refined) for plan in plans]

    @dcp_step(LoadFailed)
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return self._read(plan, planner)
        except CorruptCheckpoint:
            self._history.mark_suspect()
            raise
        finally:
            self._last_checkpoint = None

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        began = time.monotonic()
        requests: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        cache = ChunkCache()
        threads = Workers(self._storage.thread_count(), self._storage.block_elements)
        with self._open() as checkpoint, threads.for_elements(sum(math.prod(i.lengths) for i in plan.items)) as workers:
            if checkpoint.manifest.lossy:
                warmup.wait("load")
            if isinstance(planner, DefaultLoadPlanner):
                # Whether no other rank requests other entries.
                is_alone = {item.storage_index.fqn for item in plan.items} == self._requested_names
                warn_of_unloaded(planner, checkpoint, 0 if self._log_level == logging.INFO else 1, is_alone)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    _load_object(checkpoint, item, planner)
                else:
                    requests[item.storage_index].append(item)
            refined = plan.storage_data if isinstance(plan.storage_data, bool) else self._uses_refinement(checkpoint)
            if refined and checkpoint.manifest.refinement == "dropped":
                raise LoadFailed(f"'{checkpoint.directory}' lost its refinement while it was being loaded; load again")
            self._read_chunks(checkpoint, requests, planner, refined, workers, cache)
            self._history.add_loaded(checkpoint.directory, checkpoint.manifest.save_id, cache, checkpoint)
            record_load(checkpoint.manifest.lossy_kinds & {kind_of(index.fqn) for index in requests})
            logger.log(
                self._log_level, "loaded %s: %d chunks, %s, depth %d, %.1f s", checkpoint.directory.name, len(requests),
                "base and refinement" if refined else "base layer alone" if checkpoint.manifest.lossy else "exact",
                checkpoint.manifest.depth, time.monotonic() - began,
            )
        return done_future(None)

    def _read_chunks(
        self, checkpoint: Checkpoint, requests: dict[MetadataIndex, list[ReadItem]], planner: LoadPlanner,
        refined: bool, workers: Workers, cache: ChunkCache,
    ) -> None:
        """Decode chunks in parallel; the planner is called in one thread, chunk by chunk in order."""
        pending: deque[_PendingChunk] = deque()
        ranges, tied = AddressRanges(), TiedTargets()
        decoded_codes, decoded_parts = dict[RecordRef, Codes](), dict[RecordRef, tuple[Codes, int, int]]()

        def loads() -> Iterator[ChunkLoad]:
            for index, ref, is_measure in _sort_by_dependency(checkpoint, requests):
                run_pending_handlers()
                record, items = checkpoint.read_record(ref), requests[index]
                self._check_lossy(index.fqn, record)
                key = ChunkKey(index.fqn, tuple(record["offsets"]), tuple(record["shape"]))
                targets = [planner.resolve_tensor(item).detach() for item in items]
                if problem := next(filter(None, map(missing_memory_problem, targets)), None):
                    raise LoadFailed(f"'{index.fqn}' {problem}")
                # A target that is the whole chunk is decoded in place, unless another target has the same memory, as
                # for tied tensors, which would be written concurrently. Other targets are sliced from a copy.
                exclusive = [target.device.type == "cpu" and ranges.add(*address_range(target)) for target in targets]
                output = alias_of(targets[0]) if exclusive == [True] else None
                keep = (is_measure or _is_whole_chunk(items, key)) and "residual" not in record
                load = checkpoint.prepare_load(
                    ref, refined, workers, output, _get_element_range(items, key.shape),
                    CodeReuse(keep, decoded_codes, decoded_parts),
                )
                self._check_targets(index.fqn, load.tensor.dtype, targets)
                pending.append(_PendingChunk(ref, key, items, targets, output))
                yield load

        for load in decode_all(loads(), workers):
            ref, key, items, targets, into = pending.popleft()
            if load.codes is not None and _is_whole_chunk(items, key):
                cache.codes[key], cache.refs[key] = load.codes, ref
                decoded_codes[ref] = load.codes
            elif load.codes is not None and load.blocks:
                decoded_parts[ref] = load.codes, load.blocks[0].start, load.blocks[-1].stop
            for item, target in zip(items, targets, strict=True):
                piece = load.tensor
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    piece = piece.narrow(dim, start, length)
                if target.shape != piece.shape:
                    raise LoadFailed(f"'{key.fqn}': {tuple(piece.shape)} stored, {tuple(target.shape)} asked for")
                if type(planner) in (DefaultLoadPlanner, NestedLoadPlanner):  # others may return their own memory
                    tied.add(key.fqn, ref, _is_lossy(checkpoint.read_record(ref)), target, piece)
                if load.tensor is not into:
                    target.copy_(piece)
                    check_shared_elements(key.fqn, target, piece)
                elif not target.is_inference():
                    increment_version(target)  # for a backward pass that needs the former values
                planner.commit_tensor(item, target)
        tied.warn(checkpoint.directory)

    def _check_lossy(self, fqn: str, record: dict[str, Any]) -> None:
        if _is_lossy(record) and any(fnmatchcase(fqn, pattern) for pattern in self._exact):
            raise LossyTensor(
                f"'{fqn}' was stored lossy ({record.get('group', record.get('stored'))}), but exact was asked "
                "for; save it by a rule with exact: true, or drop it from exact="
            )

    def _check_targets(self, fqn: str, dtype: torch.dtype, targets: Sequence[torch.Tensor]) -> None:
        for target in targets:
            steps = zip(target.shape, target.stride(), strict=True)
            if target.numel() and any(length > 1 and not step for length, step in steps):
                raise LoadFailed(
                    f"'{fqn}' is expanded: its elements share memory, so it cannot be written to; load into its clone()"
                )
            if target.dtype != dtype and not self._allow_cast:
                raise LossyTensor(
                    f"'{fqn}' was saved as {dtype} and is loaded into {target.dtype}; "
                    "load into the saved dtype, or pass allow_cast=True, under dcp.load to DSQStorageReader"
                )

    def _check_guards(self, checkpoint: Checkpoint) -> None:
        names = checkpoint.index["tensors"]
        for pattern in self._exact:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise LoadFailed(f"exact: the pattern '{pattern}' matches no tensor{pattern_hint(pattern, names)}")

    def _uses_refinement(self, checkpoint: Checkpoint) -> bool:
        return uses_refinement(checkpoint.manifest, self._refinement, checkpoint.directory)

    def _open(self) -> Checkpoint:
        if self.path is None:
            raise CheckpointNotFound("no path: give it to DSQStorageReader or as checkpoint_id")
        checkpoint = self._last_checkpoint = Checkpoint(self.path, cached=self._last_checkpoint)
        if self._save_id not in (None, checkpoint.manifest.save_id):
            checkpoint.close()
            raise LoadFailed(f"'{self.path}' was overwritten while it was being loaded; load again")
        return checkpoint


def _is_lossy(record: dict[str, Any]) -> bool:
    return record["type"] in ("coded", "merged") or "stored" in record


class _PendingChunk(NamedTuple):
    """A chunk whose blocks are being decoded."""

    ref: RecordRef
    key: ChunkKey
    items: list[ReadItem]
    targets: list[torch.Tensor]
    into: torch.Tensor | None


def _sort_by_dependency(
    checkpoint: Checkpoint, requests: Iterable[MetadataIndex]
) -> list[tuple[MetadataIndex, RecordRef, bool]]:
    """Return chunks with their records, and whether they scale first moments: they come first, to be decoded once."""
    order, measures = [], set[str]()
    for index in requests:
        assert index.offset is not None
        ref = checkpoint.find_record(index.fqn, tuple(index.offset))
        order.append((index, ref))
        if (measure := checkpoint.read_record(ref).get("root")) is not None:
            measures.add(str(measure))
    return sorted(((*pair, pair[0].fqn in measures) for pair in order), key=lambda row: not row[2])


def _check_same_save(saves: Sequence[Any]) -> None:
    """Raise if ranks load different saves.

    Args:
        saves: save ids and paths of the opened checkpoints, in rank order.

    Raises:
        LoadFailed: the save ids differ.
    """
    for rank, (save_id, path) in enumerate(saves):
        if save_id != saves[0][0]:
            raise LoadFailed(
                f"rank {rank} would load save {save_id} in '{path}', and rank 0 save {saves[0][0]} in "
                f"'{saves[0][1]}': let one rank choose the checkpoint and tell the others, or load with no_dist=True "
                "where each is to have its own"
            )


def _load_object(checkpoint: Checkpoint, item: ReadItem, planner: LoadPlanner) -> None:
    fqn = item.storage_index.fqn
    ref = checkpoint.find_record(fqn, None)
    data = checkpoint.read_object(ref)
    try:
        planner.load_bytes(item, BytesIO(data))
    except DSQError as error:
        raise type(error)(f"'{checkpoint.directory / ref.file}': {error}") from error
    except Exception as error:
        raise LoadFailed(
            f"'{checkpoint.directory / ref.file}': object '{fqn}' is not taken: {type(error).__name__}: {error}"
        ) from error


def make_metadata(checkpoint: Checkpoint) -> Metadata:
    """Return DCP's metadata, made from the index without unpickling."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    with checkpoint.translate_errors():
        for fqn, tensor in checkpoint.index["tensors"].items():
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
                for offsets, shape, _, _ in tensor["chunks"]
            ]
            entries[fqn] = TensorStorageMetadata(
                TensorProperties(dtype=parse_dtype(tensor["dtype"])), torch.Size(tensor["shape"]), chunks
            )
        for fqn in checkpoint.index["objects"]:
            entries[fqn] = BytesStorageMetadata()
        planner: Any = read_paths(checkpoint)
        if planner is None:
            planner = decode(checkpoint.index.get("planner_data"))
    return Metadata(
        entries, planner_data=planner,
        storage_meta=StorageMeta(checkpoint_id=str(checkpoint.directory), save_id=checkpoint.manifest.save_id),
    )


def read_paths(checkpoint: Checkpoint) -> dict[str, tuple[str | int, ...]] | None:
    """Return the path of each name in the nested state dict; None if the planner of the save kept none."""
    paths = checkpoint.index["planner"]
    return None if paths is None else {fqn: tuple(path) for fqn, path in paths.items()}


def _get_element_range(items: Sequence[ReadItem], shape: Sequence[int]) -> tuple[int, int]:
    """Return the range of elements of a chunk that this rank reads, the end exclusive."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts, stops = [], []
    for item in items:
        if math.prod(item.lengths):
            pairs = zip(item.lengths, strides, strict=True)
            starts.append(sum(start * stride for start, stride in zip(item.storage_offsets, strides, strict=True)))
            stops.append(starts[-1] + sum((length - 1) * stride for length, stride in pairs) + 1)
    return min(starts, default=0), max(stops, default=0)


def _is_whole_chunk(items: list[ReadItem], key: ChunkKey) -> bool:
    """Return whether this rank reads a whole chunk, whose codes are then cached for its next save."""
    return any(tuple(item.lengths) == key.shape for item in items)
