"""Wrong arguments: one sentence names the argument, what came, what is expected; modules; what a save returns."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt import CheckpointNotFound, ConfigError, DSQStorageWriter, LoadFailed, SaveResult
from dsq_ckpt.convert.export import export_torch
from dsq_ckpt.core.figures import percent
from dsq_ckpt.lowdiff import GradientLog, recover
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import is_equal
from tests.helpers.training import Net, compute_loss

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STATE = {"w": torch.ones(3)}
NET = nn.Linear(2, 2)
ADAM = torch.optim.Adam(NET.parameters())


@pytest.mark.parametrize("call, says", [
    (lambda p: dsq_ckpt.save(STATE, None), "path is None, expected the directory of a checkpoint"),
    (lambda p: dsq_ckpt.save(STATE, 3), "path is 3, expected the directory of a checkpoint"),
    (lambda p: dsq_ckpt.async_save(STATE, None), "path is None, expected"),
    (lambda p: dsq_ckpt.load(STATE, 3), "path is 3, expected"),
    (lambda p: dsq_ckpt.describe(3), "path is 3, expected"),
    (lambda p: DSQStorageWriter(b"/tmp/x"), "path is b'/tmp/x', expected"),
    (lambda p: dsq_ckpt.save(None, p), "state_dict is None, expected a nested dict .*, or a module: save(state_dict, "),
    (lambda p: dsq_ckpt.save("run/a", STATE), "path is of class dict, expected"),
    (lambda p: dsq_ckpt.save([STATE], p), "state_dict is of class list, expected"),
    (lambda p: dsq_ckpt.async_save(torch.ones(3), p), "state_dict is of class Tensor, expected"),
    (lambda p: dsq_ckpt.load("run/a", p), "state_dict is 'run/a', expected .*: load(state_dict, path)"),
    (lambda p: dsq_ckpt.save(STATE, p, parent=3), "parent is 3, expected 'auto', None or the directory of a"),
    (lambda p: dsq_ckpt.save(STATE, p, process_group=3), "process_group is 3, expected a group of torch.distributed"),
    (lambda p: dsq_ckpt.async_save(STATE, p, process_group=3), "process_group is 3, expected"),
    (lambda p: dsq_ckpt.load(STATE, p, process_group=3), "process_group is 3, expected"),
    (lambda p: dsq_ckpt.Compressor(NET, process_group="all").save(p), "process_group is 'all', expected"),
    (lambda p: dsq_ckpt.save(STATE, p, config=4), "config is 4, expected a DSQConfig, a dict, the path"),
    (lambda p: dsq_ckpt.save(STATE, p, model=3), "model is 3, expected a module"),
    (lambda p: dsq_ckpt.Compressor(ADAM, NET), "model is of class Adam, expected a module: Compressor(model, "),
    (lambda p: dsq_ckpt.Compressor(NET, NET), "optimizer is of class Linear, expected an optimizer, or None"),
    (lambda p: dsq_ckpt.Compressor(NET, config=4), "config is 4, expected"),
    (lambda p: dsq_ckpt.Compressor(NET, evaluate=3.0), "evaluate is 3.0, expected a function"),
    (lambda p: dsq_ckpt.Compressor(NET, evaluate=float, check=3.0), "check is 3.0, expected a function"),
    (lambda p: dsq_ckpt.Compressor(NET, check=float), "check needs evaluate: it confirms what a search chooses"),
    (lambda p: dsq_ckpt.compress(3, p), "source is 3, expected a state dict, a module, or a path"),
    (lambda p: dsq_ckpt.compress(b"x", p), "source is b'x', expected"),
    (lambda p: dsq_ckpt.decode(3), "spec is 3, expected the dict in a placeholder"),
    (lambda p: GradientLog(NET, ADAM, p), "run is of class Linear, expected the directory of a run, as a str or a"),
    (lambda p: GradientLog(p, ADAM, NET), "model is of class Adam, expected a module"),
    (lambda p: GradientLog(p, NET, None), "optimizer is None, expected an optimizer of its parameters"),
    (lambda p: recover(NET, ADAM, p), "run is of class Linear, expected the directory of a run"),
    (lambda p: recover(p, None, None), "model is None, expected a module"),
    (lambda p: recover(p, NET, ADAM, process_group=3), "process_group is 3, expected"),
    (lambda p: dsq_ckpt.compress(NET, p, evaluate=3.0), "evaluate is 3.0, expected a function"),
    (lambda p: dsq_ckpt.compress(NET, p, evaluate=float, check="loss"), "check is 'loss', expected a function"),
    (lambda p: dsq_ckpt.compress(NET, p, check=float), "check needs evaluate: it confirms what a search chooses"),
    (lambda p: dsq_ckpt.Compressor(NET, ADAM, every="ten"), "every is 'ten', expected a number of steps"),
    (lambda p: dsq_ckpt.Compressor(NET, ADAM, hooks="stop"), "hooks is 'stop', expected 'step', 'backward' or"),
    (lambda p: dsq_ckpt.Compressor(NET).save(p, extra=3), "extra is 3, expected a dict, such as {'step': 500}"),
    (lambda p: dsq_ckpt.Compressor(NET).save(None), "path is None, expected"),
    (lambda p: dsq_ckpt.Compressor(NET).load(p, extra=[3]), "extra is of class list, expected a dict"),
])
def test_wrong_arguments(tmp_path, call, says):
    path = tmp_path / "run" / "a"
    with pytest.raises(ConfigError) as caught:
        call(path)
    first, _, rest = says.partition(".*")
    assert str(caught.value).startswith(first) and rest in str(caught.value) and "\n" not in str(caught.value)
    assert not path.exists()


@pytest.mark.parametrize("background", [False, True])
def test_a_module_stands_for_its_state_dict(tmp_path, background):
    model, other = Net(0), Net(1)
    result = dsq_ckpt.async_save(model, tmp_path / "a").result() if background else dsq_ckpt.save(model, tmp_path / "a")
    assert set(Manifest.read(result.path).groups) == {"weights/embedding", "weights/linear"}
    dsq_ckpt.load(other, tmp_path / "a")
    loss = compute_loss(model)
    assert is_equal(other.norm.weight, model.norm.weight) and abs(compute_loss(other) - loss) < 0.02 * loss
    state = copy.deepcopy(other.state_dict())
    dsq_ckpt.load(state, tmp_path / "a")
    assert all(is_equal(value, other.state_dict()[name]) for name, value in state.items())


def test_a_module_with_less_than_was_saved_is_reported(tmp_path):
    model, other = Net(0), Net(1)
    dsq_ckpt.save({**model.state_dict(), "step": 3}, tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dsq_ckpt.load(other, tmp_path / "a")
    del other.head
    with pytest.warns(UserWarning, match=r"'head.bias', 'head.weight' of '.*a' was not loaded, since the module"):
        dsq_ckpt.load(other, tmp_path / "a")


@pytest.mark.parametrize("how", ["module", "value", "compressor"])
def test_a_module_without_memory_is_refused(tmp_path, how):
    """Torch would leave it as it is, on the meta device."""
    model = Net(0)
    dsq_ckpt.save({"model": model, **model.state_dict()}, tmp_path / "a")
    with torch.device("meta"):
        other = Net(1)
    with pytest.raises(LoadFailed, match=r"'embed.weight' of the module is on the meta device, .*to_empty"):
        if how == "compressor":
            dsq_ckpt.Compressor(other, config="exact").load(tmp_path / "a")
        else:
            dsq_ckpt.load(other if how == "module" else {"model": other}, tmp_path / "a")


def test_tensors_without_memory_are_replaced(tmp_path):
    state = {"a": [torch.randn(80, 80), {3: torch.ones(4)}], "b": torch.zeros(0)}
    dsq_ckpt.save(state, tmp_path / "a", config="exact")
    target = {
        "a": [torch.empty(80, 80, device="meta"), {3: torch.empty(4, device="meta")}], "b": torch.ones(0, device="meta")
    }
    dsq_ckpt.load(target, tmp_path / "a")
    assert is_equal(target["a"][0], state["a"][0]) and is_equal(target["a"][1][3], state["a"][1][3])
    assert target["b"].device.type == "cpu"


class Transposed(torch.nn.Linear):
    """A module whose older versions had another weight, which it takes as torch's documentation shows it."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize("how", ["module", "value", "compressor"])
