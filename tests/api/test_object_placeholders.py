"""An object at the top level gets back all that was saved of it, also what one that was just made does not tell."""

from __future__ import annotations

import collections
import pathlib
import warnings

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt import LoadFailed
from dsq_ckpt.api.object_placeholders import ObjectPlaceholders, select_objects
from dsq_ckpt.core.nesting import Nesting
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers.odd_optimizers import make_pair
from tests.helpers.states import find_differences
from tests.helpers.tensor_subclasses import EightBits, equal, scaled

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Counting(torch.optim.Optimizer):
    """Keeps its step and a sum in its groups, as some optimizers do, and these only once it has stepped."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["sums"] = {"gradients": group.get("sums", {}).get("gradients", 0.0) + 1.5}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter)).add_(parameter.grad)


class Kept:
    """An object whose state is a dict."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)


def restore(path, compressor, source, target):
    """Save one model and optimizer, and load it into others, by a `Compressor` or as objects."""
    if compressor:
        dsq_ckpt.Compressor(*source, config="exact").save(path)
        dsq_ckpt.Compressor(*target).load(path)
    else:
        dsq_ckpt.save(dict(zip(("model", "optimizer"), source, strict=True)), path, config="exact")
        dsq_ckpt.load(dict(zip(("model", "optimizer"), target, strict=True)), path)


def options(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("stepped", [0, 1])
@pytest.mark.parametrize("compressor", [False, True])
def test_options_of_groups_that_only_a_used_optimizer_has(tmp_path, compressor, stepped):
    model, optimizer = make_pair(Counting, 3)
    other, target = make_pair(Counting, stepped)
    restore(tmp_path / "a", compressor, (model, optimizer), (other, target))
    assert options(target) == options(optimizer) == [{"lr": 0.1, "step": 3, "sums": {"gradients": 4.5}}]
    assert target.state[other.weight]["exp_avg"].equal(optimizer.state[model.weight]["exp_avg"])


@pytest.mark.parametrize("compressor", [False, True])
def test_a_scheduler_is_made_after_the_load_or_before_without_one_that_was_saved(tmp_path, compressor):
    """A scheduler reads `initial_lr` of each group where it goes on, and keeps numbers of its own there."""
    def run(state, path, load):
        if compressor:
            own_compressor = dsq_ckpt.Compressor(state["model"], state["optimizer"], config="exact")
            own_compressor.load(path) if load else own_compressor.save(path)
        else:
            dsq_ckpt.load(state, path) if load else dsq_ckpt.save(state, path, config="exact")

    model, optimizer = make_pair(torch.optim.AdamW, 1)
    run({"model": model, "optimizer": optimizer}, tmp_path / "plain", False)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    run({"model": model, "optimizer": optimizer}, tmp_path / "scheduled", False)
    model, optimizer = make_pair(torch.optim.AdamW)
    run({"model": model, "optimizer": optimizer}, tmp_path / "scheduled", True)
    after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch, last_epoch=4)
    assert after.get_last_lr() == [0.5**5 * 1e-3]
    model, optimizer = make_pair(torch.optim.AdamW)
    before = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    own = {key: optimizer.param_groups[0][key] for key in ("initial_lr", "max_lr", "min_lr", "max_momentum")}
    run({"model": model, "optimizer": optimizer}, tmp_path / "plain", True)
    assert own.items() <= optimizer.param_groups[0].items()
    optimizer.step()
    before.step()


