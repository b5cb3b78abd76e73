"""Assignment of small replicated tensors and of objects to the lowest rank, instead of DCP's assignment by name.

DCP balances the bytes that ranks write. But replicas are not always equal: each rank counts statistics of its own
batches, and DDP broadcasts those of rank 0 before a forward pass. A model with the statistics of one rank in one layer
and of another rank in the next never existed on any rank. Small tensors hardly affect the balance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dsq_ckpt.dcp.items import get_chunk_key

SMALL_BYTES = 1 << 16
"""Bytes up to which a whole tensor is written by the lowest rank that has it."""


def assign_to_lowest_rank(plans: list[SavePlan], local: Sequence[SavePlan]) -> list[SavePlan]:
    """Return plans in which small tensors, parts of them, and objects are written by the lowest rank that has them.

    Args:
        plans: global plan, in rank order.
        local: local plans of all ranks, in rank order.
    """
    if sum(len(plan.items) for plan in plans) == sum(len(plan.items) for plan in local):
        return plans  # no replicas
    lowest: dict[MetadataIndex, tuple[int, WriteItem]] = {}
    for rank, plan in enumerate(local):
        for item in plan.items:
            lowest.setdefault(item.index, (rank, item))
    assigned: list[list[WriteItem]] = []
    added: dict[int, list[WriteItem]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        assigned.append([])
        for item in plan.items:
            first, other = lowest.get(item.index, (rank, item))
            if first == rank or (item.tensor_storage_size() or 0) > SMALL_BYTES or not _has_same_metadata(item, other):
                assigned[rank].append(item)
            else:
                added[first].append(other)
    return [
        replace(plan, items=items + added[rank]) if rank in added or len(items) < len(plan.items) else plan
        for rank, (plan, items) in enumerate(zip(plans, assigned, strict=True))
    ]


def _has_same_metadata(item: WriteItem, other: WriteItem) -> bool:
    """Return whether two items have the same metadata."""
    if item.tensor_data is None or other.tensor_data is None:
        return item.tensor_data is other.tensor_data
    same_type = item.tensor_data.properties.dtype == other.tensor_data.properties.dtype
    return same_type and item.tensor_data.size == other.tensor_data.size and get_chunk_key(item) == get_chunk_key(other)