def test_a_module_is_told_that_the_state_is_of_its_own_version(tmp_path, how):
    model, other = (torch.nn.Sequential(Transposed(80, 80), torch.nn.Linear(80, 8)) for _ in range(2))
    other[1].requires_grad_(False)
    if how == "compressor":
        dsq_ckpt.Compressor(model, config="exact").save(tmp_path / "a")
        dsq_ckpt.Compressor(other, frozen=False).load(tmp_path / "a")
    else:
        dsq_ckpt.save(model if how == "module" else {"m": model}, tmp_path / "a", config="exact")
        dsq_ckpt.load(other if how == "module" else {"m": other}, tmp_path / "a")
    assert is_equal(other[0].weight, model[0].weight)
    assert is_equal(other[1].weight, model[1].weight) == (how != "compressor")


def test_a_key_that_is_not_there(tmp_path):
    state = {"model": {f"layers.{n}.weight": torch.ones(3) for n in range(9)}, "step": 3}
    dsq_ckpt.save(state, tmp_path / "a")
    for wrong, says in (
        ({"model": {"layers.0.wieght": torch.ones(3)}},
         "'model.layers.0.wieght', .* did you mean 'model.layers.0.weight'"),
        ({"layers.3.weight": torch.ones(3), "x": 1}, "'layers.3.weight' and 1 more, .* mean 'model.layers.3.weight'?"),
        ({f"layers.{n}.weight": torch.ones(3) for n in range(2)},
         "'layers.0.weight' and 1 more .* below 'model' it has all of them: pass {'model': module}"),
        ({"a": {"model": {"layers.1.weight": torch.ones(3)}, "step": 3}},
         "'a.model.layers.1.weight' and 1 more .* without 'a' it has all of them: pass what is below 'a'"),
        ({"zzz": torch.ones(3)}, "the checkpoint has no 'zzz', .* there are 'model.layers.0.weight', .* and 5 more"),
    ):
        with pytest.raises(LoadFailed) as caught:
            dsq_ckpt.load(wrong, tmp_path / "a")
        assert all(part in str(caught.value) for part in says.split(" .* ")), caught.value


