"""Nested state dicts come back as they were: keys that are numbers, empty dicts, placeholders to be filled."""

from __future__ import annotations

import copy
import enum
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt import CheckpointNotFound, CorruptCheckpoint, DSQConfig, LoadFailed
from dsq_ckpt.convert.export import export_dcp, export_torch
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.dcp.nested_planners import NestedSavePlanner
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.fixtures import make_format_v1 as v1
from tests.helpers.commands import dsq_stdout
from tests.helpers.edited_checkpoints import edit_index
from tests.helpers.optimizer_states import check_moments, fresh, plain
from tests.helpers.reading import read_checkpoint
from tests.helpers.states import find_differences, is_equal
from tests.helpers.training import compute_loss, train

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
EXACT = DSQConfig.preset("exact")


class Color(enum.IntEnum):
    RED = 9


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["compress", "save", "async_save", "again"])
def test_an_exported_optimizer_has_its_moments(tmp_path, how):
    _, optimizer, state = plain()
    if how == "compress":
        torch.save(state, tmp_path / "in.pt")
        dsq_ckpt.compress(tmp_path / "in.pt", tmp_path / "a", config=EXACT)
    elif how == "async_save":
        dsq_ckpt.async_save(state, tmp_path / "a", config=EXACT).result()
    else:
        dsq_ckpt.save(state, tmp_path / "a", config=EXACT)
    if how == "again":  # a checkpoint of ours as a source
        dsq_ckpt.compress(tmp_path / "a", tmp_path / "b", config=EXACT)
    export_torch(tmp_path / ("b" if how == "again" else "a"), tmp_path / "out.pt")
    exported = torch.load(tmp_path / "out.pt")
    assert list(exported["optimizer"]["state"]) == list(state["optimizer"]["state"]) == list(range(7))
    assert exported["scheduler"]["milestones"] == {30: 1, 60: 1}
    other = fresh()
    other.load_state_dict(exported["optimizer"])
    check_moments(other, optimizer)


def test_on_the_command_line(tmp_path):
    """With the defaults moments are lossy; they are those of the checkpoint, and training goes on from them."""
    model, _, state = plain()
    torch.save(state, tmp_path / "in.pt")
    dsq_stdout("compress", tmp_path / "in.pt", tmp_path / "a")
    dsq_stdout("export", tmp_path / "a", tmp_path / "out.pt")
    exported = torch.load(tmp_path / "out.pt")
    model.load_state_dict(exported["model"])
    other = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other.load_state_dict(exported["optimizer"])
    assert set(other.state) == set(model.parameters())
    assert all(value["exp_avg_sq"].any() for value in other.state.values())
    before = compute_loss(model)
    train(model, other, 3, 13)
    assert compute_loss(model) < before


def test_a_search_keeps_keys(tmp_path):
    """What is staged, and what a search puts into a model, is nested as before."""
    model, optimizer, _ = plain()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])
    compressor = dsq_ckpt.Compressor(model, optimizer, {"search": {"epsilon": 0.2}}, lambda: compute_loss(model))
    compressor.save(tmp_path / "a", extra={"scheduler": scheduler.state_dict(), "notes": {}})
    loaded = read_checkpoint(tmp_path / "a")
    assert loaded["scheduler"]["milestones"] == {30: 1, 60: 1} and loaded["notes"] == {}


def test_state_without_entries_comes_back(tmp_path):
    """SGD without momentum has no state, and `load_state_dict` wants the key."""
    _, _, state = plain(torch.optim.SGD)
    state["optimizer"]["state"] = {}  # some versions of torch have {"momentum_buffer": None} for each parameter
    state["nothing"] = [{}, {"x": torch.ones(2)}, {1: {}}]
    dsq_ckpt.save(state, tmp_path / "a")
    export_torch(tmp_path / "a", tmp_path / "out.pt")
    exported = torch.load(tmp_path / "out.pt")
    assert exported["optimizer"]["state"] == {} and exported["nothing"][0] == {} and exported["nothing"][2] == {1: {}}
    fresh(torch.optim.SGD).load_state_dict(exported["optimizer"])


