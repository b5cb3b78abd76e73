"""Modules, optimizers and the like in place of their state dicts: as DCP takes them, and nothing is left out."""

from __future__ import annotations

import collections
import datetime
import pathlib
import signal
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt import DSQConfig, LoadFailed
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.optimizer_states import check_moments, fresh, plain
from tests.helpers.reading import read_checkpoint
from tests.helpers.states import find_differences

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
EXACT = DSQConfig.preset("exact")


@pytest.mark.parametrize("background", [False, True])
def test_an_optimizer_in_place_of_its_state_is_filled(tmp_path, background):
    """As DCP takes modules and optimizers; of one that has not stepped it would load the hyperparameters alone."""
    model, optimizer, _ = plain()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, 7: "seven"}
    if background:
        dsq_ckpt.async_save(state, tmp_path / "a", config=EXACT).result()
    else:
        dsq_ckpt.save(state, tmp_path / "a", config=EXACT)
    assert state["optimizer"] is optimizer
    twin, _, _ = plain()
    other = torch.optim.AdamW(twin.parameters(), lr=1)
    for parameter in twin.parameters():
        parameter.data.zero_()
    target = {"model": twin, "optimizer": other, "scheduler": {}, 7: ""}
    dsq_ckpt.load(target, tmp_path / "a")
    assert target["model"] is twin and target["optimizer"] is other and target[7] == "seven"
    assert find_differences(dict(twin.state_dict()), dict(model.state_dict())) == []
    check_moments(other, optimizer)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert target["scheduler"] == scheduler.state_dict()


def test_an_optimizer_in_place_of_its_state_is_compressed(tmp_path):
    model, optimizer, state = plain()
    dsq_ckpt.compress({"model": model, "optimizer": optimizer}, tmp_path / "a", config=EXACT)
    loaded = read_checkpoint(tmp_path / "a")
    assert find_differences(loaded["model"], state["model"]) == []
    other = fresh()
    other.load_state_dict(loaded["optimizer"])
    check_moments(other, optimizer)


def test_an_object_that_had_no_state_is_left_as_it_is(tmp_path):
    """As DCP does, also if it was not there when the checkpoint was saved; an empty dict asks for something."""
    model = torch.nn.Linear(80, 80)
    dsq_ckpt.save({"w": torch.ones(3)}, tmp_path / "a")
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    assert scaler.state_dict() == {}
    dsq_ckpt.load({"w": torch.zeros(3), "scaler": scaler}, tmp_path / "a")
    dsq_ckpt.save({"m": model, "scaler": scaler}, tmp_path / "b")
    dsq_ckpt.load({"m": model, "scaler": scaler}, tmp_path / "b")
    with pytest.raises(LoadFailed, match="'scaler' is an empty dict"):
        dsq_ckpt.load({"w": torch.zeros(3), "scaler": {}}, tmp_path / "a")


def test_an_optimizer_below_the_top_level_is_said_to_be_an_object(tmp_path):
    """As in DCP; a load would leave it as it is, without a word."""
    model, optimizer, _ = plain()
    for number, (state, name) in enumerate((
        ({"app": {"model": model, "step": 1}}, "'app.model' is a Net"),
        ({"optimizers": ([optimizer],), "model": model}, "'optimizers.0.0' is a AdamW"),
    )):
        with pytest.warns(UserWarning, match=name):
            dsq_ckpt.save(state, tmp_path / str(number))
        with pytest.warns(UserWarning, match=f"{name}.* leaves this one as it is"):
            dsq_ckpt.load(state, tmp_path / str(number))


Stats = collections.namedtuple("Stats", "loss step")


@pytest.mark.parametrize("value", [
    pathlib.PurePosixPath("data"), datetime.datetime(2026, 1, 1), signal.SIGTERM, Stats(0.5, 1),
    np.random.default_rng(0), np.arange(3), ("MT19937", np.arange(624)), {"sets": [datetime.timedelta(1)]},
], ids=lambda value: type(value).__name__)
def test_objects_that_no_load_into_an_empty_dict_brings_back_are_reported_when_saved(tmp_path, value):
    with pytest.warns(UserWarning, match="^'app.own.*' is pickled with '.* not into an empty dict"):
        dsq_ckpt.save({"w": torch.ones(3), "app": {"own": value}}, tmp_path / "a")
    with pytest.raises(LoadFailed, match="more than plain data"):
        dsq_ckpt.load({}, tmp_path / "a")


class Once:
    """An object that notes how often it is pickled."""

    def __init__(self):
        self.times = 0

    def __getstate__(self):
        self.times += 1
        return {"times": self.times}


