"""What DCP's planners leave out of nested state dicts without a word, and what is made of it here."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import dsq_ckpt
from dsq_ckpt.convert.export import export_torch


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 128)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def by_dcp(trained, tmp_path):
    """A checkpoint that was saved by DCP's own planner, in which all keys are strings."""
    model, optimizer = trained
    writer = dsq_ckpt.DSQStorageWriter(tmp_path / "run" / "1", "exact")
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, storage_writer=writer)
    return tmp_path / "run" / "1"


def assert_same_state(loaded, optimizer):
    own = optimizer.state_dict()
    assert loaded["param_groups"] == own["param_groups"] and loaded["state"].keys() == own["state"].keys()
    for number, state in own["state"].items():
        assert state.keys() == loaded["state"][number].keys()
        assert all(torch.equal(value, loaded["state"][number][key]) for key, value in state.items())


def fresh(optimizer):
    return type(optimizer)([parameter for group in optimizer.param_groups for parameter in group["params"]])


@pytest.mark.parametrize("given", ["state dict", "optimizer", "empty dict", "nothing"])
def test_an_optimizer_that_has_not_stepped_gets_its_state(given, by_dcp, trained):
    """Its parameters are numbers again; it ignores strings, and would go on without moments."""
    _, optimizer = trained
    new = fresh(optimizer)
    state = {
        "state dict": {"optim": new.state_dict()}, "optimizer": {"optim": new}, "empty dict": {"optim": {}},
        "nothing": {},
    }[given]
    dsq_ckpt.load(state, by_dcp)
    if given != "optimizer":
        assert_same_state(state["optim"], optimizer)
        new.load_state_dict(state["optim"])
    assert_same_state(new.state_dict(), optimizer)


def test_exports_and_plain_checkpoints_have_numbers_too(by_dcp, trained, tmp_path):
    model, optimizer = trained
    export_torch(by_dcp, tmp_path / "out.pt")
    assert_same_state(torch.load(tmp_path / "out.pt")["optim"], optimizer)
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "plain")
    dsq_ckpt.compress(tmp_path / "plain", tmp_path / "small", config="exact")
    state: dict[str, dict] = {}
    dsq_ckpt.load(state, tmp_path / "small")
    assert_same_state(state["optim"], optimizer)


def test_strings_that_are_names_stay(trained, tmp_path):
    """As of parameters in a list, by whose names their optimizer's state is saved."""
    state = {"optim": {"state": {"0": {"step": 1}}, "param_groups": [{"params": ["0"], "lr": 0.1}]}}
    dcp.save(state, storage_writer=dsq_ckpt.DSQStorageWriter(tmp_path / "run" / "1", "exact"))
    target: dict[str, dict] = {}
    dsq_ckpt.load(target, tmp_path / "run" / "1")
    assert target == state


def test_a_planner_that_loads_nothing_into_an_empty_dict_is_warned_of(by_dcp, trained):
    _, optimizer = trained
    state = {"optim": fresh(optimizer).state_dict()}
    with pytest.warns(UserWarning, match=r"'optim\.state' is an empty dict, .* has 6 tensors below 'optim\.state'"):
        dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(by_dcp))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*empty dict")
        dcp.load({"optim": optimizer.state_dict()}, storage_reader=dsq_ckpt.DSQStorageReader(by_dcp))


def test_keys_that_become_strings_are_warned_of(tmp_path):
    with pytest.warns(UserWarning, match=r"the key b'1' of 'd' is stored as the string \"b'1'\""):
        dsq_ckpt.save({"d": {b"1": 4, (1, 2): 8, 3: 5, None: 6, 0.5: 7, True: 8}}, tmp_path / "run" / "1")
    target: dict[str, dict] = {}
    dsq_ckpt.load(target, tmp_path / "run" / "1")
    assert target == {"d": {"b'1'": 4, (1, 2): 8, 3: 5, None: 6, 0.5: 7, True: 8}}


