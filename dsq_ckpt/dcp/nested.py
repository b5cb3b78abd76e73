"""Planners that keep what DCP's own leave out of a nested state dict, and empty dicts that a load fills."""

from __future__ import annotations

import io
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from dsq_ckpt.checkpoint import Checkpoint, dtype_of
from dsq_ckpt.dcp.reader import malformed
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.nesting import Nesting, Path, empty_dicts, put


class NestedSavePlanner(DefaultSavePlanner):
    """DCP's planner; `planner_data` of its metadata is a `Nesting` of all ranks."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.mappings = Nesting.of(state_dict, self.mappings)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        parts = [plan.planner_data for plan in all_plans]
        return plans, replace(metadata, planner_data=Nesting.merged(metadata.planner_data, parts))


class NestedLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which finds objects below keys that are no strings, too."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # Only ShardedTensors of ShardedTensors need it, and it makes None of empty dicts in lists.
        flat, _ = flatten_state_dict(state_dict)
        self.flatten_sharded_tensors = any(isinstance(value, ShardedTensor) for value in flat.values())
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._nesting = Nesting.of(state_dict, self.mappings)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        steps = self._nesting.steps(self.mappings[read_item.dest_index.fqn])
        put(self.original_state_dict, steps, torch.load(value, weights_only=False))


def fill_empty(state_dict: dict[str, Any], checkpoint: Checkpoint) -> list[MutableMapping[Any, Any]]:
    """Put placeholders for all that a checkpoint holds below them into the empty dicts of a state dict.

    Args:
        state_dict: to be loaded; tensors are made on the CPU.
        checkpoint: to load it from.

    Returns:
        The dicts that are no longer empty.

    Raises:
        LoadFailed: the checkpoint has nothing there, and no empty dict either.
        CorruptCheckpoint: its index is not as documented.
    """
    filled: list[MutableMapping[Any, Any]] = []
    with malformed(checkpoint):
        nesting, tensors = Nesting.from_json(checkpoint.index), checkpoint.index["tensors"]
        if nesting is None:
            return filled
        for path, target in list(empty_dicts(state_dict)):
            found = nesting.below(path)
            if found is None and path and nesting.empty is not None:
                raise LoadFailed(_nothing_below(path, nesting, checkpoint))
            if found is None or not isinstance(target, MutableMapping):
                continue
            target.update(found.nested({
                name: torch.empty(tensors[name]["shape"], dtype=dtype_of(tensors[name]["dtype"]))
                if name in tensors else None for name in found
            }))
            filled.append(target)
    return filled


def _nothing_below(path: Path, nesting: Nesting, checkpoint: Checkpoint) -> str:
    name = ".".join(map(str, path))
    known = sorted({str(own[0]) for own in [*nesting.values(), *(nesting.empty or ())]})
    return (
        f"'{name}' is an empty dict, to be filled with what is stored below it, but '{checkpoint.directory}' has "
        f"nothing there; at its top level are {', '.join(repr(key) for key in known)}. Leave '{name}' out, or name "
        "what was saved"
    )
