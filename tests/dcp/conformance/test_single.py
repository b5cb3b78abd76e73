"""One process: every option of `dcp.save`, `dcp.async_save` and `dcp.load`, and planners of PyTorch's documentation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tests.dcp.conformance.sides import (
    WRITING,
    Side,
    agree,
    blank,
    outcome,
    plain,
    recorded,
    ruined,
    sides,
    state,
    summarize,
)
from tests.dcp.planners import Balancing, Extra, Half, Losing, PlusOne, Recording, Renaming, calls

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*cpu_offload")



class OldPlanner(DefaultSavePlanner):
    """As written for torch 2.2, before `storage_meta`."""

    def set_up_planner(self, state_dict: dict[str, Any], is_coordinator: bool = False) -> None:  # type: ignore[override]
        super().set_up_planner(state_dict, None, is_coordinator)


class Failing(DefaultSavePlanner):
    """Cannot resolve an object."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        raise ValueError("nothing there")


class Counter:
    """A `Stateful` of the user's."""

    def __init__(self, value: int) -> None:
        self.value = torch.tensor([value])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"] + 0


WAYS: dict[str, Callable[[Side, dict[str, Any], dict[str, Any]], Any]] = {
    "sync": lambda side, mine, options: dcp.save(mine, storage_writer=side.writer(side.path()), **options),
    "async": lambda side, mine, options: finished(
        dcp.async_save(mine, storage_writer=side.writer(side.path()), **options), mine
    ),
}


def finished(future: Any, mine: dict[str, Any]) -> Any:
    ruined(mine)
    return future.result()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [
    None, DefaultSavePlanner, Balancing, Half, PlusOne, lambda: Extra(["mine", (1, 2)]), OldPlanner, Failing, Losing,
    lambda: DefaultSavePlanner(flatten_state_dict=False), lambda: DefaultSavePlanner(flatten_sharded_tensors=False),
    lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True),
], ids=["none", "default", "balancing", "half", "plus one", "extra data", "old", "failing", "losing", "not flat",
        "flat shards", "lowest rank"])
def test_planners(tmp_path, way, make):
    def case(side: Side) -> Any:
        planner = None if make is None else make()
        metadata = WAYS[way](side, state(), {"planner": planner})
        flat = not isinstance(planner, DefaultSavePlanner) or planner.flatten_state_dict
        like = blank(state())
        if isinstance(planner, Half):
            like = {key: value for key, value in like.items() if isinstance(value, torch.Tensor)}
        if not flat:
            like = {key: value for key, value in like.items() if isinstance(value, torch.Tensor)}
        loading = DefaultLoadPlanner(flatten_state_dict=flat)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = side.load(like, planner=loading) if not isinstance(planner, Half) else halves(side, like)
        return summarize(metadata), loaded

    result = agree(tmp_path, case)
    assert isinstance(result, str) == (make in (Failing,)) or make is Losing


def halves(side: Side, like: dict[str, Any]) -> dict[str, Any]:
    return side.load({key: value.to(torch.float16) for key, value in like.items()})


@pytest.mark.parametrize("way", WAYS)
def test_renaming(tmp_path, way):
    def case(side: Side) -> Any:
        WAYS[way](side, state(), {"planner": Renaming()})
        return side.load({"renamed." + key: value for key, value in blank(state()).items()})

    assert agree(tmp_path, case)["renamed.step"] == 7


@pytest.mark.parametrize("way", WAYS)
def test_calls_of_the_planner(tmp_path, way):
    """The same in the same order; items are resolved with the same arguments, as often as the storage likes."""
    def case(side: Side) -> Any:
        side.root.mkdir()
        WAYS[way](side, state(), {"planner": Recording(side.root / "record", 0)})
        recorded_calls = calls(side.root / "record", 0)
        resolving = [call for call in recorded_calls if call.startswith(("lookup", "transform"))]
        return [call for call in recorded_calls if call not in resolving], sorted(set(resolving))

    assert len(agree(tmp_path, case)[0]) == 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("planner", [None, Balancing])
def test_calls_of_the_storage(tmp_path, way, planner):
    def case(side: Side) -> Any:
        side.writer, own = recorded(side, side.writer, WRITING), side.writer
        try:
            WAYS[way](side, state(), {"planner": planner and planner(), "checkpoint_id": side.path("b")})
        finally:
            side.writer = own
        # The order in which a rank lists its results is the storage's own.
        return [(name, *(sorted_results(argument) for argument in rest)) for name, *rest in side.calls]

    assert tuple(name for name, *_ in agree(tmp_path, case)) == WRITING


def sorted_results(argument: Any) -> Any:
    is_results = isinstance(argument, tuple) and argument[0] == "results"
    return ("results", [sorted(rank) for rank in argument[1]]) if is_results else argument


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [
    {"no_dist": True}, {"use_collectives": True}, {"use_collectives": False}, {"process_group": None},
], ids=str)
def test_options_of_a_save(tmp_path, way, options):
    def case(side: Side) -> Any:
        return summarize(WAYS[way](side, state(), options)), side.load(blank(state()))

    agree(tmp_path, case)


@pytest.mark.parametrize("way", WAYS)
def test_a_path_with_the_call(tmp_path, way):
    """Of a writer that is used again, each time."""
    def case(side: Side) -> Any:
        writer, loads = side.writer(side.path("elsewhere")), []
        for step in range(3):
            mine, place = {"x": torch.full((70, 70), float(step))}, side.path(str(step))
            if way == "sync":
                dcp.save(mine, checkpoint_id=place, storage_writer=writer)
            else:
                finished(dcp.async_save(mine, checkpoint_id=place, storage_writer=writer), mine)
            loads.append(side.load({"x": torch.zeros(70, 70)}, str(step)))
        return loads, side.path("elsewhere").is_dir() and any(side.path("elsewhere").iterdir())

    assert agree(tmp_path, case)[1] is False