def test_every_kind_of_key(tmp_path):
    state = {"d": {0: torch.ones(2), -3: 1, True: 2, None: 3, 0.5: 4, "7": 5, float("inf"): 6, (1, 2): 7}, 5: "five"}
    dsq_ckpt.save(state, tmp_path / "a")
    loaded = read_checkpoint(tmp_path / "a")
    assert set(loaded["d"]) == {0, -3, True, None, 0.5, "7", "inf", (1, 2)}  # JSON has no infinity
    assert [type(key) for key in loaded["d"]][:5] == [int, int, bool, type(None), float] and loaded[5] == "five"


def test_keys_that_are_tuples(tmp_path):
    """Tuples of numbers, strings and None come back as they were; others as their text."""
    keys = [(0, 1), (), ("a", None), (True, 0.5), ("7",), ("\ud800'", -1)]
    others = [((1, 2), 3), (float("inf"),), (np.float64(2.0),), (b"b",), torch.Size([4])]
    state = {"d": {key: {"x": place} for place, key in enumerate([*keys, *others])}, "e": {(3, 4): {}}}
    dsq_ckpt.save(state, tmp_path / "a")
    target = {}
    dsq_ckpt.load(target, tmp_path / "a")
    assert list(map(repr, target["d"])) == [*map(repr, keys), *(repr(str(key)) for key in others)]
    assert [value["x"] for value in target["d"].values()] == list(range(len(keys + others)))
    assert target["e"] == {(3, 4): {}}
    edit_index(tmp_path / "a", lambda index: index.pop("tuple_keys"))  # as written by earlier versions
    dsq_ckpt.load(target := {}, tmp_path / "a")
    assert list(target["d"]) == list(map(str, [*keys, *others]))


def test_keys_that_are_numbers_of_other_classes(tmp_path):
    """They come back as equal numbers, which find the same entries: those of NumPy, and members of an enumeration."""
    keys, others = [np.int64(3), np.uint8(4), np.float32(0.5)], [np.float32(0.1), Fraction(1, 4)]
    # Numbers of another text than the equal int or float has, as `Color.RED` has it before Python 3.11.
    (keys if str(Color.RED) == "9" else others).append(Color.RED)
    state = {"d": {key: place for place, key in enumerate([*keys, *others])}, np.int32(7): {"x": torch.ones(3)}}
    dsq_ckpt.save(state, tmp_path / "a")
    target = {}
    dsq_ckpt.load(target, tmp_path / "a")
    assert [target["d"][key] for key in (*keys, *map(str, others))] == list(range(6))
    assert {type(key) for key in target["d"]} == {int, float, str} and target[7]["x"].equal(torch.ones(3))


def test_loading_in_place_finds_keys_that_are_numbers(tmp_path):
    """Plain DCP would put numbers and strings below new keys."""
    _, _, state = plain()
    state["optimizer"]["state"][2]["count"] = 7
    dsq_ckpt.save(state, tmp_path / "a", config=EXACT)
    blank = copy.deepcopy(state)
    for value in blank["optimizer"]["state"].values():
        value["exp_avg"].zero_()
    blank["optimizer"]["state"][2]["count"] = 0
    blank["scheduler"]["milestones"][30] = 9
    dsq_ckpt.load(blank, tmp_path / "a")
    assert find_differences(blank, state) == []
    assert list(blank["optimizer"]["state"]) == list(range(7)) and blank["optimizer"]["state"][2]["count"] == 7
    assert blank["scheduler"]["milestones"] == {30: 1, 60: 1}


def test_an_optimizer_that_has_not_stepped_is_filled(tmp_path):
    _, optimizer, state = plain()
    dsq_ckpt.save(state, tmp_path / "a", config=EXACT)
    other = fresh()
    target = {"optimizer": other.state_dict()}
    assert target["optimizer"]["state"] == {}
    dsq_ckpt.load(target, tmp_path / "a")
    other.load_state_dict(target["optimizer"])
    check_moments(other, optimizer)


