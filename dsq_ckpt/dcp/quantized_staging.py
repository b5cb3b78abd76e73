"""Staging that quantizes on the training thread, for saves that are planned as DCP does it by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from dsq_ckpt.core.nesting import Place
from dsq_ckpt.core.tensor_subclasses import check_storable
from dsq_ckpt.dcp.differing import digests, warn_of_differing
from dsq_ckpt.dcp.items import key_of, name_of
from dsq_ckpt.dcp.plans import items_of_plan, layout_of_plan
from dsq_ckpt.dcp.small_plans import by_lowest_rank
from dsq_ckpt.dcp.staging import ExactCopy, Payload, StagedCodes, staged_state_dict
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks, run_on_all_ranks
from dsq_ckpt.engine.chunks import QuantizedChunk, cache_chunk, exact_values
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import ChunkCache
from dsq_ckpt.engine.local import LocalItems
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
        A state dict of codes that training can no longer change, and what the background save compares with its plans.

    Raises:
        DSQError: on all ranks, when any rank failed.
    """
    planner, options = DefaultSavePlanner(), pipeline.options

    def plan_untied() -> tuple[SavePlan, Layout, TiedItems, dict[Place, int]]:
        """Find tied items before replicas are assigned to ranks, or two ranks would get one name each."""
        planner.set_up_planner(state_dict, is_coordinator=comm.rank == 0)
        for fqn, value in planner.state_dict.items():
            check_storable(fqn, value)
        whole = replace(planner.create_local_plan(), planner_data=None)
        found = TiedItems.of(items_of_plan(whole.items, planner, options))
        items = [item for item in whole.items if item.tensor_data is None or key_of(item) not in found.stored_as]
        others = [item for item in whole.items if item.tensor_data is not None and key_of(item) in found.stored_as]
        of_model = layout_of_plan(whole.items, options, False, values=planner.state_dict).of_model()
        tensors = {name: value for name, value in planner.state_dict.items() if isinstance(value, torch.Tensor)}
        told = digests(tensors) if comm.size > 1 else {}  # planners are given codes
        return replace(whole, items=items, storage_data=others), of_model, found, told

    own_plan, of_model, tied_items, told = run_on_all_ranks(comm, plan_untied)
    others, own_plan = own_plan.storage_data, replace(own_plan, storage_data=None)
    local = own_plan.items
    found = gather_from_all_ranks(comm, lambda: (own_plan, of_model, told))
    plans = [plan for plan, *_ in found]
    plans = by_lowest_rank(dedup_save_plans(plans), plans)  # as a save without staging: each replica is coded once
    written = {key_of(item) for item in plans[comm.rank].items if item.tensor_data is not None}
    tied = {key: first for key, first in tied_items.stored_as.items() if first in written}
    mine = [*plans[comm.rank].items, *(item for item in others if key_of(item) in tied)]

    def agreed() -> SaveContext | None:
        if comm.rank:
            return None
        warn_of_differing(own for *_, own in found)
        whole = [item for plan in plans for item in plan.items]
        unknown = replace(options, frozen=FrozenTensors(), rounding={})  # each rank knows of its own
        layouts = [layout_of_plan(plan.items, unknown, bool(gradients), whole) for plan in plans]
        layouts += [of_model for _, of_model, _ in found]
        return pipeline.agree(len(plans), layouts, staged=True)

    context = gather_from_all_ranks(comm, agreed)[0]
    assert context is not None

    def quantized() -> tuple[dict[str, Any], StagedCodes, ChunkCache]:
        items = tied_items.stored(items_of_plan(mine, planner, options, context.layout))
        own = {item.key for item in items}
        replicas = tied_items.stored(items_of_plan(local, planner, options, context.layout))
        replicas = [item for item in replicas if item.key not in own]
        payloads: dict[ChunkKey, Payload] = {}
        cache = ChunkCache()
        with pipeline.workers() as workers:
            found = pipeline.quantize(context, LocalItems(items, replicas, gradients=gradients), comm, workers)
            exact = host_copies([item.load().detach() for item in found.unquantized])
            for item, values in zip(found.unquantized, exact, strict=True):
                payloads[item.key] = ExactCopy(values, item.config)
            for chunk in found.chunks:
                payloads[chunk.codes.key] = QuantizedChunk(chunk.codes.staged(workers), chunk.base)
                if chunk.base is None or not context.shared:
                    cache_chunk(cache, chunk.codes, options.config.delta.enabled)
            cache.values |= exact_values(found.unquantized, context.layout)
        payloads |= {key: payloads[first] for key, first in tied.items()}
        objects = [item for item in local if item.tensor_data is None]  # any rank may be dealt them
        names = frozenset(map(name_of, [*mine, *objects]))
        staged = StagedCodes(context, found.plan, names, found.alone, found.related)
        state = staged_state_dict(state_dict, mine, payloads)
        return state, staged, cache

    state, staged, cache = run_on_all_ranks(comm, quantized)
    pipeline.remember(context, cache)
    return state, staged