def test_entries_that_an_object_has_once_it_was_used(tmp_path):
    weights = {"w": torch.randn(3, 5), "deep": [torch.ones(2), {"n": 1}]}
    stop = Kept(
        best=0.1, wait=3, weights=weights, last=torch.ones(4), empty={}, numbers=[1, 2], kept=torch.ones(2),
        list=[{}, {"pos": 4, "buffer": {}}],
    )
    dsq_ckpt.save({"w": torch.zeros(3), "stop": stop}, tmp_path / "a")
    fresh = Kept(best=float("inf"), weights=None, numbers=[], kept=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dsq_ckpt.load({"w": torch.zeros(3), "stop": fresh}, tmp_path / "a")
    assert find_differences(fresh.state, stop.state) == []
    unlike = Kept(best=0.0, extra=1)
    with pytest.raises(LoadFailed, match=r"has no 'stop\.extra'"):
        dsq_ckpt.load({"w": torch.zeros(3), "stop": unlike}, tmp_path / "a")
    assert unlike.state == {"best": 0.0, "extra": 1}


def test_an_object_with_tensors_of_its_own_is_not_given_others(tmp_path):
    """An object may hold a part of a model on purpose, as a stage of a pipeline does."""
    ones = torch.ones(3)
    dsq_ckpt.save({"app": Kept(a=ones, b=torch.ones(4), step=7, list=[ones, 1, torch.ones(2), 2])}, tmp_path / "a")
    part = Kept(a=torch.zeros(3), list=[torch.zeros(3)])
    with pytest.warns(UserWarning, match=r"'app\.b', 'app\.list\.2' was saved of 'app' and is not loaded, since its"):
        dsq_ckpt.load({"app": part}, tmp_path / "a")
    assert find_differences(part.state, {"a": ones, "list": [ones, 1], "step": 7}) == []


class Wrapped(collections.UserDict):
    """A mapping that is no dict, of which a shallow copy has the same entries."""

    def __copy__(self):
        duplicate = Wrapped()
        duplicate.data = self.data
        return duplicate


def test_a_load_that_fails_leaves_what_objects_hold(tmp_path):
    dsq_ckpt.save({"one": Kept(inner={"x": 1, "y": 2}), "top": {"e": 3}}, tmp_path / "a")
    held = Wrapped(x=5)
    with pytest.raises(LoadFailed, match="no 'missing'"):
        dsq_ckpt.load({"one": Kept(inner=held), "missing": 0}, tmp_path / "a")
    assert held == {"x": 5}
    one, top = Kept(inner=held), collections.UserDict(one=None, top={})
    top["one"] = one
    dsq_ckpt.load(top, tmp_path / "a")  # any mapping, too
    assert one.state == {"inner": {"x": 1, "y": 2}} and top["top"] == {"e": 3}


@pytest.mark.parametrize("compressor", [False, True])
def test_an_option_that_was_saved_as_an_empty_dict_is_empty(tmp_path, compressor):
    model, optimizer = make_pair(Counting, 1)
    other, target = make_pair(Counting, 1)
    optimizer.param_groups[0]["sums"] = {}
    restore(tmp_path / "a", compressor, (model, optimizer), (other, target))
    assert options(target) == [{"lr": 0.1, "step": 1, "sums": {}}]


def test_a_rate_that_was_a_tensor(tmp_path):
    _, optimizer = make_pair(torch.optim.AdamW, 1, lr=torch.tensor(0.125))
    dsq_ckpt.save({"optimizer": optimizer}, tmp_path / "a")
    _, target = make_pair(torch.optim.AdamW, 1)
    dsq_ckpt.load({"optimizer": target}, tmp_path / "a")
    assert float(target.param_groups[0]["lr"]) == 0.125


def test_an_optimizer_that_has_stepped_for_some_parameters_alone(tmp_path):
    def partly(*used):
        layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        optimizer = torch.optim.AdamW(layers.parameters())
        for number in used:
            layers[number](torch.ones(1, 8)).sum().backward()
        optimizer.step()
        return layers, optimizer

    layers, optimizer = partly(0, 1, 2)
    dsq_ckpt.save({"optimizer": optimizer}, tmp_path / "a", config="exact")
    others, target = partly(1)
    dsq_ckpt.load({"optimizer": target}, tmp_path / "a")
    for layer, other in zip(layers, others, strict=True):
        assert target.state[other.weight]["exp_avg"].equal(optimizer.state[layer.weight]["exp_avg"])
    with pytest.raises(LoadFailed, match=r"state of parameter 2.*has 2 parameters"):
        dsq_ckpt.load({"optimizer": torch.optim.AdamW([*others[:2].parameters()])}, tmp_path / "a")


def test_a_rate_is_not_left_at_zero_where_the_state_cannot_be_made(tmp_path):
    class Fails(EightBits):
        def step(self, closure=None):
            self.param_groups[0]["count"] = 1
            raise ValueError("no step without a loss")

    _, optimizer = make_pair(EightBits, 1)
    dsq_ckpt.save({"optimizer": optimizer}, tmp_path / "a")
    _, target = make_pair(Fails)
    with pytest.raises(LoadFailed, match="no step without a loss"):
        dsq_ckpt.load({"optimizer": target}, tmp_path / "a")
    assert options(target) == [{"lr": 0.1}] and not target.state


def test_state_that_another_rank_tells_is_its_own(tmp_path):
    dsq_ckpt.save({"app": Kept(a=torch.ones(3), b=1, c=2), "step": 1}, tmp_path / "a")
    given = {"app": Kept(a=torch.zeros(3)), "step": 0}
    told = {"app": given["app"].state_dict(), "step": 0}
    with Checkpoint(tmp_path / "a") as checkpoint:
        nesting = Nesting.from_json(checkpoint.index)
        whole = ObjectPlaceholders(select_objects(given), told, nesting, checkpoint.index["tensors"])
        assert whole.unexpected_keys == {"app": {"app.b", "app.c"}}
        assert whole.add_placeholders([whole.unexpected_keys, {}, {"app": {"app.a", "app.c"}}], 0) == [("app", "c")]
    assert told["app"].keys() == {"a", "c"} and given["app"].state.keys() == {"a"}


def test_an_object_that_was_not_named_is_not_unpickled(tmp_path):
    dsq_ckpt.save({"one": Kept(path=pathlib.Path("a"), other=2)}, tmp_path / "a")
    with pytest.raises(LoadFailed, match=r"'one\.path' is more than plain data.* an object that does not name it"):
        dsq_ckpt.load({"one": Kept(other=1)}, tmp_path / "a")
    named = {"one": {"other": 0, "path": None}}
    dsq_ckpt.load(named, tmp_path / "a")
    assert named == {"one": {"other": 2, "path": pathlib.Path("a")}}


@pytest.mark.parametrize("gradient", [False, True])
def test_moments_of_a_class_of_their_own_in_a_fresh_optimizer(tmp_path, gradient):
    """Only the optimizer makes such tensors, by a step that changes nothing."""
    model, optimizer = make_pair(EightBits, 2)
    state = {"model": model, "optimizer": optimizer}
    dsq_ckpt.save(state, tmp_path / "a")
    other, target = make_pair(EightBits)
    before = other.weight.detach().clone()
    if gradient:
        other.weight.grad = torch.ones_like(other.weight)
    with pytest.raises(LoadFailed, match="no 'step'"):
        dsq_ckpt.load({"model": other, "optimizer": target, "step": 0}, tmp_path / "a")
    assert not target.state and other.weight.equal(before)
    dsq_ckpt.load({"model": other, "optimizer": target}, tmp_path / "a")
    assert equal(target.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert (other.weight.grad is not None) is gradient


def test_a_part_of_a_tensor_that_is_not_there_is_refused(tmp_path):
    dsq_ckpt.save({"one": Kept(a=scaled(0), b=1)}, tmp_path / "a")
    with pytest.raises(LoadFailed, match=r"'one\.a\.<Scaled>\.\S+' is a part of a tensor of the class <Scaled>"):
        dsq_ckpt.load({"one": Kept(b=0)}, tmp_path / "a")


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.RMSprop])
def test_state_of_an_optimizer_of_another_class_is_reported(tmp_path, other, recwarn):
    """torch raises at its next step; options that were not saved stay here, so it goes on with the rate of AdamW."""
    model = torch.nn.Linear(80, 80)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model(torch.ones(1, 80)).sum().backward()
    optimizer.step()
    dsq_ckpt.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path / "a")
    dsq_ckpt.load({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, tmp_path / "a")
    dsq_ckpt.load({"model": model, "optimizer": torch.optim.Adam(model.parameters())}, tmp_path / "a")
    older = optimizer.state_dict()  # of a release that had an option less, with one of the user's own
    del older["param_groups"][0]["decoupled_weight_decay"]
    older["param_groups"][0]["lr_scale"] = optimizer.param_groups[0]["lr_scale"] = 0.5
    dsq_ckpt.save({"optimizer": older}, tmp_path / "b")
    dsq_ckpt.load({"optimizer": optimizer}, tmp_path / "b")
    assert not any("another optimizer" in str(warning.message) for warning in recwarn)
    with pytest.warns(UserWarning, match=r"'betas'.* and lacks .* another optimizer than (SGD|RMSprop)"):
        dsq_ckpt.load({"model": model, "optimizer": other(model.parameters(), lr=0.1)}, tmp_path / "a")


def test_a_word_that_looks_like_a_class_is_a_key_of_the_user(tmp_path):
    """Vocabularies have `<unk>`: it is no class of a tensor, as it has no settings below it."""
    given = {"words": {"<unk>": {"count": 3, "of": 1}, "the": 41}, "<pad>": 0}
    dsq_ckpt.save({"kept": Kept(**given)}, tmp_path / "a")
    target = Kept(words={"the": 0})
    dsq_ckpt.load({"kept": target}, tmp_path / "a")
    assert target.state == given
