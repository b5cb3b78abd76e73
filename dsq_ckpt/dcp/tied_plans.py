"""Replicas of tied weights, which DCP's planner deals to ranks name by name, to be written by one rank, so once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dsq_ckpt.dcp.items import key_of
from dsq_ckpt.dcp.plans import apart
from dsq_ckpt.engine.tied import local_part, place_of
from dsq_ckpt.quantization.chunk import ChunkKey


def together(plans: list[SavePlan], local: Sequence[SavePlan], state_dict: Mapping[str, Any]) -> list[SavePlan]:
    """Return plans in which the rank that writes one of several tied names writes the others too, if it has them.

    Args:
        plans: global plan, in rank order.
        local: what each rank could write, in rank order.
        state_dict: flat state dict of this rank, whose ties are taken for those of all ranks.
    """
    if len(plans) == 1 or apart(state_dict):
        return plans
    first = _first_names(state_dict)
    names = first.keys() | first.values()  # few of a large job's items: keys are made of these alone
    writers = {key: rank for rank, plan in enumerate(plans) for key in _tensors(plan, names)}
    candidates = [_tensors(plan, names) for plan in local]
    moved: set[ChunkKey] = set()
    more: dict[int, list[WriteItem]] = defaultdict(list)
    for key, rank in writers.items():
        writer = writers.get(key._replace(fqn=first.get(key.fqn, key.fqn)), rank)
        if writer != rank and key in candidates[writer]:
            moved.add(key)
            more[writer].append(candidates[writer][key])
    changed = {writers[key] for key in moved} | more.keys()
    return [
        replace(plan, items=[item for item in plan.items if not _among(item, names, moved)] + more[rank])
        if rank in changed else plan for rank, plan in enumerate(plans)
    ]


def _first_names(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Return the first name of the same memory, by each name that is not the first."""
    seen: dict[Hashable, str] = {}
    found: dict[str, str] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            tensor = local_part(value)
            try:
                place = place_of(tensor), tensor.shape
            except Exception:  # a subclass or layout without memory of its own
                continue
            if tensor.numel() and (first := seen.setdefault(place, name)) != name:
                found[name] = first
    return found


def _tensors(plan: SavePlan, names: Set[str]) -> dict[ChunkKey, WriteItem]:
    return {
        key_of(item): item for item in plan.items if item.tensor_data is not None and item.index.fqn in names
    }


def _among(item: WriteItem, names: Set[str], keys: Set[ChunkKey]) -> bool:
    return item.tensor_data is not None and item.index.fqn in names and key_of(item) in keys
