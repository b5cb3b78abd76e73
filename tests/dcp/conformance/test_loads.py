"""One process: every option of `dcp.load`, its calls of planner and storage, planners of PyTorch's documentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from tests.dcp.conformance.sides import READING, Side, agree, blank, outcome, plain, recorded, state, summary

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_state(side: Side, name: str = "a", **options: Any) -> None:
    dcp.save(state(), storage_writer=side.writer(side.path(name)), **options)


class Recording(DefaultLoadPlanner):
    """DCP's planner, which records each of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.calls.append(("set_up_planner", sorted(state_dict), summary(metadata), is_coordinator))
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        self.calls.append("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.calls.append(("create_global_plan", summary(global_plan)))
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.calls.append(("finish_plan", summary(new_plan)))
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.calls.append(("load_bytes", read_item.dest_index.fqn, type(value).__name__))
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = super().resolve_tensor(read_item)
        self.calls.append(("resolve_tensor", read_item.dest_index.fqn, tuple(read_item.lengths), plain(tensor)))
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.calls.append(("commit_tensor", read_item.dest_index.fqn, plain(tensor)))
        super().commit_tensor(read_item, tensor)


class Renaming(DefaultLoadPlanner):
    """Loads what was saved below another prefix: `RenamePlanner` of PyTorch's documentation."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flatten_state_dict({f"foo_{key}": value for key, value in state_dict.items()})
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class Fresh(DefaultLoadPlanner):
    """Takes what is read into tensors of its own, and leaves those of the caller, as `MetaLoadPlanner` of the docs."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn] = tensor


class Remaking(DefaultLoadPlanner):
    """Makes its global plans anew, without what a reader put into the local ones."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [LoadPlan(items=plan.items) for plan in super().create_global_plan(global_plan)]


def test_calls_of_the_planner(tmp_path):
    """The same with the same arguments; what is read may come in any order."""
    def case(side: Side) -> Any:
        save_state(side)
        planner = Recording()
        side.load(blank(state()), planner=planner)
        calls = planner.calls
        reading = [call for call in calls if call[0] in ("load_bytes", "resolve_tensor", "commit_tensor")]
        each: dict[str, list[Any]] = {}
        for call in reading:
            each.setdefault(call[1], []).append(call)
        return [call for call in calls if call not in reading], each

    planned, each = agree(tmp_path, case)
    assert len(planned) == 4 and each["step"] == [("load_bytes", "step", "BytesIO")]
    assert [name for name, *_ in each["turned"]] == ["resolve_tensor", "commit_tensor"]


@pytest.mark.parametrize(
    "options", [{}, {"no_dist": True}, {"planner": DefaultLoadPlanner()}], ids=["usual", "no_dist", "planner"]
)
def test_calls_of_the_storage(tmp_path, options):
    def case(side: Side) -> Any:
        save_state(side, "b")
        side.reader = recorded(side, side.reader, READING)
        side.load(blank(state()), "elsewhere", checkpoint_id=side.path("b"), **options)
        # Only FileSystemReader takes the rank, for which it may read other metadata.
        return [(name,) if name == "read_metadata" else (name, *rest) for name, *rest in side.calls]

    assert tuple(name for name, *_ in agree(tmp_path, case)) == READING


def test_renaming(tmp_path):
    def case(side: Side) -> Any:
        flat = {"x": torch.arange(70.0), "y": torch.ones(3, 4), "n": 7}
        dcp.save({f"foo_{key}": value for key, value in flat.items()}, storage_writer=side.writer(side.path()))
        return side.load(blank(flat), planner=Renaming())

    assert agree(tmp_path, case)["n"] == 7


def test_plans_that_a_planner_makes_anew(tmp_path):
    def case(side: Side) -> Any:
        save_state(side)
        return side.load(blank(state()), planner=Remaking())

    agree(tmp_path, case)


def test_tensors_of_the_planners_own(tmp_path):
    def case(side: Side) -> Any:
        save_state(side)
        planner = Fresh()
        mine = {key: value for key, value in blank(state()).items() if isinstance(value, torch.Tensor)}
        return side.load(mine, planner=planner), planner.state_dict

    loaded, own = agree(tmp_path, case)
    assert not any(loaded["counts"][2]) and own["counts"][2] == list(range(10))


def test_not_flat(tmp_path):
    def case(side: Side) -> Any:
        save_state(side, planner=DefaultSavePlanner(flatten_state_dict=False))
        like = {"turned": torch.zeros(50, 60).t(), "model": None, "list": None, "step": None}
        return side.load(like, planner=DefaultLoadPlanner(flatten_state_dict=False))

    agree(tmp_path, case)


@pytest.mark.parametrize("options", [
    {}, {"no_dist": True}, {"planner": DefaultLoadPlanner}, {"process_group": None},
    {"planner": lambda: DefaultLoadPlanner(flatten_sharded_tensors=False)},
], ids=["none", "no_dist", "planner", "process group", "flat shards"])
def test_options_of_a_load(tmp_path, options):
    def case(side: Side) -> Any:
        dcp.save(state(), storage_writer=side.writer(side.path()))
        arguments = {name: value() if callable(value) else value for name, value in options.items()}
        return side.load(blank(state()), **arguments)

    agree(tmp_path, case)


def test_loads_of_a_part_and_of_what_is_not_there(tmp_path):
    def case(side: Side) -> Any:
        dcp.save(state(), storage_writer=side.writer(side.path()))
        more = {"model": {"bias": torch.zeros(64)}, "more": torch.ones(2)}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        return (
            side.load({"model": {"bias": torch.zeros(64)}}), side.load(more, planner=planner),
            outcome(lambda: side.load({"more": torch.ones(2)})),
            outcome(lambda: side.load({"model": {"bias": torch.zeros(65)}})),
            outcome(lambda: side.load({"step": 0}, "nowhere")),
        )

    part, more, *failed = agree(tmp_path, case)
    assert part["model"] == more["model"] and failed == ["fails on ranks [0]"] * 3


def test_a_path_with_the_load(tmp_path):
    def case(side: Side) -> Any:
        dcp.save(state(), storage_writer=side.writer(side.path("b")))
        like = blank(state())
        dcp.load(like, storage_reader=side.reader(side.path("elsewhere")), checkpoint_id=side.path("b"))
        return like

    agree(tmp_path, case)