def test_a_stager_of_the_users_own(tmp_path):
    def case(side: Side) -> Any:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        for name in ("a", "b"):
            mine = state()
            finished(dcp.async_save(mine, storage_writer=side.writer(side.path(name)), async_stager=stager), mine)
        stager.close()
        return side.load(blank(state()), "a"), side.load(blank(state()), "b")

    agree(tmp_path, case)


def test_an_async_stager_that_goes_on_beside_training(tmp_path):
    def case(side: Side) -> Any:
        stager = DefaultStager(StagingOptions(False, False, True, False))
        mine = state()
        response: Any = dcp.async_save(mine, storage_writer=side.writer(side.path()), async_stager=stager)
        response.staging_completion.result()
        ruined(mine)
        response.upload_completion.result()
        stager.close()
        return side.load(blank(state()))

    agree(tmp_path, case)


def test_a_thread_is_the_default(tmp_path):
    def case(side: Side) -> Any:
        return summarize(WAYS["async"](side, state(), {"async_checkpointer_type": AsyncCheckpointerType.THREAD}))

    agree(tmp_path, case)


@pytest.mark.parametrize("way", WAYS)
def test_stateful_objects(tmp_path, way):
    def case(side: Side) -> Any:
        WAYS[way](side, {"counter": Counter(5), "x": torch.ones(3)}, {})
        target = {"counter": Counter(0), "x": torch.zeros(3)}
        side.load(target)
        return plain(target["counter"].value), target["x"]  # type: ignore[union-attr]

    assert agree(tmp_path, case)[0][2] == [5]


@pytest.mark.parametrize("data", [
    None, {}, [], "text", 3, (1, (2, [3])), {"a": ("a",), "b": ("b", 0)}, {"a": ["a"]}, {1: ("a",)}, {"a": ()},
    {"a": (True,)}, {"deep": {"bytes": b"\x00\xff", "float": 1.5, "nothing": None}}, [float("inf"), -0.0, 2**70, "ü"],
], ids=repr)
def test_planner_data(tmp_path, data):
    """What a planner keeps in the metadata is there when they are read."""
    def case(side: Side) -> Any:
        dcp.save(state(), storage_writer=side.writer(side.path()), planner=Extra(data))
        return repr(side.reader(side.path()).read_metadata().planner_data)

    assert agree(tmp_path, case) == repr(data)


# Where ours differs on purpose.


def test_planner_data_that_is_more_than_data(tmp_path):
    """Nothing is unpickled to read it, so it is left out, and said."""
    _, dsq_side = sides(tmp_path)
    with pytest.warns(UserWarning, match=r"planner data of Extra is not in the checkpoint.*torch\.Tensor"):
        dcp.save(state(), storage_writer=dsq_side.writer(dsq_side.path()), planner=Extra({"a": torch.ones(2)}))
    assert dsq_side.reader(dsq_side.path()).read_metadata().planner_data is None


def test_a_tensor_that_is_not_as_planned(tmp_path):
    """FileSystemWriter stores it under the dtype that was planned, and a load casts."""
    class Untrue(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            data = super().transform_object(write_item, object)
            return data.double() if isinstance(data, torch.Tensor) else data

    torch_outcome, dsq_outcome = (
        outcome(lambda side=side: WAYS["sync"](side, state(), {"planner": Untrue()})) for side in sides(tmp_path)
    )
    assert not isinstance(torch_outcome, str) and dsq_outcome == "fails on ranks [0]"


def test_planned_and_not_written(tmp_path):
    """FileSystemWriter commits what a planner lost."""
    torch_outcome, dsq_outcome = (
        outcome(lambda side=side: WAYS["sync"](side, state(), {"planner": Losing()})) for side in sides(tmp_path)
    )
    assert not isinstance(torch_outcome, str) and dsq_outcome == "fails on ranks [0]"


def test_checkpoints_are_not_replaced_unasked(tmp_path):
    torch_side, dsq_side = sides(tmp_path)
    for side in (torch_side, dsq_side):
        dcp.save(state(), storage_writer=side.writer(side.path()))
    dcp.save(state(), storage_writer=torch_side.writer(torch_side.path()))
    assert outcome(lambda: dcp.save(state(), storage_writer=dsq_side.writer(dsq_side.path()))) == "fails on ranks [0]"
    dcp.save(state(), storage_writer=dsq_side.writer(dsq_side.path(), overwrite=True))


def test_casts_are_asked_for(tmp_path):
    torch_side, dsq_side = sides(tmp_path)
    for side in (torch_side, dsq_side):
        dcp.save({"x": torch.ones(3)}, storage_writer=side.writer(side.path()))
    halves = {"x": torch.zeros(3, dtype=torch.float16)}
    assert plain(torch_side.load(halves)) == plain({"x": torch.ones(3, dtype=torch.float16)})
    assert outcome(lambda: dsq_side.load({"x": torch.zeros(3, dtype=torch.float16)})) == "fails on ranks [0]"
    dsq_side.reader = lambda path: replace_reader(path)
    assert plain(dsq_side.load({"x": torch.zeros(3, dtype=torch.float16)})) == plain(halves)


def replace_reader(path: Any) -> Any:
    import dsq_ckpt

    return dsq_ckpt.DSQStorageReader(path, allow_cast=True)