@pytest.mark.parametrize("target", [
    {}, {"model": {}}, {"model": {}, "step": 0, "deep": {"er": {}}}, {"many": [{}, {}, {"x": torch.zeros(3)}]},
], ids=["all", "a part", "several", "in a list"])
def test_empty_dicts_are_filled(tmp_path, target):
    state = {
        "model": {"w": torch.randn(80, 80), "b": torch.randn(4, dtype=torch.float64)}, "step": 3, "empty": {},
        "deep": {"er": {"x": [1, 2], 4: {"y": torch.ones(2)}, "none": {}}},
        "many": [{0: torch.ones(2)}, {}, {"x": torch.ones(3)}],
    }
    dsq_ckpt.save(state, tmp_path / "a", config=EXACT)
    loaded = copy.deepcopy(target)
    dsq_ckpt.load(loaded, tmp_path / "a")
    expected = {key: state[key] for key in target} if target else state
    assert find_differences(loaded, expected) == []
    assert loaded.keys() == expected.keys()
    if "deep" in loaded:
        assert list(loaded["deep"]["er"]) == ["x", 4, "none"] and loaded["deep"]["er"]["none"] == {}
    if "many" in loaded:
        assert list(loaded["many"][0]) == [0] and loaded["many"][1] == {}
    if not target:
        assert loaded["empty"] == {}


def test_the_compressor_fills_placeholders(tmp_path):
    model, optimizer, state = plain()
    compressor = dsq_ckpt.Compressor(model, optimizer)
    compressor.save(tmp_path / "a", extra={"scheduler": state["scheduler"], "step": 3})
    extra = compressor.load(tmp_path / "a", extra={"scheduler": {}, "step": 0})
    assert extra == {"scheduler": state["scheduler"], "step": 3}
    torch.optim.lr_scheduler.MultiStepLR(optimizer, [1]).load_state_dict(extra["scheduler"])
    with pytest.raises(LoadFailed, match=r"'sceduler' is an empty dict.* nothing there; at its top level are 'model'"):
        compressor.load(tmp_path / "a", extra={"sceduler": {}})


def test_a_failed_load_leaves_no_placeholders(tmp_path):
    dsq_ckpt.save({"model": {"w": torch.ones(3)}, "empty": {}}, tmp_path / "a")
    target = {"model": {}, "other": torch.zeros(3)}
    with pytest.raises(LoadFailed, match="other"):
        dsq_ckpt.load(target, tmp_path / "a")
    assert target["model"] == {}
    dsq_ckpt.load(target := {"empty": {}}, tmp_path / "a")  # as it was saved
    assert target == {"empty": {}}


@pytest.mark.parametrize("target", [
    {"a": {}, "zzz": {}}, {"zzz": {}, "a": {}}, {"b": {"c": {}}, "zzz": {}}, {"a": {}, "b": {"c": {}, "d": {}}},
])
def test_a_refused_load_leaves_empty_dicts_empty(tmp_path, target):
    dsq_ckpt.save({"a": {"w": torch.ones(3)}, "b": {"c": {"w": torch.ones(2)}}}, tmp_path / "a")
    before = copy.deepcopy(target)
    with pytest.raises(LoadFailed, match="is an empty dict"):
        dsq_ckpt.load(target, tmp_path / "a")
    assert target == before


@pytest.mark.parametrize("target", [{}, {"x": {}}, {"x": {"y": {}}}, {"l": [{}]}])
def test_nothing_runs_below_an_empty_dict(tmp_path, target):
    payload = Payload(tmp_path / "ran")
    state = {"x": {"y": {"evil": payload}, "n": [1, "two"]}, "l": [{"evil": payload}]}
    dsq_ckpt.save(state, tmp_path / "a")
    before = copy.deepcopy(target)
    says = r"object '(x\.y|l\.0)\.evil' is more than plain data.*name it in the state dict"
    with pytest.raises(LoadFailed, match=says):
        dsq_ckpt.load(target, tmp_path / "a")
    assert target == before and not (tmp_path / "ran").exists()


