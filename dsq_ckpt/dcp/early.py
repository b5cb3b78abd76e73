"""Staging that quantizes on the training thread, for saves that are planned as DCP does it by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from dsq_ckpt.core.workers import Workers
from dsq_ckpt.dcp.items import key_of, name_of
from dsq_ckpt.dcp.recipe import Recipe
from dsq_ckpt.dcp.staging import ExactCopy, Payload, StagedCodes, staged_state_dict
from dsq_ckpt.distributed.comm import Communicator, together, told_together
from dsq_ckpt.engine.remembered import Memory
from dsq_ckpt.engine.session import Agreement, Coded, exact_values, remember
from dsq_ckpt.engine.ties import Ties
from dsq_ckpt.quantization.analysis import Layout
from dsq_ckpt.quantization.chunk import ChunkKey


def stage_codes(
    state_dict: dict[str, Any], recipe: Recipe, comm: Communicator, decide: Callable[[list[Layout]], Agreement],
) -> tuple[dict[str, Any], StagedCodes, Memory]:
    """Sketch, merge, quantize; collective over `comm`.

    Args:
        state_dict: of this rank.
        recipe: how tensors are stored.
        comm: of the ranks that save.
        decide: makes the coordinator's agreement of the layouts of all ranks.

    Returns:
        A state dict of codes that training can no longer change, what the background save compares with its plans, and
        what the next save needs of the chunks here.

    Raises:
        DSQError: on all ranks, when any rank failed.
    """
    planner = DefaultSavePlanner()

    def plan_untied() -> tuple[SavePlan, Ties]:
        """Ties are found before replicas are dealt to ranks, or one rank would get the one, another the other."""
        planner.set_up_planner(state_dict, is_coordinator=comm.rank == 0)
        whole = replace(planner.create_local_plan(), planner_data=None)
        ties = Ties.of(recipe.items(whole.items, planner)[0])
        items = [item for item in whole.items if item.tensor_data is None or key_of(item) not in ties.first]
        others = [item for item in whole.items if item.tensor_data is not None and key_of(item) in ties.first]
        return replace(whole, items=items, storage_data=others), ties

    own_plan, ties = together(comm, plan_untied)
    others, own_plan = own_plan.storage_data, replace(own_plan, storage_data=None)
    local = own_plan.items
    plans = dedup_save_plans(comm.gather(own_plan))  # as DCP would: each replica is coded once
    written = {key_of(item) for item in plans[comm.rank].items if item.tensor_data is not None}
    tied = {key: first for key, first in ties.first.items() if first in written}
    mine = [*plans[comm.rank].items, *(item for item in others if key_of(item) in tied)]

    def agreed() -> Agreement | None:
        whole = [item for plan in plans for item in plan.items]
        return None if comm.rank else decide([recipe.layout(plan.items, whole) for plan in plans])

    agreement = told_together(comm, agreed)[0]
    assert agreement is not None

    def quantized() -> tuple[dict[str, Any], StagedCodes, Memory]:
        storage = recipe.config.storage
        with Workers(storage.thread_count(), storage.block_elements) as workers:
            items = ties.kept(recipe.items(mine, planner, agreement.layout)[0])
            own = {item.key for item in items}
            replicas = ties.kept(recipe.items(local, planner, agreement.layout)[0])
            replicas = [item for item in replicas if item.key not in own]
            found = recipe.quantized(items, replicas, agreement, comm, workers)
            payloads: dict[ChunkKey, Payload] = {}
            memory = Memory()
            for piece in found.coded:
                payloads[piece.chunk.key] = Coded(piece.chunk.staged(workers), piece.base)
                remember(memory, piece.chunk, recipe.config)
            for item in found.plain:
                payloads[item.key] = ExactCopy(item.load().detach().to("cpu", copy=True), item.config)
            memory.values |= exact_values(found.plain, agreement.layout)
        payloads |= {key: payloads[first] for key, first in tied.items()}
        objects = [item for item in local if item.tensor_data is None]  # any rank may be dealt them
        staged = StagedCodes(agreement, found.choice, frozenset(map(name_of, [*mine, *objects])))
        return staged_state_dict(state_dict, mine, payloads), staged, memory

    return together(comm, quantized)
