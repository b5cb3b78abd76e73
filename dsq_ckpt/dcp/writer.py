"""`DSQStorageWriter`: compressed checkpoints through `dcp.save` and `dcp.async_save`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect, expect_flags, expect_on_save
from dsq_ckpt.core.interrupts import hold_signals, run_pending_handlers
from dsq_ckpt.core.notices import calling_line, set_background_line, warn_safely
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.dcp import call_stack, copies, staging
from dsq_ckpt.dcp.background_process import reset_dead_processes
from dsq_ckpt.dcp.cached_plans import PLAN_CACHING, CachedPlan, GlobalPlan
from dsq_ckpt.dcp.call_stack import AsyncCall
from dsq_ckpt.dcp.checkpoint_location import CheckpointLocation
from dsq_ckpt.dcp.items import check_metadata_complete, done_future, iterate_objects, make_contents, make_write_results
from dsq_ckpt.dcp.planner_data import planner_data_to_json
from dsq_ckpt.dcp.plans import make_own_layout, make_plan_items, make_plan_layout, make_replica_items
from dsq_ckpt.dcp.quantized_staging import stage_codes
from dsq_ckpt.dcp.staging import LocalPlanData, StagedCodes, StagedCopy, SynchronousStager, collect_staged_payloads
from dsq_ckpt.dcp.steps import dcp_step
from dsq_ckpt.dcp.write_step import WriteStep
from dsq_ckpt.distributed.comm import Communicator, SingleProcess, communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.distributed.rollback import roll_back_together
from dsq_ckpt.engine import warmup
from dsq_ckpt.engine.consistency import RankSettings, check_same_settings
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import SaveHistory, default_history
from dsq_ckpt.engine.local_state import LocalItems
from dsq_ckpt.engine.options import CompressorInputs, SaveOptions
from dsq_ckpt.engine.pipeline import SavePipeline
from dsq_ckpt.engine.quantizing import QuantizedState
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.engine.tied import TiedItems
from dsq_ckpt.errors import ConfigError, SaveFailed
from dsq_ckpt.quantization.frozen_tensors import FrozenTensors, find_frozen, frozen_from_history
from dsq_ckpt.quantization.groups import is_lossy, layer_types
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.plan import plan_as_configured
from dsq_ckpt.quantization.rounded_weights import find_rounded_weights
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.target_directory import refuse_target

_NO_INPUTS = CompressorInputs()


class DSQStorageWriter(CheckpointLocation, SynchronousStager, WriteStep, StorageWriter):
    """A writer of compressed checkpoints, for `dcp.save`, `dcp.async_save` and everything built on them.

    Args:
        path: the checkpoint directory; may be given as `checkpoint_id` of `dcp.save` and `dcp.async_save` instead.
        config: a `DSQConfig`, a dict, the path of a JSON or YAML file, or the name of a preset.
        parent: "auto" (the last checkpoint this process committed or loaded in the same run directory), None (a
            keyframe) or the path of a checkpoint.
        overwrite: replace a complete checkpoint at `path`.
        model: its module tree defines layer types, which are otherwise inferred from names and shapes; its frozen
            tensors, which `quantize.frozen` stores exactly; and the weights that its modules round.
        process_group: the group DCP saves on, where it is not the default one.
        pinned: keep this checkpoint's refinement layer for good.
        no_dist: this rank saves alone; pass the same `no_dist` to DCP's function.
        history: earlier checkpoints that the save may continue; None: those of the process.
        on_save: called with the `SaveResult` once the checkpoint is committed, on the coordinator and in the thread
            that commits, for a logger. An exception becomes a warning.
        inputs: arguments that `Compressor` makes.

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
        history: SaveHistory | None = None,
        on_save: OnSave | None = None,
        inputs: CompressorInputs = _NO_INPUTS,
    ) -> None:
        self.path = None if path is None else resolve_checkpoint_path(path)
        self.config = DSQConfig.create(dict(config) if isinstance(config, Mapping) else config)
        expect("model", model, nn.Module | None, "a module, whose tree defines layer types")
        expect("history", history, SaveHistory | None, "a SaveHistory")
        expect("parent", parent, str | os.PathLike | None, "'auto', None or the directory of a checkpoint")
        expect_flags(overwrite=overwrite, pinned=pinned, no_dist=no_dist)
        expect_on_save(on_save)
        if is_lossy(self.config):
            warmup.start()
        self._model = model if self.config.quantize.frozen == "exact" and is_lossy(self.config) else None
        self._options = SaveOptions(
            self.config, parent, overwrite, bool(pinned), None if model is None else layer_types(model),
            policy=inputs.policy, fractions=inputs.fractions, history=default_history() if history is None else history,
            frozen=FrozenTensors() if self._model is None else frozen_from_history(self._model),  # until `_start_save`
            on_save=on_save, rounding=find_rounded_weights(model) if is_lossy(self.config) else {},
            excluded=None if inputs.excluded is None else dict(inputs.excluded),
        )
        self._gradients = dict(inputs.gradients)
        self._group = self._save_group = process_group
        self.no_dist = no_dist
        self.async_call: AsyncCall | None = None
        """Arguments of the next `dcp.async_save`, set by its caller; None: they are read from the call stack."""
        self._save: SavePipeline | None = None
        self._written: SavePipeline | None = None
        self._copy: dict[str, Any] = {}
        self._staged: StagedCodes | StagedCopy | None = None
        self._rank = 0
        self._last_save_id: str | None = None
        self._planned_names: set[str] = set()
        self._planner_name = ""
        self._cached_plan: CachedPlan | None = None
        self._caller_line = calling_line()

    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be pickled. A staged save is quantized, and needs neither policy nor gradients.
        staged = isinstance(self._staged, StagedCodes)
        gradients = {} if staged else self._gradients
        options = replace(self._options, policy=plan_as_configured) if staged else self._options
        omitted = dict.fromkeys(("_group", "_save_group", "_cached_plan", "async_call", "_model"))
        return {**self.__dict__, **omitted, "_copy": {}, "_options": options, "_gradients": gradients}

    def storage_meta(self) -> StorageMeta | None:
        if isinstance(self._staged, StagedCopy):  # DCP's first call in a save, before it calls the planner
            self._staged.start()
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @property
    def history(self) -> SaveHistory:
        """Earlier checkpoints that the save may continue."""
        return self._options.history

    def take_on_save(self) -> OnSave | None:
        """Remove and return `on_save`, for a caller whose save is committed by another process."""
        on_save, self._options = self._options.on_save, replace(self._options, on_save=None)
        return on_save

    @property
    def quality(self) -> dict[str, Any] | None:
        """Measurements of the policy for the last save; None if it made none."""
        plan = None if self._save is None else self._save.plan
        return None if plan is None else plan.quality

    # DCP passes the rank only if a parameter is named `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        set_background_line(self._caller_line)
        background, rank = call_stack.is_background_thread(), kwargs.get("rank")
        self._save_group = (call_stack.find_save_group() if background else None) or self._group
        if (
            not kwargs.get("use_collectives", True) and not self.no_dist
            and len(call_stack.get_group_ranks(self._save_group)) > 1
        ):
            raise SaveFailed(call_stack.NO_COLLECTIVES)
        self._rank = rank if rank is not None else call_stack.get_group_rank(self._save_group)
        self._prepare_write_step()
        if self._staged is None:  # else `stage` started the save
            if self._options.policy is not plan_as_configured and background:
                raise SaveFailed(call_stack.NO_SEARCH)
            self._save = self._start_save()
        elif self.path is not None:  # DCP may set it only now
            self._pipeline.path = self.path

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._cached_plan = CachedPlan.from_stack(plan)
        if isinstance(self._staged, StagedCodes):
            self._cached_plan = None
            return replace(plan, storage_data=LocalPlanData(self._pipeline.settings, self._staged.items))
        items = plan.items if self._cached_plan is None else self._cached_plan.items
        self._planned_names = {item.index.fqn for item in items}
        data = LocalPlanData(self._pipeline.settings, make_own_layout(items, self._options, bool(self._gradients)))
        if self._cached_plan is None:
            return replace(plan, storage_data=data)
        return self._cached_plan.attach_data(plan, data)

    @dcp_step(SaveFailed)
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.no_dist and len(plans) > 1:
            raise SaveFailed(f"DSQStorageWriter has no_dist=True, but DCP saves with {len(plans)} ranks")
        global_plan = GlobalPlan.from_stack(plans, tied=not isinstance(self._staged, StagedCodes))
        plans, rank_data = global_plan.plans, global_plan.rank_data
        check_same_settings([data.settings for data in rank_data])
        if isinstance(self._staged, StagedCodes):
            context = self._staged.context
            if context.ranks != len(plans):
                raise SaveFailed(
                    f"staged by {context.ranks} rank(s), but DCP saves with {len(plans)}: give DSQStorageWriter the "
                    "process_group of the save, and no_dist if that is given to DCP"
                )
            staged_items = [data.content for data in rank_data if isinstance(data.content, frozenset)]
            staging.check_all_staged(len(staged_items), len(plans))
            staging.check_staged_items(staged_items, plans)
            context = self._pipeline.resume(context)
        else:
            layouts = [data.content for data in rank_data if isinstance(data.content, Layout)]
            staging.check_all_staged(len(layouts), len(plans))
            if (agreed := global_plan.get_agreed_layout()) is not None:
                layouts = [agreed]
            else:  # a planner may rename items in its global plan, and other ranks may have other tensors
                items = {item.index.fqn: item for plan in plans for item in plan.items if item.tensor_data is not None}
                others = [item for name, item in items.items() if name not in self._planned_names]
                unknown = replace(self._options, frozen=FrozenTensors(), rounding={})
                all_items = [item for plan in plans for item in plan.items]
                layouts.append(make_plan_layout(others, unknown, bool(self._gradients), all_items))
            save_id = None if self._staged is None else self._staged.save_id
            context = self._pipeline.agree(len(plans), layouts, save_id=save_id)
        return global_plan.with_context(context)

    @dcp_step(SaveFailed)
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        context = plan.storage_data if self._cached_plan is None else self._cached_plan.receive_context(plan)
        if not isinstance(context, SaveContext) or context.save_id == self._last_save_id:
            raise SaveFailed(PLAN_CACHING)
        self._last_save_id = context.save_id
        self._planner_name, pipeline = type(planner).__name__, self._pipeline
        comm, staged = self._begin_writing(context.ranks)
        # DCP does not notify writers of a failure on another rank.
        with roll_back_together(comm, self.discard), pipeline.workers() as workers:
            if isinstance(staged, StagedCodes):
                items = make_plan_items(plan.items, planner, self._options, context.layout)
                state = collect_staged_payloads(items, staged, iterate_objects(plan.items, planner), context.save_id)
            else:
                state = self._quantize(context, plan, planner, comm, workers)
            if not plan.items:  # no manifest would name the file of this rank
                get_storage(pipeline.path).make_directory(pipeline.path, self.config.storage.fsync)
                return done_future([])
            result = pipeline.write(context, self._rank, state, workers)
            return done_future(make_write_results(plan.items, result))

    def _quantize(
        self, context: SaveContext, plan: SavePlan, planner: SavePlanner, comm: Communicator, workers: Workers
    ) -> QuantizedState:
        """Return the quantized state of this rank's plan; collective."""
        items = make_plan_items(plan.items, planner, self._options, context.layout)
        tied_items = TiedItems.find(items, make_replica_items(plan.items, planner, self._options, context))
        stored, tied = tied_items.select_stored(items), tied_items.primary_keys
        objects = iterate_objects(plan.items, planner)
        local = LocalItems(stored, tied=tied, gradients=self._gradients, objects=objects)
        state = self._pipeline.quantize(context, local, comm, workers)
        if self._cached_plan is not None:
            self._cached_plan.keep_exponents(state.plan.analysis.exponents)
        return state

    @dcp_step(SaveFailed)
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            self._finish(metadata, results)
        except BaseException:
            self.discard()
            raise

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        run_pending_handlers()  # not later: the checkpoint will be complete
        pipeline = self._written
        context = None if pipeline is None else pipeline.context
        if pipeline is None or context is None or pipeline.plan is None:
            raise SaveFailed(PLAN_CACHING)
        ranks = [written[0].storage_data["rank"] for written in results if written]
        nesting, dropped = planner_data_to_json(metadata.planner_data, metadata.state_dict_metadata.keys())
        contents = make_contents(metadata, nesting, ranks)
        check_metadata_complete(contents, self._planner_name)
        committed = pipeline.commit(context, contents)
        if committed.flushed:
            pipeline.retire()
        if dropped is not None:
            warn_safely(
                f"planner data of {self._planner_name} is not in the checkpoint, since it is no plain data "
                f"({dropped}); Metadata.planner_data will be None when it is loaded"
            )
        pipeline.announce()

    @hold_signals()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict that training can no longer change.

        If the save is planned by DCP's default planner, `storage.stage` selects one of two ways. Either tensors are
        copied, and the save runs in the background like a synchronous one. Or they are sketched and quantized here,
        which is collective over the writer's process group, and coded and written in the background. Any other planner
        needs the tensors themselves, so they are copied.

        Raises:
            CheckpointExists: a complete checkpoint exists and is not to be overwritten; on other ranks SaveFailed.
            SaveFailed: on all ranks, if any rank failed.
        """
        if self._staged is not None:
            raise SaveFailed("the last asynchronous save is unwritten, or failed; use a new DSQStorageWriter for each")
        self._caller_line, self._copy = calling_line(), {}
        call = self.async_call or AsyncCall.from_stack()
        if call is not None:
            call.check(self.no_dist)
            if call.processes:
                reset_dead_processes(communicator(None))
        is_alone = self.no_dist or (call is not None and call.no_dist)
        comm: Communicator | None = SingleProcess() if is_alone else None
        if comm is None and call is not None:
            own_ranks, save_ranks = map(call_stack.get_group_ranks, (self._group, call.process_group))
            comm = communicator(self._group) if own_ranks == save_ranks else None
        save_id = uuid.uuid4().hex[:16]
        searches = self._options.policy is not plan_as_configured

        def prepare_stage() -> tuple[RankSettings, str, bool, copies.CopyCost | None]:
            nonlocal state_dict
            state_dict = copies.wait_for_collectives(state_dict)
            if call is not None and call.checkpoint_id is not None:
                self.path = resolve_checkpoint_path(call.checkpoint_id)
            if call is not None and call.processes and self._options.on_save is not None:
                raise ConfigError(
                    "on_save is a function of this process, and DCP's background process commits: save in a thread, or "
                    "by dsq_ckpt.async_save(..., processes=True), which calls it here"
                )
            self._save = self._start_save()
            if comm is not None and comm.rank == 0:
                refuse_target(self._save.path, self._options.overwrite)
            default = call is not None and call.default_planner
            return self._save.settings, save_id, default, None if searches else copies.CopyCost.measure(state_dict)

        votes = gather_from_all_ranks(comm or SingleProcess(), prepare_stage)
        check_same_settings([settings for settings, *_ in votes])
        if comm is not None:
            save_id = votes[0][1]
        if comm is not None and all(default for *_, default, _ in votes):  # the decision must be the same on all ranks
            processes = call is not None and call.processes
            if copies.should_copy(self.config.storage.stage, [cost for *_, cost in votes], processes, comm.rank):
                copy = run_on_all_ranks(comm, lambda: self._copy_state(copies.copy_bare_state_dict, state_dict))
                return self._stage_copy(copy, call, save_id)
            copies.release_spare_memory()
            quantize = partial(stage_codes, state_dict, self._pipeline, self._gradients, comm)
            staged, self._staged = run_on_all_ranks(comm, quantize)
            return staged
        if searches:
            raise SaveFailed(call_stack.NO_SEARCH)
        failure: str | None = None
        copy = {}
        try:
            copy = self._copy_state(copies.copy_state_dict, state_dict)
        except Exception as error:  # raised later, in DCP's next collective, which the other ranks enter too
            failure = f"{type(error).__name__}: {error}"
        return self._stage_copy(copy, call, save_id, failure)

    def _copy_state(self, copy: Callable[[dict[str, Any]], dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state dict, and copy the gradients too."""
        copied = copy(state)
        self._gradients = {name: average.clone() for name, average in self._gradients.items()}
        return copied

    def _stage_copy(
        self, copy: dict[str, Any], call: AsyncCall | None, save_id: str, failure: str | None = None
    ) -> dict[str, Any]:
        """Keep a copy for the save in the background, and return it."""
        self._copy = copy
        self._staged = StagedCopy.create(call, save_id, self.history, self._pipeline.path, failure)
        return copy

    def release(self) -> None:
        """Drop the copy of the state dict once the save has ended; the next copy may reuse its memory."""
        self._copy.clear()

    def _start_save(self) -> SavePipeline:
        if self.path is None:
            raise SaveFailed("no path: give it to DSQStorageWriter or as checkpoint_id")
        if self._model is not None and not call_stack.is_background_thread():  # there training may be changing it
            self._options = replace(self._options, frozen=find_frozen(self._model))
        return SavePipeline(self.path, self._options)