def test_named_objects_are_unpickled(tmp_path):
    """As DCP does it, also beside dicts that are filled."""
    state = {"x": {"where": Path("there"), "n": 3}, "y": {"plain": [1, 2], 4: torch.ones(2)}}
    dsq_ckpt.save(state, tmp_path / "a")
    dsq_ckpt.load(target := {"x": {"where": None}, "y": {}}, tmp_path / "a")
    assert target["x"] == {"where": Path("there")} and find_differences(target["y"], state["y"]) == []
    with pytest.raises(LoadFailed, match=r"'x\.where' is more than plain data"):
        dsq_ckpt.load({"x": {}}, tmp_path / "a")


@pytest.mark.parametrize("stored, planner", [
    ({"y": Payload}, {"z": ["x", "y"], "x.y": ["u"]}), (Payload, None),
], ids=["another path", "no paths"])
def test_an_index_cannot_name_what_is_below_an_empty_dict(tmp_path, stored, planner):
    """Whatever it says of paths, and though DCP looks for dicts that were stored as one object."""
    payload = Payload(tmp_path / "ran")
    dsq_ckpt.save({"x": payload if stored is Payload else {"y": payload}}, tmp_path / "a")
    edit_index(tmp_path / "a", lambda index: index.update(planner=planner))
    with pytest.raises(LoadFailed, match="more than plain data"):
        dsq_ckpt.load({"x": {}}, tmp_path / "a")
    assert not (tmp_path / "ran").exists()


def test_any_key_of_the_own_dict_is_found(tmp_path):
    keys = [(1, 2), np.int64(7), frozenset({3}), float("inf"), b"bytes"]
    state = {"k": {key: number for number, key in enumerate(keys, 1)}, "t": {(0, 1): {np.int64(3): torch.ones(3)}}}
    dsq_ckpt.save(state, tmp_path / "a")
    blank = {"k": dict.fromkeys(keys, 0), "t": {(0, 1): {np.int64(3): torch.zeros(3)}}}
    dsq_ckpt.load(blank, tmp_path / "a")
    assert blank["k"] == state["k"] and list(blank["k"]) == keys
    assert find_differences(blank["t"], state["t"]) == []


def test_keys_at_the_top_that_cannot_be_sorted(tmp_path):
    state = {"w": torch.ones(3), 5: "five", None: {2: torch.ones(2)}, (1, "a"): 4}
    dsq_ckpt.save(state, tmp_path / "a")
    target = {"w": torch.zeros(3), 5: "", None: {2: torch.zeros(2)}, (1, "a"): 0}
    dsq_ckpt.load(target, tmp_path / "a")
    assert find_differences(target, state) == [] and list(target) == list(state) and target[(1, "a")] == 4
    dsq_ckpt.load(loaded := {}, tmp_path / "a")
    assert set(loaded) == {"w", 5, None, (1, "a")} and loaded[5] == "five" and is_equal(loaded[None][2], torch.ones(2))
    assert is_equal(loaded["w"], torch.ones(3))
    with pytest.raises(LoadFailed, match="none of it"):
        dsq_ckpt.load({5: "", "none of it": 0}, tmp_path / "a")
    with pytest.raises(LoadFailed, match="same name"):
        dsq_ckpt.load({5: "", "5": ""}, tmp_path / "a")