def test_a_bare_module_is_told_the_keys_that_its_state_lies_below(tmp_path):
    """A load takes the value that the error says to pass as it stands."""
    model, module = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(2))
    state_dict = module.state_dict()
    for name, state, says, passed in (
        ("a", {"model": model.state_dict()}, "{'model': module}", {"model": module}),
        ("b", {"run": {"ema": model.state_dict()}}, "{'run': {'ema': state_dict}}", {"run": {"ema": state_dict}}),
    ):
        torch.nn.init.zeros_(module[0].weight)
        dsq_ckpt.save({**state, "step": 3}, tmp_path / name, config="exact")
        with pytest.raises(LoadFailed, match=re.escape(f"it has all of them: pass {says}") + "$"):
            dsq_ckpt.load(module, tmp_path / name)
        dsq_ckpt.load(passed, tmp_path / name)
        assert is_equal(module[0].weight, model[0].weight)


def test_all_places_of_a_bare_module_are_named_the_model_first(tmp_path):
    """Whoever passed the average alone would train on from that."""
    model = torch.nn.Linear(80, 80)
    dsq_ckpt.save({"ema": model.state_dict(), "model": model.state_dict()}, tmp_path / "a")
    says = "below 'model' and below 'ema' it has all of them: pass {'model': module} or {'ema': module}"
    with pytest.raises(LoadFailed, match=re.escape(says) + "$"):
        dsq_ckpt.load(model, tmp_path / "a")
    with pytest.raises(CheckpointNotFound, match="is a file of a checkpoint; name its directory"):
        dsq_ckpt.load(model, tmp_path / "a" / "manifest.json")


