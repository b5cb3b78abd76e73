"""Replicas of small tensors, and objects, which DCP's planner deals to ranks name by name, to be written by one rank.

DCP balances what ranks write. But replicas are not always equal: each rank counts the statistics of its own batches,
and DDP makes them those of rank 0 before a forward. A model with the statistics of one rank in one layer, and of
another rank in the next, was on none of them. Small tensors weigh next to nothing in the balance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dsq_ckpt.dcp.items import key_of

SMALL = 1 << 16
"""Bytes of a whole tensor that is written by the lowest rank which has it."""


def by_lowest_rank(plans: list[SavePlan], local: Sequence[SavePlan]) -> list[SavePlan]:
    """Return plans in which the lowest rank that has a small tensor, a part of one, or an object, writes it.

    Args:
        plans: global plan, in rank order.
        local: what each rank could write, in rank order.
    """
    if sum(len(plan.items) for plan in plans) == sum(len(plan.items) for plan in local):
        return plans  # no replicas
    lowest: dict[MetadataIndex, tuple[int, WriteItem]] = {}
    for rank, plan in enumerate(local):
        for item in plan.items:
            lowest.setdefault(item.index, (rank, item))
    kept: list[list[WriteItem]] = []
    more: dict[int, list[WriteItem]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        kept.append([])
        for item in plan.items:
            first, own = lowest.get(item.index, (rank, item))
            if first == rank or (item.tensor_storage_size() or 0) > SMALL or not _alike(item, own):
                kept[rank].append(item)
            else:
                more[first].append(own)
    return [
        replace(plan, items=items + more[rank]) if rank in more or len(items) < len(plan.items) else plan
        for rank, (plan, items) in enumerate(zip(plans, kept, strict=True))
    ]


def _alike(item: WriteItem, other: WriteItem) -> bool:
    """Return whether the metadata that a planner made of one item holds for the other."""
    if item.tensor_data is None or other.tensor_data is None:
        return item.tensor_data is other.tensor_data
    same_type = item.tensor_data.properties.dtype == other.tensor_data.properties.dtype
    return same_type and item.tensor_data.size == other.tensor_data.size and key_of(item) == key_of(other)
