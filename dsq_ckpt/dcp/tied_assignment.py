"""Assignment of tied weights to one rank, which writes them once, instead of DCP's assignment by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dsq_ckpt.dcp.items import get_chunk_key
from dsq_ckpt.dcp.plans import has_no_shared_memory
from dsq_ckpt.engine.tied import get_memory_key, local_part
from dsq_ckpt.quantization.chunk import ChunkKey


def assign_tied_together(
    plans: list[SavePlan], local: Sequence[SavePlan], state_dict: Mapping[str, Any]
) -> list[SavePlan]:
    """Return plans in which the rank that writes one of several tied names writes the others too, if it has them.

    Args:
        plans: global plan, in rank order.
        local: local plans of all ranks, in rank order.
        state_dict: flat state dict of this rank; its tied weights are assumed to be those of all ranks.
    """
    if len(plans) == 1 or has_no_shared_memory(state_dict):
        return plans
    first = _find_first_names(state_dict)
    names = first.keys() | first.values()  # few items in a large job, so keys are made for these only
    writers = {key: rank for rank, plan in enumerate(plans) for key in _index_tensor_items(plan, names)}
    candidates = [_index_tensor_items(plan, names) for plan in local]
    moved: set[ChunkKey] = set()
    added: dict[int, list[WriteItem]] = defaultdict(list)
    for key, rank in writers.items():
        writer = writers.get(key._replace(fqn=first.get(key.fqn, key.fqn)), rank)
        if writer != rank and key in candidates[writer]:
            moved.add(key)
            added[writer].append(candidates[writer][key])
    changed = {writers[key] for key in moved} | added.keys()
    return [
        replace(plan, items=[item for item in plan.items if not _is_among(item, names, moved)] + added[rank])
        if rank in changed else plan for rank, plan in enumerate(plans)
    ]


def _find_first_names(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Return the first name of the same memory, by every other name."""
    names: dict[Hashable, str] = {}
    first_names: dict[str, str] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            tensor = local_part(value)
            try:
                key = get_memory_key(tensor), tensor.shape
            except Exception:  # a subclass or layout without memory of its own
                continue
            if tensor.numel() and (first := names.setdefault(key, name)) != name:
                first_names[name] = first
    return first_names


def _index_tensor_items(plan: SavePlan, names: Set[str]) -> dict[ChunkKey, WriteItem]:
    return {
        get_chunk_key(item): item for item in plan.items if item.tensor_data is not None and item.index.fqn in names
    }


def _is_among(item: WriteItem, names: Set[str], keys: Set[ChunkKey]) -> bool:
    return item.tensor_data is not None and item.index.fqn in names and get_chunk_key(item) in keys