def test_a_save_returns_its_result(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="dsq_ckpt")
    state = {"w": torch.randn(200, 200)}
    first = dsq_ckpt.save(state, tmp_path / "run" / "step-1")
    second = dsq_ckpt.async_save(state, tmp_path / "run" / "step-2").result()
    for result, name, depth in ((first, "step-1", "keyframe"), (second, "step-2", "delta 1")):
        assert isinstance(result, SaveResult) and result.path == tmp_path / "run" / name
        assert result.save_id == Manifest.read(result.path).save_id and result.bytes_logical == 160_000
        assert str(result) == repr(result) and str(result).startswith(f"{name}: ") and f"x, {depth}, " in str(result)
        assert str(result).endswith(" s") and "\n" not in str(result)
        assert caplog.messages.count(str(result)) == 1
        numbers = result.scalars()
        assert all(type(number) is float for number in numbers.values()) and "degradation" not in numbers
        assert numbers["ratio"] == result.bytes_logical / result.bytes_written > 1
    assert first.keyframe and not second.keyframe and second.depth == 1
    assert second.bytes_written == sum(
        file.stat().st_size for file in second.path.iterdir() if file.name.startswith(second.save_id)
    ) + (second.path / "manifest.json").stat().st_size
    with pytest.raises(AttributeError):
        first.depth = 3


@pytest.mark.parametrize("background", [False, True])
def test_a_compressor_returns_its_result(tmp_path, background):
    model = Net()
    compressor = dsq_ckpt.Compressor(model, evaluate=lambda: compute_loss(model))
    outcome = compressor.save(tmp_path / "a", background=background)
    result = outcome.result() if background else outcome
    assert result.quality == compressor.quality and result.degradation == result.quality["degradation"]
    assert result.scalars()["degradation"] == result.degradation
    lost = result.quality["restore_loses"] / result.quality["metric"]
    assert str(result).endswith(f", base loses {percent(result.degradation)}, restore loses {percent(lost)}")
    assert dsq_ckpt.Compressor(model).save(tmp_path / "b").degradation is None


def test_a_line():
    """The line tells the price of the base layer from that of a restore, in the words of `dsq log`."""
    result = SaveResult(Path("run/step-000500"), "0", 2_516_582, 25_669_140, 3, 0.61, "kept", {"degradation": 0.0474})
    line = "step-000500: 2.4 MiB, 10.2x, delta 3, 0.6 s, base loses 4.7 %"
    assert str(result) == line
    measured = {"degradation": 0.0474, "metric": -2.0, "restore_loses": 0.0012}
    assert str(dataclasses.replace(result, quality=measured)) == line + ", restore loses 0.06 %"


@pytest.mark.parametrize("call", [
    dsq_ckpt.save, dsq_ckpt.async_save, dsq_ckpt.load, dsq_ckpt.compress, lambda state, path: dsq_ckpt.latest(path),
    lambda state, path: dsq_ckpt.describe(path), lambda state, path: dsq_ckpt.SaveHistory().clear(path),
    lambda state, path: export_torch(path, path), lambda state, path: dsq_ckpt.lowdiff.recover(path, NET, ADAM),
])
def test_a_working_directory_that_was_deleted(tmp_path, monkeypatch, call):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="'run/a' is relative to the working directory, which does not exist"):
        call({"w": torch.ones(3)}, "run/a")


@pytest.mark.parametrize("call", [dsq_ckpt.save, dsq_ckpt.async_save, dsq_ckpt.load, dsq_ckpt.compress])
def test_a_state_that_contains_itself(tmp_path, call):
    dsq_ckpt.save(STATE, tmp_path / "a")
    state = {"w": torch.ones(3), "inner": {"list": [1]}, "same": 1}
    state["same"] = state["inner"]  # twice, but not in itself
    state["inner"]["list"].append(state)
    with pytest.raises(ConfigError, match=r"the state dict contains itself: 'inner.* that it lies in"):
        call(state, tmp_path / ("a" if call is dsq_ckpt.load else "b"))
    assert not (tmp_path / "b").exists()


def test_an_empty_state_dict_is_saved_with_a_warning(tmp_path):
    for name, state in (("a", {}), ("b", {"model": {}})):
        with pytest.warns(UserWarning, match=f"the state dict is empty: the checkpoint .*{name}' holds nothing"):
            dsq_ckpt.save(state, tmp_path / name)