@pytest.mark.parametrize("change", [
    lambda index: index.update(planner=[]), lambda index: index["empty_dicts"].append(["m", "w", "x"]),
    lambda index: index.update(planner={"m.w": 5}),
], ids=["a list", "below a tensor", "no path"])
def test_a_malformed_nesting(tmp_path, change):
    dsq_ckpt.save({"m": {"w": torch.ones(3)}}, tmp_path / "a")
    edit_index(tmp_path / "a", change)
    for target in ({}, {"m": {}}):
        before = copy.deepcopy(target)
        with pytest.raises((CorruptCheckpoint, LoadFailed)) as caught:
            dsq_ckpt.load(target, tmp_path / "a")
        assert target == before
        assert isinstance(caught.value, CorruptCheckpoint) or "is an empty dict" in str(caught.value)
    with pytest.raises(CorruptCheckpoint, match="not as documented"):
        dsq_ckpt.load({}, tmp_path / "a")


@pytest.mark.parametrize("name", ["m.w", "n"])
@pytest.mark.parametrize("target", [{}, {"m": {}}, {"n": 0}, {"m": {"w": torch.zeros(3)}}], ids=str)
def test_a_name_without_a_path(tmp_path, name, target):
    """It is not left out silently."""
    dsq_ckpt.save({"m": {"w": torch.ones(3)}, "n": 5}, tmp_path / "a")
    edit_index(tmp_path / "a", lambda index: index["planner"].update({name: []}))
    before = copy.deepcopy(target)
    with pytest.raises(CorruptCheckpoint, match=f"empty path for '{name}'"):
        dsq_ckpt.load(target, tmp_path / "a")
    assert find_differences(target, before) == []


def test_loading_without_a_checkpoint_raises(tmp_path):
    newest = dsq_ckpt.latest(tmp_path)
    assert newest is None
    compressor = dsq_ckpt.Compressor(nn.Linear(2, 2))
    for call in (
        lambda: dsq_ckpt.load({"w": torch.ones(3)}, newest), lambda: dsq_ckpt.describe(newest),
        lambda: compressor.load(newest),
    ):
        with pytest.raises(CheckpointNotFound, match=r"no complete checkpoint: the path is None, as `dsq_ckpt\.latest"):
            call()


def test_checkpoints_of_older_versions(tmp_path):
    """They do not say which keys were numbers; empty dicts are filled all the same, and absent ones are not missed."""
    path = v1.HERE / "0"
    with Checkpoint(path) as checkpoint:
        nesting = Nesting.from_json(checkpoint.index)
        assert nesting.typed == {} and nesting.empty is None
    target = {"model": {}, "nowhere": {}}
    dsq_ckpt.load(target, path)
    assert target["nowhere"] == {}
    assert find_differences(target["model"], read_checkpoint(path)["model"]) == []
    export_torch(path, tmp_path / "out.pt")
    assert find_differences(torch.load(tmp_path / "out.pt"), read_checkpoint(path)) == []


def test_a_plain_dcp_directory_of_it(tmp_path):
    """DCP has strings as keys, and loads into a state dict by them."""
    _, optimizer, state = plain()
    dsq_ckpt.save(state, tmp_path / "a", config=EXACT)
    export_dcp(tmp_path / "a", tmp_path / "plain")
    dsq_ckpt.compress(tmp_path / "plain", tmp_path / "b", config=EXACT)
    other = fresh()
    dsq_ckpt.load(target := {"optimizer": copy.deepcopy(optimizer.state_dict())}, tmp_path / "b")
    other.load_state_dict(target["optimizer"])
    check_moments(other, optimizer)


def test_ranks_with_different_keys():
    """The coordinator knows of all of them."""
    planners, plans = [], []
    for rank in range(2):
        planners.append(NestedSavePlanner())
        planners[-1].set_up_planner({"own": {rank: torch.ones(2)}, f"none{rank}": {}, "s": {}}, None, rank == 0)
        plans.append(planners[-1].create_local_plan())
    _, metadata = planners[0].create_global_plan(plans)
    merged = metadata.planner_data
    nested = merged.unflatten({"own.0": "a", "own.1": "b"})
    assert nested == {"own": {0: "a", 1: "b"}, "none0": {}, "none1": {}, "s": {}}
    assert Nesting.from_json(merged.as_json()).unflatten({"own.1": 1})["own"] == {1: 1}
