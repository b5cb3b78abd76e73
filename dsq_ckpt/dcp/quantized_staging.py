"""Staging that quantizes on the training thread, for saves that are planned by DCP's default planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dsq_ckpt.core.nesting import Place
from dsq_ckpt.core.tensor_subclasses import check_storable
from dsq_ckpt.dcp.items import get_chunk_key, get_item_name
from dsq_ckpt.dcp.plans import make_plan_items, make_plan_layout
from dsq_ckpt.dcp.rank_differences import compute_digests, warn_of_differences
from dsq_ckpt.dcp.replica_assignment import assign_to_lowest_rank
from dsq_ckpt.dcp.staging import ExactCopy, Payload, StagedCodes, make_staged_state_dict
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.chunks import QuantizedChunk, cache_chunk, copy_exact_values
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import ChunkCache
from dsq_ckpt.engine.local_state import LocalItems
from dsq_ckpt.engine.pipeline import SavePipeline
from dsq_ckpt.engine.tied import TiedItems
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.device.transfer import host_copies
from dsq_ckpt.quantization.frozen_tensors import FrozenTensors
from dsq_ckpt.quantization.layout import Layout


def stage_codes(
    state_dict: dict[str, Any], pipeline: SavePipeline, gradients: Mapping[str, torch.Tensor], comm: Communicator
) -> tuple[dict[str, Any], StagedCodes]:
    """Quantize a state dict on the training thread; collective over `comm`.

    Args:
        state_dict: state of this rank.
        pipeline: the save.
        gradients: averaged gradients of local shards, by parameter name.
        comm: communicator of the ranks that save.

    Returns:
        A state dict of codes that training can no longer change, and the staged save.

    Raises:
        DSQError: on all ranks, if any rank failed.
    """
    planner, options = DefaultSavePlanner(), pipeline.options

    def plan_untied() -> tuple[SavePlan, Layout, TiedItems, dict[Place, int]]:
        """Find tied items before replicas are assigned to ranks: else two ranks could get one name each."""
        planner.set_up_planner(state_dict, is_coordinator=comm.rank == 0)
        for fqn, value in planner.state_dict.items():
            check_storable(fqn, value)
        plan = replace(planner.create_local_plan(), planner_data=None)
        tied = TiedItems.find(make_plan_items(plan.items, planner, options))
        items, others = list[WriteItem](), list[WriteItem]()
        for item in plan.items:
            is_tied = item.tensor_data is not None and get_chunk_key(item) in tied.primary_keys
            (others if is_tied else items).append(item)
        of_model = make_plan_layout(plan.items, options, False, values=planner.state_dict).rank_part()
        tensors = {name: value for name, value in planner.state_dict.items() if isinstance(value, torch.Tensor)}
        digests = compute_digests(tensors) if comm.size > 1 else {}  # planners see codes, not tensors
        return replace(plan, items=items, storage_data=others), of_model, tied, digests

    own_plan, of_model, tied_items, digests = run_on_all_ranks(comm, plan_untied)
    others, own_plan = own_plan.storage_data, replace(own_plan, storage_data=None)
    local = own_plan.items
    answers = gather_from_all_ranks(comm, lambda: (own_plan, of_model, digests))
    plans = [plan for plan, *_ in answers]
    plans = assign_to_lowest_rank(dedup_save_plans(plans), plans)  # as without staging: each replica is coded once
    written = {get_chunk_key(item) for item in plans[comm.rank].items if item.tensor_data is not None}
    tied = {key: first for key, first in tied_items.primary_keys.items() if first in written}
    own_items = [*plans[comm.rank].items, *(item for item in others if get_chunk_key(item) in tied)]

    def agree() -> SaveContext | None:
        if comm.rank:
            return None
        warn_of_differences(digests for *_, digests in answers)
        all_items = [item for plan in plans for item in plan.items]
        unknown = replace(options, frozen=FrozenTensors(), rounding={})  # those of each rank are in its own layout
        layouts = [make_plan_layout(plan.items, unknown, bool(gradients), all_items) for plan in plans]
        layouts += [of_model for _, of_model, _ in answers]
        return pipeline.agree(len(plans), layouts, staged=True)

    context = gather_from_all_ranks(comm, agree)[0]
    assert context is not None

    def quantize() -> tuple[dict[str, Any], StagedCodes, ChunkCache]:
        items = tied_items.select_stored(make_plan_items(own_items, planner, options, context.layout))
        own_keys = {item.key for item in items}
        replicas = tied_items.select_stored(make_plan_items(local, planner, options, context.layout))
        replicas = [item for item in replicas if item.key not in own_keys]
        payloads: dict[ChunkKey, Payload] = {}
        cache = ChunkCache()
        with pipeline.workers() as workers:
            answers = pipeline.quantize(context, LocalItems(items, replicas, gradients=gradients), comm, workers)
            exact = host_copies([item.load().detach() for item in answers.unquantized])
            for item, values in zip(answers.unquantized, exact, strict=True):
                payloads[item.key] = ExactCopy(values, item.config)
            for chunk in answers.chunks:
                payloads[chunk.codes.key] = QuantizedChunk(chunk.codes.staged(workers), chunk.parent_record)
                if chunk.parent_record is None or not context.reuses_parent:
                    cache_chunk(cache, chunk.codes, options.config.delta.enabled)
            cache.values |= copy_exact_values(answers.unquantized, context.layout)
        payloads |= {key: payloads[first] for key, first in tied.items()}
        objects = [item for item in local if item.tensor_data is None]  # any rank may be assigned them
        names = frozenset(map(get_item_name, [*own_items, *objects]))
        staged = StagedCodes(context, answers.plan, names, answers.is_self_contained, answers.related)
        state = make_staged_state_dict(state_dict, own_items, payloads)
        return state, staged, cache

    state, staged, cache = run_on_all_ranks(comm, quantize)
    pipeline.add_to_history(context, cache)
    return state, staged