def test_entries_that_a_compressor_does_not_load_are_named(tmp_path, recwarn):
    compressor = dsq_ckpt.Compressor(NET, ADAM)
    compressor.save(tmp_path / "a", extra={"step": 7, "rng": {"cpu": 1}})
    compressor.load(tmp_path / "a", extra={"step": 0, "rng": {}})
    assert not [warning for warning in recwarn if "not loaded" in str(warning.message)]
    with pytest.warns(UserWarning, match="^'rng' of .*a' is not loaded, since extra does not name it"):
        compressor.load(tmp_path / "a", extra={"step": 0})
    for alone in (compressor, dsq_ckpt.Compressor(NET)):
        with pytest.warns(UserWarning, match="'rng'.*, 'step' of .*a' is not loaded, since") as caught:
            alone.load(tmp_path / "a")
        assert caught[0].filename == __file__
        assert ("'optimizer'" in str(caught[0].message)) == (alone is not compressor)


def test_entries_below_extra_that_are_not_loaded_are_named(tmp_path, recwarn):
    """They were left out without a word."""
    compressor = dsq_ckpt.Compressor(NET, ADAM)
    early = {"best": 0.5, "bad": 3, "deep": {1: 2, "window": torch.ones(3)}, "none": {}}
    compressor.save(tmp_path / "a", extra={"early": early, "list": [{"a": 1, "b": torch.ones(2)}]})
    complete = {"early": {"best": 0, "bad": 0, "deep": {1: 0, "window": torch.zeros(3)}, "none": {}}, "list": [{}]}
    for extra in ({"early": {}, "list": [{}]}, complete):
        loaded = compressor.load(tmp_path / "a", extra=extra)
        assert loaded["early"]["deep"][1] == 2 and loaded["early"]["bad"] == 3 and loaded["list"][0]["a"] == 1
    assert not [warning for warning in recwarn if "not loaded" in str(warning.message)]
    with pytest.warns(UserWarning, match="is not loaded, since extra does not name it") as caught:
        compressor.load(tmp_path / "a", extra={"early": {"best": 0, "deep": {1: 0}}, "list": [{"a": 0}]})
    (message,) = [str(warning.message) for warning in caught if "not loaded" in str(warning.message)]
    assert message.startswith("'early.bad', 'early.deep.window', 'early.none' and 1 more of ")
    assert "extra={'early': {'bad': ..., 'deep': {'window': ...}, 'none': ...}}, for example" in message
    for extra in ({"early": {"other": 0}}, {"early": 0}):
        with pytest.raises(LoadFailed, match=r"'early(\.other)?'"):
            compressor.load(tmp_path / "a", extra=extra)


@pytest.mark.parametrize("run", [None, 3, STATE])
def test_latest_of_what_is_no_path(run):
    with pytest.raises(ConfigError, match=r"run is .*, expected the directory of a run"):
        dsq_ckpt.latest(run)


def test_entries_of_a_long_list_that_are_not_loaded_are_named_briefly(tmp_path, recwarn):
    compressor = dsq_ckpt.Compressor(NET, ADAM)
    compressor.save(tmp_path / "a", extra={"list": [{"a": 1, "b": torch.ones(1)} for _ in range(500)]})
    compressor.load(tmp_path / "a", extra={"list": [{}] * 499 + [{"a": 0}]})
    (message,) = [str(warning.message) for warning in recwarn if "not loaded" in str(warning.message)]
    assert message.startswith("'list.499.b' of ") and "extra={'list': [{'b': ...}]}, for example" in message


def test_placeholders_of_a_compressor_that_contain_themselves(tmp_path):
    compressor = dsq_ckpt.Compressor(NET, ADAM)
    compressor.save(tmp_path / "a", extra={"early": {"best": 0.5}})
    early = {"best": 0}
    early["list"] = [early]
    with pytest.raises(ConfigError, match=r"the state dict contains itself: 'early\.list\.0' is a dict or list"):
        compressor.load(tmp_path / "a", extra={"early": early})


def test_latest_of_an_empty_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^run is '': expected the directory of a run; that of the process is '.'$"):
        dsq_ckpt.latest("")
    assert dsq_ckpt.latest(".") is None