def test_keys_that_come_back_are_not_warned_of(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*is stored as the string")
        dsq_ckpt.save({"d": {(1, 2): 4, ("a", None): 5, 3: 6}}, tmp_path / "run" / "1")


def test_a_list_that_is_shorter_than_the_saved_one_is_warned_of(tmp_path):
    dsq_ckpt.save({"l": [torch.ones(3), torch.ones(4)]}, tmp_path / "run" / "1")
    short, whole = {"l": [torch.zeros(3)]}, {"l": [torch.zeros(3), torch.zeros(4)]}
    with pytest.warns(UserWarning, match="'l' is a list of 1, of which 2 were saved: the rest is not loaded"):
        dsq_ckpt.load(short, tmp_path / "run" / "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dsq_ckpt.load(whole, tmp_path / "run" / "1")
    assert whole["l"][1].sum() == 4


@pytest.mark.parametrize("placeholder", [None, 1.5, "text"])
def test_a_placeholder_that_is_no_tensor_is_no_place_for_one(placeholder, tmp_path):
    dsq_ckpt.save({"w": torch.ones(3, 4)}, tmp_path / "run" / "1")
    with pytest.raises(dsq_ckpt.LoadFailed, match=r"'w' was saved as a tensor of shape \(3, 4\), and its value"):
        dsq_ckpt.load({"w": placeholder}, tmp_path / "run" / "1")


class Noting(dcp.DefaultSavePlanner):
    """Keeps data of its own in the metadata, by the names of what it saves."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=dict.fromkeys(metadata.planner_data, 5))


def test_planners_may_keep_something_else_than_paths(tmp_path):
    writer = dsq_ckpt.DSQStorageWriter(tmp_path / "run" / "1")
    dcp.save({"l": [torch.ones(3), torch.ones(4)]}, storage_writer=writer, planner=Noting())
    target = {"l": [torch.zeros(3)]}
    dsq_ckpt.load(target, tmp_path / "run" / "1")
    assert target["l"][0].sum() == 3


def layers(number, **more):
    torch.manual_seed(0)
    return nn.ModuleDict({**{f"layer{place}": nn.Linear(80, 80) for place in range(number)}, **more})


def part_of(model, *names):
    return {name: value for name, value in model.state_dict().items() if name.startswith(names)}


def without_frozen(model):
    for parameter in model["layer0"].parameters():
        parameter.requires_grad_(False)
    return get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))


def renamed(model):
    """As of a model in a wrapper whose prefix its state dict leaves out, and its modules do not."""
    entries = nn.ModuleDict({"wrapper": model}).state_dict()
    for name in list(entries):
        entries[name.removeprefix("wrapper.")] = entries.pop(name)
    return entries


def whole_or_part(state, path, by):
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        if by == "dcp":
            dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(path))
        else:
            dsq_ckpt.load(state, path)
    return [text for warning in recorded if "the model does not have" in (text := str(warning.message))]


@pytest.mark.parametrize("by", ["dcp", "dsq"])
@pytest.mark.parametrize("state", [
    lambda: {"model": layers(4).state_dict()}, lambda: {"model": layers(4)},
    lambda: {"a": {"model": get_model_state_dict(torch.compile(layers(4)))}},
])
def test_a_model_with_fewer_modules_than_were_saved_is_warned_of(tmp_path, state, by):
    given = state()
    saved_state = {"model": layers(6).state_dict(), "optimizer": {"lr": 0.1}}
    dsq_ckpt.save({"a": saved_state} if "a" in given else saved_state, tmp_path / "run" / "1", config="exact")
    (text,) = whole_or_part(given, tmp_path / "run" / "1", by)
    assert "has 'layer4.weight', 'layer4.bias', 'layer5.weight' and 1 more of modules" in text
    assert ("'a.model' in" if "a" in given else "'model' in") in text and str(tmp_path) in text


def test_a_state_dict_of_a_model_with_fewer_modules_is_warned_of(tmp_path):
    dsq_ckpt.save(layers(6), tmp_path / "run" / "1", config="exact")
    (text,) = whole_or_part(layers(4).state_dict(), tmp_path / "run" / "1", "dsq")
    assert "'layer4.weight'" in text


@pytest.mark.parametrize("by", ["dcp", "dsq"])
@pytest.mark.parametrize("state", [
    lambda: {"model": layers(6).state_dict()}, lambda: {"optimizer": {"lr": 0.0}},
    lambda: {"model": part_of(layers(6), "layer0", "layer1")},  # as of adapters
    lambda: {"model": without_frozen(layers(6))}, lambda: {"model": renamed(layers(4))},
    lambda: {"model": dict(layers(4).state_dict())},
    lambda: {"model": layers(4)["layer0"].state_dict(prefix="layer0.")},
    lambda: {"model": get_model_state_dict(layers(4), options=StateDictOptions(full_state_dict=True))},
    lambda: {"model": layers(6, layer5=nn.Linear(80, 80, bias=False)).state_dict()},  # or somebody left the bias out
])
def test_a_part_that_was_chosen_is_not_warned_of(tmp_path, state, by):
    dsq_ckpt.save({"model": layers(6).state_dict(), "optimizer": {"lr": 0.1}}, tmp_path / "run" / "1", config="exact")
    assert not whole_or_part(state(), tmp_path / "run" / "1", by)


class Settings(dict):
    """As of omegaconf, whose dicts have a `_metadata` that names no modules."""

    _metadata = object()


class Attributes(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("kind", [Settings, Attributes])
def test_dicts_with_attributes_of_their_own_are_loaded(tmp_path, kind):
    dsq_ckpt.save({"model": layers(2).state_dict(), "settings": kind({"lr": 0.1})}, tmp_path / "run" / "1")
    state = {"model": layers(2).state_dict(), "settings": kind({"lr": 0.0})}
    assert not whole_or_part(state, tmp_path / "run" / "1", "dsq")
    assert state["settings"]["lr"] == 0.1


def test_a_stage_by_itself_is_not_warned_of(tmp_path, monkeypatch):
    """A job may have other stages, each of which loads its own part."""
    dsq_ckpt.save({"model": layers(6).state_dict()}, tmp_path / "run" / "1", config="exact")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not whole_or_part({"model": layers(4).state_dict()}, tmp_path / "run" / "1", "dsq")


@pytest.mark.parametrize("state, kind, entries, has", [
    ({"l": []}, "list", r"'l\.0', 'l\.1'", "of class list"), ({"l": None}, "list", r"'l\.0', 'l\.1'", "None"),
    ({"l": [0, 0]}, "list", r"'l\.0', 'l\.1'", "of class list"),  # which DCP takes for one object
    ({"d": {"x": []}}, "dict", r"'d\.x\.a'", "of class list"), ({"d": {"x": 0}}, "dict", r"'d\.x\.a'", "0"),
])
def test_a_placeholder_for_a_whole_list_or_dict_is_told_its_entries(tmp_path, state, kind, entries, has):
    dsq_ckpt.save({"l": [torch.ones(3), torch.ones(4)], "d": {"x": {"a": 1}}}, tmp_path / "run" / "1")
    with pytest.raises(dsq_ckpt.LoadFailed, match=f"saved as a {kind} with the entries {entries}, and .* is {has}: "):
        dsq_ckpt.load(state, tmp_path / "run" / "1")


def test_an_empty_dict_in_place_of_an_object_is_told_so(tmp_path):
    dsq_ckpt.save({"numbers": [1, 2]}, tmp_path / "run" / "1")
    with pytest.raises(dsq_ckpt.LoadFailed, match=r"'numbers' is an empty dict, .* has one object there: put a place"):
        dsq_ckpt.load({"numbers": {}}, tmp_path / "run" / "1")


def test_moments_have_the_strides_of_their_parameters(tmp_path):
    """A fused optimizer takes elements in the order of memory, so with other strides it would update wrong ones."""

    def make():
        torch.manual_seed(0)
        model = torch.nn.Conv2d(32, 16, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def train(model, optimizer):
        model.weight.grad = torch.arange(model.weight.numel()).view_as(model.weight).sin()
        model.weight.grad = model.weight.grad.to(memory_format=torch.channels_last)
        optimizer.step()

    model, optimizer = make()
    train(model, optimizer)
    dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "1", config={"system": "exact"})
    restored, its_optimizer = make()
    dsq_ckpt.load({"model": restored, "optimizer": its_optimizer}, tmp_path / "1")
    assert its_optimizer.state[restored.weight]["exp_avg"].stride() == restored.weight.stride()
    train(model, optimizer)
    train(restored, its_optimizer)
    assert torch.equal(restored.weight, model.weight)


def test_numbers_of_numpy_are_stored_as_plain_ones(tmp_path):
    """So that they are loaded into an empty dict."""
    state = {"best": np.float64(0.1), "single": np.float32(0.1), "count": np.int64(1 << 60), "done": np.bool_(True)}
    dsq_ckpt.save({"numbers": state, "lr": [np.float64(1e-3)]}, tmp_path / "run" / "1")
    target = {}
    dsq_ckpt.load(target, tmp_path / "run" / "1")
    assert target == {"numbers": state, "lr": [1e-3]}
    assert [type(value) for value in target["numbers"].values()] == [float, float, int, bool]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_a_sparse_tensor_is_refused_before_anything_is_loaded(tmp_path, layout):
    dsq_ckpt.save({"a": torch.ones(4, 4), "w": torch.ones(4, 4)}, tmp_path / "a")
    state = {"a": torch.zeros(4, 4), "w": torch.eye(4).to_sparse(layout=getattr(torch, layout))}
    with pytest.raises(dsq_ckpt.LoadFailed, match=f"'w' has the layout torch.{layout} in what it is loaded into: load"):
        dsq_ckpt.load(state, tmp_path / "a")
    assert not state["a"].any()
