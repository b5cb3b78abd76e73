"""DCP's plans, read with the options of a save: layouts, items, and tensors that other ranks write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from dsq_ckpt.dcp.calls import SaveCall
from dsq_ckpt.dcp.items import name_of, shards_of
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.local import SaveItem, items_of, layout_of
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.quantization.layout import Layout


def layout_of_plan(
    write_items: list[WriteItem], options: SaveOptions, averaged: bool, others: Iterable[WriteItem] = (),
    values: Mapping[str, Any] | None = None,
) -> Layout:
    """Return the lossy tensors among DCP's items, and their settings.

    Args:
        write_items: items of one rank.
        options: options of the save.
        averaged: whether weights come with averaged gradients.
        others: items of other ranks in the same save.
        values: the flat state dict, as far as it is known.
    """
    shards, others = shards_of(write_items), list(others)
    chunks = {shard.key: shard.dtype for shard in shards_of(others)} if shards else {}
    # Of all ranks, which are dealt settings of one optimizer: a part of them would look like another optimizer's.
    names = [item.index.fqn for item in (*write_items, *others) if item.tensor_data is None]
    objects = {name: None if values is None else values.get(name) for name in names}
    return layout_of(shards, options, averaged, chunks, objects)


def layout_of_own_plan(write_items: list[WriteItem], options: SaveOptions, averaged: bool) -> Layout:
    """Return the layout of this rank's items in the save on this thread's stack, whose planner has the values."""
    call = SaveCall.of_stack()
    values = None if call is None else getattr(call.planner, "state_dict", None)
    return layout_of_plan(write_items, options, averaged, values=values if isinstance(values, Mapping) else None)


def items_of_plan(
    write_items: list[WriteItem], planner: SavePlanner, options: SaveOptions, layout: Layout | None = None
) -> list[SaveItem]:
    """Return the tensors among DCP's items.

    Args:
        write_items: items of this rank.
        planner: resolves their data.
        options: options of the save.
        layout: agreed layout of all ranks, once there is one.
    """
    return items_of(shards_of(write_items, planner), options, layout)


def items_beside(
    write_items: list[WriteItem], planner: SavePlanner, options: SaveOptions, context: SaveContext
) -> list[SaveItem]:
    """Return tensors of this rank's state dict that another rank writes; none if the planner is not DCP's."""
    if context.ranks == 1 or not isinstance(planner, DefaultSavePlanner) or apart(planner.state_dict):
        return []
    whole = DefaultSavePlanner()  # the hooks of a planner are called no oftener than DCP does it
    whole.set_up_planner(planner.state_dict)
    mine = set(map(name_of, write_items))
    others = [item for item in whole.create_local_plan().items if name_of(item) not in mine]
    return items_of_plan(others, whole, options, context.layout)


def apart(state: Any) -> bool:
    """Return whether no two tensors of a state can share memory, so that it need not be planned again as a whole."""
    seen: set[int] = set()
    left = [state]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            try:
                place = getattr(value, "_local_tensor", value).untyped_storage().data_ptr()
            except Exception:  # a subclass or layout without a storage of its own
                return False
            if place and place in seen:
                return False
            seen.add(place)
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    return True
