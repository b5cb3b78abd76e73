"""Planners as PyTorch's documentation shows how to write them, and others that change what is saved."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType


class Recording(DefaultSavePlanner):
    """DCP's planner, which tells each of its calls to a file named by `RECORD` and the rank."""

    def __init__(self, record: Path, rank: int) -> None:
        super().__init__()
        self.record = record.with_name(f"{record.name}-{rank}")

    def _tell(self, call: str, *arguments: Any) -> None:
        with open(self.record, "a") as file:
            print(call, *arguments, file=file)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        kinds = {key: type(value).__name__ for key, value in state_dict.items()}
        self._tell("set_up_planner", kinds, type(storage_meta).__name__, is_coordinator)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self._tell("create_local_plan", *(item.index.fqn for item in plan.items))
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._tell("create_global_plan", *([item.index.fqn for item in plan.items] for plan in all_plans))
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._tell("finish_plan", *(item.index.fqn for item in new_plan.items))
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        self._tell("lookup_object", index.fqn, tuple(index.offset or ()), type(value).__name__)
        return value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        self._tell("transform_object", write_item.index.fqn, type(object).__name__)
        return super().transform_object(write_item, object)


class Balancing(DefaultSavePlanner):
    """Deals rank 0's items to all ranks, one by one."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        dealt = [
            replace(plan, items=all_plans[0].items[rank :: len(all_plans)]) for rank, plan in enumerate(all_plans)
        ]
        return super().create_global_plan(dealt)


class Half(DefaultSavePlanner):
    """Saves every tensor as float16."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = copy.deepcopy(plan.items)
        for item in items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return replace(plan, items=items)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        return object.to(torch.float16)


class Renaming(DefaultSavePlanner):
    """Saves everything below another prefix."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {"renamed." + key: value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class PlusOne(DefaultSavePlanner):
    """Saves tensors with one added."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        return value + 1 if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Extra(DefaultSavePlanner):
    """Keeps data of its own in the metadata."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=self.data)


class Losing(DefaultSavePlanner):
    """Leaves the last tensor out of the plans, but not out of the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        lost = sorted(metadata.state_dict_metadata)[-1]
        reduced_plans = [replace(plan, items=[item for item in plan.items if item.index.fqn != lost]) for plan in plans]
        return reduced_plans, metadata


class Hiding(DefaultSavePlanner):
    """Plans every tensor, but leaves the last one out of the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        *entries, _ = sorted(metadata.state_dict_metadata.items())
        return plans, replace(metadata, state_dict_metadata=dict(entries))


class Untrue(DefaultSavePlanner):
    """Gives float64 tensors without saying so in its plan."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        return data if isinstance(data, io.BytesIO) else data.double()


class Unfinished(DefaultSavePlanner):
    """Fails on one rank when it finishes its plan, while `fails` is set."""

    fails = True

    def __init__(self, culprit: int, **options: Any) -> None:
        super().__init__(**options)
        self.culprit = culprit

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self.fails and dist.get_rank() == self.culprit:
            raise ValueError("this plan cannot be finished")
        return super().finish_plan(new_plan)


def calls(record: Path, rank: int) -> list[str]:
    """What a `Recording` planner was asked, in order."""
    return record.with_name(f"{record.name}-{rank}").read_text().splitlines()


