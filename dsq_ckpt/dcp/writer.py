"""`DSQStorageWriter`: compressed checkpoints through `dcp.save` and `dcp.async_save`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dsq_ckpt import chain
from dsq_ckpt.analysis import Fractions, Layout
from dsq_ckpt.choice import Choice, Chooser, as_configured
from dsq_ckpt.chunk import ChunkKey
from dsq_ckpt.comm import communicator, together
from dsq_ckpt.commit import commit, retire
from dsq_ckpt.config import DSQConfig
from dsq_ckpt.container import make_directory
from dsq_ckpt.dcp.items import (
    inventory,
    key_of,
    objects_of,
    parts_of,
    planner_json,
    staged_payloads,
    staged_state_dict,
    write_results,
)
from dsq_ckpt.dcp.staging import Payload
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.groups import layer_types
from dsq_ckpt.interrupts import held_signals, let_signals_through
from dsq_ckpt.manifest import local_path
from dsq_ckpt.notices import began_at, calling_line
from dsq_ckpt.parts import items_of, layout_of
from dsq_ckpt.quantizing import Quantized, quantize_items
from dsq_ckpt.session import Agreement, Coded, Item, agree, exact_values, remember, untied, write_rank
from dsq_ckpt.targets import refuse_checkpoint
from dsq_ckpt.workers import Workers


@dataclass
class _Staged:
    """What `stage` computed; it travels with the writer to the thread or process that writes."""

    agreement: Agreement
    choice: Choice
    coded: frozenset[ChunkKey]


class DSQStorageWriter(StorageWriter):
    """Writes a compressed checkpoint; an argument of `dcp.save`, `dcp.async_save` and of what is built on them.

    Args:
        path: the checkpoint directory; may be given as `checkpoint_id` of `dcp.save` instead.
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset.
        parent: "auto" (the last checkpoint this process committed or loaded in the same run directory), None (a
            keyframe) or the path of a checkpoint.
        overwrite: replace a complete checkpoint at `path`.
        model: its module tree tells layer types; without it they are told by names and shapes.
        process_group: the group DCP saves on, where it is not the default one.
        pinned: keep this checkpoint's refinement layer for good.
        chooser: chooses the configuration when the sketches are known (see `Compressor`).
        gradients: averaged gradients of local shards, by parameter name, float32 on the CPU.
        fractions: what the chooser may prune and protect by sensitivity.

    Raises:
        ConfigError: from the constructor, if the configuration is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        config: DSQConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        parent: str | os.PathLike[str] | None = "auto",
        overwrite: bool = False,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        pinned: bool = False,
        chooser: Chooser = as_configured,
        gradients: Mapping[str, torch.Tensor] | None = None,
        fractions: Fractions | None = None,
    ) -> None:
        self.path = None if path is None else local_path(path)
        self.config = DSQConfig.create(dict(config) if isinstance(config, Mapping) else config)
        self._parent = parent
        self._overwrite = overwrite
        self._types = layer_types(model) if model is not None else None
        self._group = process_group
        self._pinned = pinned
        self._staged: _Staged | None = None
        self._rank = 0
        self._started = 0.0
        self._planned: Agreement | None = None
        self._used: str | None = None
        self._choice: Choice | None = None
        self._chooser = chooser
        self._gradients = dict(gradients or {})
        self._fractions = fractions or Fractions()
        self._line = calling_line()

    def __getstate__(self) -> dict[str, Any]:
        return {  # groups do not cross processes; a staged save needs none, and has chosen
            **self.__dict__, "_group": None, "_chooser": as_configured, "_gradients": {},
        }

    @property
    def checkpoint_id(self) -> str | None:
        return None if self.path is None else str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Local paths; not URLs."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = local_path(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @property
    def quality(self) -> dict[str, Any] | None:
        """What the chooser measured about the last save."""
        staged = self._staged  # read once: a background save takes it away
        choice = self._choice if staged is None else staged.choice
        return None if choice is None else choice.quality

    # DCP passes the rank only to a parameter of this very name.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        began_at(self._line)
        rank = kwargs.get("rank")
        self._rank = rank if rank is not None else _rank_in(self._group)
        if self._staged is None:  # else `stage` began the save
            self._started = time.time()
        self._planned = None
        self._choice = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._target()
        if not getattr(plan, "usable", True):  # a planner's mark for "as last time"
            raise SaveFailed(_PLAN_CACHING)
        return replace(plan, storage_data=self._layout(plan.items))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        refuse_checkpoint(self._target(), self._overwrite)
        if self._staged is not None:
            agreement = self._staged.agreement
            if agreement.ranks != len(plans):
                raise SaveFailed(
                    f"staged by {agreement.ranks} rank(s), but DCP saves with {len(plans)}: give DSQStorageWriter the "
                    "process_group of the save, and do not pass no_dist where torch.distributed is initialized"
                )
        else:
            layouts = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Layout)]
            if len(layouts) != len(plans):
                raise SaveFailed(_PLAN_CACHING)
            agreement = self._agreement(len(plans), layouts)
        self._planned = agreement
        return [replace(plan, storage_data=agreement) for plan in plans]

    @held_signals()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        agreement = plan.storage_data
        if not isinstance(agreement, Agreement) or agreement.save_id == self._used:
            raise SaveFailed(_PLAN_CACHING)
        self._used = agreement.save_id
        path = self._target()
        storage = self.config.storage
        with Workers(storage.thread_count(), storage.block_elements) as workers:
            items, objects = self._items(plan.items, planner)
            staged = self._staged
            if staged is not None:
                self._choice, self._staged = staged.choice, None  # in this order: `quality` looks at both
                if staged.agreement.save_id != agreement.save_id:
                    raise SaveFailed("two asynchronous saves share this writer; use a new DSQStorageWriter for each")
                choice = staged.choice
                coded, plain, tied = staged_payloads(items, staged.coded)
            else:
                items, tied = untied(items)
                quantized = self._quantized(items, [], agreement, workers)
                coded, plain, choice = quantized.coded, quantized.plain, quantized.choice
            if agreement.exact:
                plain = [replace(item, config=None) for item in plain]  # not as bf16 either
            self._choice = choice
            make_directory(path, storage.fsync)
            if not plan.items:  # no manifest would ever name this rank's file
                return _done([])
            result, memory = write_rank(
                path, agreement, self._rank, choice.config, choice.analysis.fitted, coded, plain, objects,
                {item.key: item.dtype for item in items}, {item.key: item.kind for item in items}, workers,
                tied,
            )
            if staged is None:
                memory.values |= exact_values(plain, agreement.layout)
                chain.remember_pending(path, agreement.save_id, memory)
        return _done(write_results(plan.items, result))

    @held_signals()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        let_signals_through()  # not later: the checkpoint is complete then
        agreement, path = self._planned, self._target()
        if agreement is None or self._choice is None:
            raise SaveFailed(_PLAN_CACHING)
        ranks = [written[0].storage_data["rank"] for written in results if written]
        tensors, objects = inventory(metadata)
        committed = commit(
            path, agreement, ranks, tensors, objects, planner_json(metadata.planner_data), self._choice,
            overwrite=self._overwrite, pinned=self._pinned, started=self._started,
        )
        chain.remember_committed(path, agreement.save_id)
        if committed.flushed:
            retire(path, self.config)

    # AsyncStager: what runs on the training thread of an asynchronous save.

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when training may go on."""

    def close(self) -> None:
        """Nothing to release."""

    @held_signals()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Sketch, merge, quantize: returns a state dict of codes that training can no longer change.

        Collective over the writer's process group. Entropy coding and files are left to DCP's background save.

        Raises:
            CheckpointExists: a complete checkpoint is there and is not to be overwritten; on other ranks SaveFailed.
            SaveFailed: on all ranks, when any rank failed.
        """
        if self._staged is not None:
            raise SaveFailed("this writer's last asynchronous save is not written; use a new DSQStorageWriter for each")
        self._started = time.time()
        self._line = calling_line()
        path = self._target()
        comm = communicator(self._group)
        planner = DefaultSavePlanner()

        def plan() -> SavePlan:
            planner.set_up_planner(state_dict, is_coordinator=comm.rank == 0)
            return replace(planner.create_local_plan(), planner_data=None)

        def decide() -> Agreement | None:
            if comm.rank:
                return None
            refuse_checkpoint(path, self._overwrite)  # before a search, which may take long
            return self._agreement(comm.size, [self._layout(plan.items) for plan in plans])

        def quantized() -> tuple[dict[str, Any], _Staged, chain.Memory]:
            storage = self.config.storage
            with Workers(storage.thread_count(), storage.block_elements) as workers:
                items = [item for item in self._items(mine, planner)[0] if item.key not in tied]
                own = {item.key for item in items}
                replicas = [item for item in self._items(local, planner)[0] if item.key not in own]
                found = self._quantized(items, replicas, agreement, workers)
                payloads: dict[ChunkKey, Payload] = {}
                memory = chain.Memory()
                for piece in found.coded:
                    payloads[piece.chunk.key] = Coded(piece.chunk.staged(workers), piece.base)
                    remember(memory, piece.chunk, self.config)
                exact = {item.key: item.load().detach().to("cpu", copy=True) for item in found.plain}
                memory.values |= exact_values(found.plain, agreement.layout)
            whole = {**payloads, **exact}
            whole |= {key: whole[first] for key, first in tied.items()}
            staged = _Staged(agreement, found.choice, frozenset(payloads))
            return staged_state_dict(state_dict, mine, whole), staged, memory

        def plan_untied() -> tuple[SavePlan, dict[ChunkKey, ChunkKey]]:
            """Ties are found before replicas are dealt to ranks, or one rank would get the one, another the other."""
            whole = plan()
            kept, tied = untied(self._items(whole.items, planner)[0])
            names = {item.key for item in kept}
            items = [item for item in whole.items if item.tensor_data is None or key_of(item) in names]
            ties = [item for item in whole.items if item.tensor_data is not None and key_of(item) in tied]
            return replace(whole, items=items, storage_data=ties), tied

        own_plan, tied = together(comm, plan_untied)
        ties, own_plan = own_plan.storage_data, replace(own_plan, storage_data=None)
        local = own_plan.items
        plans = dedup_save_plans(comm.gather(own_plan))  # as DCP would: each replica is coded once
        written = {key_of(item) for item in plans[comm.rank].items if item.tensor_data is not None}
        tied = {key: first for key, first in tied.items() if first in written}
        mine = [*plans[comm.rank].items, *(item for item in ties if key_of(item) in tied)]
        agreement = comm.broadcast(together(comm, decide))
        staged, self._staged, memory = together(comm, quantized)
        chain.remember_pending(path, agreement.save_id, memory)
        return staged

    def _agreement(self, ranks: int, layouts: list[Layout]) -> Agreement:
        return agree(self._target(), self._parent, self.config, ranks, layouts)

    def _target(self) -> Path:
        if self.path is None:
            raise SaveFailed("no path: give it to DSQStorageWriter or as checkpoint_id")
        return self.path

    def _layout(self, write_items: list[WriteItem]) -> Layout:
        return layout_of(parts_of(write_items), self.config, self._types, bool(self._gradients), self._fractions)

    def _items(
        self, write_items: list[WriteItem], planner: SavePlanner
    ) -> tuple[list[Item], Iterator[tuple[str, bytes]]]:
        return items_of(parts_of(write_items, planner), self.config, self._types), objects_of(write_items, planner)

    def _quantized(
        self, items: list[Item], replicas: list[Item], agreement: Agreement, workers: Workers
    ) -> Quantized:
        comm = communicator(self._group, agreement.ranks)
        return quantize_items(
            items, replicas, agreement, self.config, self._chooser, self._gradients, comm, workers
        )


_PLAN_CACHING = (
    "DCP reused the plan of an earlier save; dsq_ckpt needs a new plan for every save: "
    "pass a planner with enable_plan_caching=False"
)


def _done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future


def _rank_in(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0
