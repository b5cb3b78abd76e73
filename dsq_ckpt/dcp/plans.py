"""Conversion of DCP's plans with the options of a save: to layouts, items and replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from dsq_ckpt.dcp.call_stack import SaveCall
from dsq_ckpt.dcp.items import get_item_name, make_shards
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.local_state import SaveItem, make_items, make_layout
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.quantization.layout import Layout


def make_plan_layout(
    write_items: list[WriteItem], options: SaveOptions, has_gradients: bool, others: Iterable[WriteItem] = (),
    values: Mapping[str, Any] | None = None,
) -> Layout:
    """Return the layout of DCP's items of one rank.

    Args:
        write_items: items of one rank.
        options: options of the save.
        has_gradients: whether weights come with averaged gradients.
        others: items of other ranks in the same save.
        values: the flat state dict, as far as it is known.
    """
    shards, others = make_shards(write_items), list(others)
    chunks = {shard.key: shard.dtype for shard in make_shards(others)} if shards else {}
    # Of all ranks: settings of an optimizer are distributed over ranks, and a part of them would look like another one.
    names = [item.index.fqn for item in (*write_items, *others) if item.tensor_data is None]
    objects = {name: None if values is None else values.get(name) for name in names}
    return make_layout(shards, options, has_gradients, chunks, objects)


def make_own_layout(write_items: list[WriteItem], options: SaveOptions, has_gradients: bool) -> Layout:
    """Return the layout of this rank's items, with the values of the planner of the save on this thread's stack."""
    call = SaveCall.from_stack()
    values = None if call is None else getattr(call.planner, "state_dict", None)
    return make_plan_layout(write_items, options, has_gradients, values=values if isinstance(values, Mapping) else None)


def make_plan_items(
    write_items: list[WriteItem], planner: SavePlanner, options: SaveOptions, layout: Layout | None = None
) -> list[SaveItem]:
    """Return the tensors among DCP's items, with their settings.

    Args:
        write_items: items of this rank.
        planner: planner that resolves their data.
        options: options of the save.
        layout: layout of all ranks; None: not yet known.
    """
    return make_items(make_shards(write_items, planner), options, layout)


def make_replica_items(
    write_items: list[WriteItem], planner: SavePlanner, options: SaveOptions, context: SaveContext
) -> list[SaveItem]:
    """Return the replicas: tensors of this rank's state dict that another rank writes; none with a custom planner."""
    if context.ranks == 1 or not isinstance(planner, DefaultSavePlanner) or has_no_shared_memory(planner.state_dict):
        return []
    own_planner = DefaultSavePlanner()  # DCP alone calls the hooks of the save's planner
    own_planner.set_up_planner(planner.state_dict)
    own_names = set(map(get_item_name, write_items))
    others = [item for item in own_planner.create_local_plan().items if get_item_name(item) not in own_names]
    return make_plan_items(others, own_planner, options, context.layout)


def has_no_shared_memory(state: Any) -> bool:
    """Return whether no two tensors of a state share memory; then replicas need not be planned for tied weights."""
    pointers: set[int] = set()
    stack = [state]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            try:
                pointer = getattr(value, "_local_tensor", value).untyped_storage().data_ptr()
            except Exception:  # a subclass or layout without a storage of its own
                return False
            if pointer and pointer in pointers:
                return False
            pointers.add(pointer)
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
    return True