def test_objects_are_reported_once_and_pickled_once(tmp_path):
    own = Once()
    state = {"w": torch.ones(3), "own": own, "files": [pathlib.PurePosixPath(str(n)) for n in range(100)]}
    state["many"] = {str(n): pathlib.PurePosixPath(str(n)) for n in range(100)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dsq_ckpt.save(state, tmp_path / "a")
    assert own.times == 1 and 1 <= len([
        warning for warning in caught if "not into an empty dict" in str(warning.message)
    ]) <= 3


def test_nothing_is_said_of_plain_data(tmp_path):
    state = {
        "w": torch.ones(3), "rate": np.float32(0.1), "order": collections.OrderedDict(a=1), "dtype": torch.bfloat16,
        "seen": {1, 2}, "shape": torch.Size([2]), "many": [1, ("x", None, b"y", 1j)],
        "counts": collections.Counter("ab"),
    }
    target = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dsq_ckpt.save(state, tmp_path / "a")
        dsq_ckpt.load(target, tmp_path / "a")
    assert target.keys() == state.keys() and not [
        str(warning.message) for warning in caught if "plain data" in str(warning.message)
    ]


def test_a_module_among_the_values_is_the_model(tmp_path):
    """Its frozen parameters and buffers are exact, as with `model=`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[1].requires_grad_(False)
    model.register_buffer("table", torch.randn(128, 128))
    original = {name: value.clone() for name, value in model.state_dict().items()}
    beside = {"rng": torch.get_rng_state(), "replay": torch.randn(300, 16), "run": {"seeds": [torch.tensor([1.5])]}}
    dsq_ckpt.save({"model": model, "step": 1, **beside}, tmp_path / "1")
    state = {"model": model}
    dsq_ckpt.load(state, tmp_path / "1")
    loaded = model.state_dict()
    assert not torch.equal(loaded["0.weight"], original["0.weight"])
    assert all(torch.equal(loaded[name], original[name]) for name in ("1.weight", "table"))


def test_the_state_of_other_parameters_is_refused(tmp_path):
    """A load of more than there are fails before it begins; other shapes, which some optimizers keep, are told of."""

    def make(*layers):
        model = nn.Sequential(*(nn.Linear(*layer) for layer in layers))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make((128, 64), (64, 8))
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "1")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, other = make((128, 64))
    said = "'optimizer.state.2.step', state of parameter 2, counted from 0, and 'optimizer' has 2 parameters"
    with pytest.raises(LoadFailed, match=f"{said}.* another model"):
        dsq_ckpt.load({"model": model, "optimizer": other}, tmp_path / "1")
    assert not other.state and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    _, other = make((96, 64), (64, 8))
    said = r"'optimizer.state.0.exp_avg' has shape \(64, 128\) .* and parameter 0 of 'optimizer' \(64, 96\)"
    with pytest.warns(UserWarning, match=f"{said}.* another model"):
        dsq_ckpt.load({"optimizer": other}, tmp_path / "1")


def test_a_module_beside_other_weights_is_not_the_model(tmp_path):
    """By whose names theirs would be taken for norms, or for frozen."""
    state = {"policy": nn.Linear(128, 128).state_dict(), "norm": nn.BatchNorm1d(128)}
    dsq_ckpt.save(state, tmp_path / "1")
    assert Manifest.read(tmp_path / "1").kinds["weights"].logical == 4 * 128 * 128
    state = {"model": nn.Linear(128, 128), "optimizer": {"w": torch.randn(90, 90)}, "step": 3}
    state["model"].requires_grad_(False)
    state["model"].bias.requires_grad_(True)
    dsq_ckpt.save(state, tmp_path / "2")
    assert "weights" not in Manifest.read(tmp_path / "2").kinds
    state |= {"average": [{"weight": torch.randn(128, 128)}]}
    dsq_ckpt.save(state, tmp_path / "3")
    assert Manifest.read(tmp_path / "3").kinds["weights"].logical == 2 * 4 * 128 * 128
    dsq_ckpt.save({"model": state["model"], "weight": torch.randn(128, 128)}, tmp_path / "4")
    assert Manifest.read(tmp_path / "4").kinds["weights"].logical == 2 * 4 * 128 * 128


def test_several_modules_are_known_beside_what_is_not_named_like_theirs(tmp_path):
    """With their keys; else an average of one would be taken for the frozen one."""
    frozen, trained = nn.Linear(128, 128).requires_grad_(False), nn.Linear(128, 128)
    average = {"weight": torch.randn(128, 128)}
    for number, (beside, known) in enumerate((
        (average, True), ([average], True), ({"G": average}, False), ([{"G.weight": average["weight"]}], False),
    )):
        dsq_ckpt.save({"G": frozen, 1: trained, "average": beside, "step": 3}, tmp_path / str(number))
        target = {}
        dsq_ckpt.load(target, tmp_path / str(number))
        assert target["G"]["weight"].equal(frozen.weight) == known
        assert not target[1]["weight"].equal(trained.weight)
        assert Manifest.read(tmp_path / str(number)).kinds["weights"].logical == (2 if known else 3) * 4 * 128 * 128
