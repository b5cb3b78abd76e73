"""`DSQStorageWriter`: compressed checkpoints through `dcp.save` and `dcp.async_save`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect, expect_on_save
from dsq_ckpt.core.interrupts import hold_signals, run_pending_handlers
from dsq_ckpt.core.notices import calling_line, set_background_line, warn_safely
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.dcp.background_process import replace_dead
from dsq_ckpt.dcp.cached_plans import PLAN_CACHING, CachedPlan, GlobalPlan
from dsq_ckpt.dcp.calls import NO_COLLECTIVES, NO_SEARCH, AsyncCall, group_of_save, in_background, rank_in, ranks_of
from dsq_ckpt.dcp.copies import CopyCost, copied, copied_by_name, copies_instead, release_spare, settled
from dsq_ckpt.dcp.items import check_promised, contents_of, finished, objects_of, write_results
from dsq_ckpt.dcp.located import Located
from dsq_ckpt.dcp.planner_data import planner_json
from dsq_ckpt.dcp.plans import items_beside, items_of_plan, layout_of_own_plan, layout_of_plan
from dsq_ckpt.dcp.quantized_staging import stage_codes
from dsq_ckpt.dcp.staging import (
    Offer,
    ReadyWhenStaged,
    StagedCodes,
    StagedCopy,
    check_arrival,
    refuse_mixed,
    staged_payloads,
)
from dsq_ckpt.dcp.steps import step_of_dcp
from dsq_ckpt.distributed.comm import Communicator, SingleProcess, communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.distributed.undoing import undone_together
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.consistency import RankSettings, refuse_different
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import SaveHistory, default_history
from dsq_ckpt.engine.local import LocalItems
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.engine.pipeline import SavePipeline
from dsq_ckpt.engine.quantizing import QuantizedState
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.engine.tied import TiedItems
from dsq_ckpt.errors import ConfigError, SaveFailed
from dsq_ckpt.quantization.frozen_tensors import FrozenTensors, find_frozen, frozen_from_history
from dsq_ckpt.quantization.groups import is_lossy, layer_types
from dsq_ckpt.quantization.layout import Fractions, Layout
from dsq_ckpt.quantization.plan import ConfigPolicy, as_configured
from dsq_ckpt.quantization.rounded_weights import find_rounded_weights
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.target_directory import refuse_target


class DSQStorageWriter(Located, ReadyWhenStaged, StorageWriter):
    """A writer of compressed checkpoints, for `dcp.save`, `dcp.async_save` and everything built on them.

    Args:
        path: the checkpoint directory; may be given as `checkpoint_id` of `dcp.save` and `dcp.async_save` instead.
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset.
        parent: "auto" (the last checkpoint this process committed or loaded in the same run directory), None (a
            keyframe) or the path of a checkpoint.
        overwrite: replace a complete checkpoint at `path`.
        model: its module tree defines layer types, without it they are inferred from names and shapes; and it tells
            what is frozen, which `quantize.frozen` stores exactly, and which weights its modules round.
        process_group: the group DCP saves on, where it is not the default one.
        pinned: keep this checkpoint's refinement layer for good.
        no_dist: this rank saves alone; pass the same `no_dist` to DCP's function.
        policy: chooses the configuration when the global sketch is known (see `Compressor`).
        gradients: averaged gradients of local shards, by parameter name, float32 on the CPU.
        fractions: fractions that the policy may prune and protect by sensitivity.
        history: checkpoints that the save may come after; None: those of the process.
        on_save: called with the `SaveResult` on the coordinator, once the checkpoint is committed, for a logger; in the
            thread that commits. What it raises becomes a warning.

    Raises:
        ConfigError: from the constructor, if the configuration is wrong.

    Example:
        >>> from torch.distributed import checkpoint as dcp
        >>> writer = dsq_ckpt.DSQStorageWriter("run/step-000500")
        >>> metadata = dcp.save({"w": torch.randn(256, 256)}, storage_writer=writer)
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
        no_dist: bool = False,
        policy: ConfigPolicy = as_configured,
        gradients: Mapping[str, torch.Tensor] | None = None,
        fractions: Fractions | None = None,
        history: SaveHistory | None = None,
        on_save: OnSave | None = None,
    ) -> None:
        self.path = None if path is None else resolve_checkpoint_path(path)
        self.config = DSQConfig.create(dict(config) if isinstance(config, Mapping) else config)
        expect("model", model, nn.Module | None, "a module, whose tree defines layer types")
        expect("history", history, SaveHistory | None, "a SaveHistory")
        expect_on_save(on_save)
        if is_lossy(self.config):
            warmup.start()
        self._model = model if self.config.quantize.frozen == "exact" and is_lossy(self.config) else None
        self._options = SaveOptions(
            self.config, parent, overwrite, pinned, None if model is None else layer_types(model), policy=policy,
            fractions=fractions or Fractions(), history=default_history() if history is None else history,
            frozen=FrozenTensors() if self._model is None else frozen_from_history(self._model),  # until `_begin` looks
            on_save=on_save, rounding=find_rounded_weights(model) if is_lossy(self.config) else {},
        )
        self._gradients = dict(gradients or {})
        self._group = self._saves_on = process_group
        self.no_dist = no_dist
        self.async_call: AsyncCall | None = None
        """Arguments of the coming `dcp.async_save`, set by its caller; None: they are read from the stack."""
        self._save: SavePipeline | None = None
        self._written: SavePipeline | None = None
        """The save whose files were written last; `stage` may have begun another one since."""
        self._copy: dict[str, Any] = {}
        self._staged: StagedCodes | StagedCopy | None = None
        self._rank = 0
        self._used: str | None = None
        self._names: set[str] = set()
        self._planner = ""
        self._cached: CachedPlan | None = None
        self._line = calling_line()

    def __getstate__(self) -> dict[str, Any]:
        # Groups do not cross processes. A save that is quantized has no use for what only training can evaluate.
        staged = isinstance(self._staged, StagedCodes)
        gradients = {} if staged else self._gradients
        options = replace(self._options, policy=as_configured) if staged else self._options
        left = dict.fromkeys(("_group", "_saves_on", "_cached", "async_call", "_model"))
        return {**self.__dict__, **left, "_copy": {}, "_options": options, "_gradients": gradients}

    def storage_meta(self) -> StorageMeta | None:
        if isinstance(self._staged, StagedCopy):  # DCP's first call of a save, and the planner's is the next
            self._staged.begin()
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @property
    def history(self) -> SaveHistory:
        """Checkpoints that the save may come after."""
        return self._options.history

    def take_on_save(self) -> OnSave | None:
        """Return `on_save` for the caller to call, where this writer's save is committed by another process."""
        on_save, self._options = self._options.on_save, replace(self._options, on_save=None)
        return on_save

    @property
    def quality(self) -> dict[str, Any] | None:
        """Measurements of the policy about the last save; None if it made none."""
        plan = None if self._save is None else self._save.plan
        return None if plan is None else plan.quality

    # DCP passes the rank only to a parameter of this very name.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        set_background_line(self._line)
        background, rank = in_background(), kwargs.get("rank")
        self._saves_on = (group_of_save() if background else None) or self._group
        if not kwargs.get("use_collectives", True) and not self.no_dist and len(ranks_of(self._saves_on)) > 1:
            raise SaveFailed(NO_COLLECTIVES)
        self._rank = rank if rank is not None else rank_in(self._saves_on)
        self._written = None
        if self._staged is None:  # else `stage` began the save
            if self._options.policy is not as_configured and background:
                raise SaveFailed(NO_SEARCH)
            self._save = self._begin()
        elif self.path is not None:  # which DCP may name only now
            self._pipeline.path = self.path

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._cached = CachedPlan.of_stack(plan)
        if isinstance(self._staged, StagedCodes):
            self._cached = None
            return replace(plan, storage_data=Offer(self._pipeline.settings, self._staged.staged))
        items = plan.items if self._cached is None else self._cached.items
        self._names = {item.index.fqn for item in items}
        offer = Offer(self._pipeline.settings, layout_of_own_plan(items, self._options, bool(self._gradients)))
        return replace(plan, storage_data=offer) if self._cached is None else self._cached.offered(plan, offer)

    @step_of_dcp(SaveFailed)
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.no_dist and len(plans) > 1:
            raise SaveFailed(f"DSQStorageWriter has no_dist=True, but DCP saves with {len(plans)} ranks")
        found = GlobalPlan.of_stack(plans, tied=not isinstance(self._staged, StagedCodes))
        plans, offers = found.plans, found.offers
        refuse_different([offer.settings for offer in offers])
        if isinstance(self._staged, StagedCodes):
            context = self._staged.context
            if context.ranks != len(plans):
                raise SaveFailed(
                    f"staged by {context.ranks} rank(s), but DCP saves with {len(plans)}: give DSQStorageWriter the "
                    "process_group of the save, and no_dist if that is given to DCP"
                )
            arriving = [offer.content for offer in offers if isinstance(offer.content, frozenset)]
            refuse_mixed(len(arriving), len(plans))
            check_arrival(arriving, plans)
            context = self._pipeline.resume(context)
        else:
            layouts = [offer.content for offer in offers if isinstance(offer.content, Layout)]
            refuse_mixed(len(layouts), len(plans))
            if (agreed := found.agreed()) is not None:
                layouts = [agreed]
            else:  # a planner may give other names in its global plan, and other ranks may have other tensors
                named = {item.index.fqn: item for plan in plans for item in plan.items if item.tensor_data is not None}
                others = [item for name, item in named.items() if name not in self._names]
                unknown = replace(self._options, frozen=FrozenTensors(), rounding={})
                everything = [item for plan in plans for item in plan.items]
                layouts.append(layout_of_plan(others, unknown, bool(self._gradients), everything))
            save_id = None if self._staged is None else self._staged.save_id
            context = self._pipeline.agree(len(plans), layouts, save_id=save_id)
        return found.with_context(context)

    @step_of_dcp(SaveFailed)
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        context = plan.storage_data if self._cached is None else self._cached.arrived(plan)
        if not isinstance(context, SaveContext) or context.save_id == self._used:
            raise SaveFailed(PLAN_CACHING)
        self._used = context.save_id
        comm = SingleProcess() if self.no_dist else communicator(self._saves_on, context.ranks)
        self._planner = type(planner).__name__
        self._written = pipeline = self._pipeline
        staged, self._staged = self._staged, None
        # DCP itself tells no writer that another rank failed.
        with undone_together(comm, self.discard), pipeline.workers() as workers:
            if isinstance(staged, StagedCodes):
                items = items_of_plan(plan.items, planner, self._options, context.layout)
                state = staged_payloads(items, staged, objects_of(plan.items, planner), context.save_id)
            else:
                state = self._quantized(context, plan, planner, comm, workers)
            if not plan.items:  # no manifest would ever name this rank's file
                get_storage(pipeline.path).make_directory(pipeline.path, self.config.storage.fsync)
                return finished([])
            return finished(write_results(plan.items, pipeline.write(context, self._rank, state, workers)))

    def _quantized(
        self, context: SaveContext, plan: SavePlan, planner: SavePlanner, comm: Communicator, workers: Workers
    ) -> QuantizedState:
        """Return the items of this rank's plan, tensors quantized; collective."""
        items = items_of_plan(plan.items, planner, self._options, context.layout)
        tied_items = TiedItems.of(items, items_beside(plan.items, planner, self._options, context))
        stored, tied = tied_items.stored(items), tied_items.stored_as
        objects = objects_of(plan.items, planner)
        local = LocalItems(stored, tied=tied, gradients=self._gradients, objects=objects)
        return self._pipeline.quantize(context, local, comm, workers)

    @step_of_dcp(SaveFailed)
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            self._finish(metadata, results)
        except BaseException:
            self.discard()
            raise

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        run_pending_handlers()  # not later: the checkpoint is complete then
        pipeline = self._written
        context = None if pipeline is None else pipeline.context
        if pipeline is None or context is None or pipeline.plan is None:
            raise SaveFailed(PLAN_CACHING)
        ranks = [written[0].storage_data["rank"] for written in results if written]
        nesting, lost = planner_json(metadata.planner_data, metadata.state_dict_metadata.keys())
        contents = contents_of(metadata, nesting, ranks)
        check_promised(contents, self._planner)
        committed = pipeline.commit(context, contents)
        if committed.flushed:
            pipeline.retire()
        if lost is not None:
            warn_safely(
                f"planner data of {self._planner} is not in the checkpoint, since it is no plain data ({lost}); "
                "Metadata.planner_data will be None when it is loaded"
            )
        pipeline.announce()

    def discard(self) -> None:
        """Remove what a failed save left, once no rank writes any more; on the coordinator."""
        save = self._written or self._save
        if save is not None:
            save.discard()

    @hold_signals()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict that training can no longer change.

        Where the save is known to be planned as DCP does it by default, `storage.stage` says how: tensors are copied,
        and all else is done in the background as in a synchronous save; or they are sketched and quantized here, which
        is collective over the writer's process group, and coded and written in the background. Any other planner must
        see the tensors themselves, so these are copied.

        Raises:
            CheckpointExists: a complete checkpoint is there and is not to be overwritten; on other ranks SaveFailed.
            SaveFailed: on all ranks, when any rank failed.
        """
        if self._staged is not None:
            raise SaveFailed("the last asynchronous save is unwritten, or failed; use a new DSQStorageWriter for each")
        self._line, self._copy = calling_line(), {}
        call = self.async_call or AsyncCall.of_stack()
        if call is not None:
            call.check(self.no_dist)
            if call.processes:
                replace_dead(communicator(None))
        alone = self.no_dist or (call is not None and call.no_dist)
        comm: Communicator | None = SingleProcess() if alone else None
        if comm is None and call is not None and ranks_of(self._group) == ranks_of(call.process_group):
            comm = communicator(self._group)
        save_id = uuid.uuid4().hex[:16]
        searches = self._options.policy is not as_configured

        def given() -> tuple[RankSettings, str, bool, CopyCost | None]:
            nonlocal state_dict
            state_dict = settled(state_dict)
            if call is not None and call.checkpoint_id is not None:
                self.path = resolve_checkpoint_path(call.checkpoint_id)
            if call is not None and call.processes and self._options.on_save is not None:
                raise ConfigError(
                    "on_save is a function of this process, and DCP's background process commits: save in a thread, or "
                    "by dsq_ckpt.async_save(..., processes=True), which calls it here"
                )
            self._save = self._begin()
            if comm is not None and comm.rank == 0:
                refuse_target(self._save.path, self._options.overwrite)
            default = call is not None and call.default_planner
            return self._save.settings, save_id, default, None if searches else CopyCost.of(state_dict)

        found = gather_from_all_ranks(comm or SingleProcess(), given)
        refuse_different([settings for settings, *_ in found])
        if comm is not None:
            save_id = found[0][1]
        if comm is not None and all(default for *_, default, _ in found):  # others must not part from these here
            processes = call is not None and call.processes
            if copies_instead(self.config.storage.stage, [cost for *_, cost in found], processes, comm.rank):
                copy = run_on_all_ranks(comm, lambda: self._copied(copied_by_name, state_dict))
                return self._leave(copy, call, save_id)
            release_spare()
            staging = partial(stage_codes, state_dict, self._pipeline, self._gradients, comm)
            staged, self._staged = run_on_all_ranks(comm, staging)
            return staged
        if searches:
            raise SaveFailed(NO_SEARCH)
        failure: str | None = None
        copy = {}
        try:
            copy = self._copied(copied, state_dict)
        except Exception as error:  # raised in DCP's next collective, which the other ranks enter
            failure = f"{type(error).__name__}: {error}"
        return self._leave(copy, call, save_id, failure)

    def _copied(self, copied: Callable[[dict[str, Any]], dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state dict; gradients are copied too."""
        copy = copied(state)
        self._gradients = {name: average.clone() for name, average in self._gradients.items()}
        return copy

    def _leave(
        self, copy: dict[str, Any], call: AsyncCall | None, save_id: str, failure: str | None = None
    ) -> dict[str, Any]:
        """Return a copy that is left to the background."""
        self._copy = copy
        self._staged = StagedCopy.begun(call, save_id, self.history, self._pipeline.path, failure)
        return copy

    def release(self) -> None:
        """Drop the copy that was made of the state dict, once the save has ended; the next copy may take its memory."""
        self._copy.clear()

    def _begin(self) -> SavePipeline:
        if self.path is None:
            raise SaveFailed("no path: give it to DSQStorageWriter or as checkpoint_id")
        if self._model is not None and not in_background():  # where training may be changing it
            self._options = replace(self._options, frozen=find_frozen(self._model))
        return SavePipeline(self.path, self._options)

    @property
    def _pipeline(self) -> SavePipeline:
        assert self._save is not None, "DCP calls set_up_storage_writer or stage first"
        return self._save
