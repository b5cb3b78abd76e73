"""A load removes state of parameters that was not saved, as `load_state_dict` of torch does, and training goes on."""

import copy
import warnings

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.api.unsaved_state import remove_unsaved_state
from dsq_ckpt.core.nesting import Nesting
from tests.helpers.states import find_differences

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Late(torch.optim.Optimizer):
    """Has momentum, and a list of gradients, from its fourth step on."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state.setdefault("window", []).append(parameter.grad.mean())
            if state["step"] > 3:
                state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            parameter.sub_(state.get("exp_avg", parameter.grad), alpha=1e-3)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            parameter.sub_(self.state[parameter]["exp_avg"].sign(), alpha=1e-4)


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **options)


def make_pair(kind, steps, **options):
    torch.manual_seed(steps)
    model = nn.Linear(80, 80)
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        return loss

    for step in range(steps):
        inputs, targets = torch.randn(2, 16, 80, generator=torch.Generator().manual_seed(step))
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def restore(path, compressor, source, *target):
    """Save and load by a `Compressor`, or as objects."""
    if compressor:
        dsq_ckpt.Compressor(*source, config="exact").save(path)
        return dsq_ckpt.Compressor(*target).load(path)
    dsq_ckpt.save(dict(zip(("model", "optimizer"), source, strict=True)), path, config="exact")
    return dsq_ckpt.load(dict(zip(("model", "optimizer"), target, strict=True)), path)


CASES = {
    "amsgrad": (adamw, {}, {"amsgrad": True}, 3, "max_exp_avg_sq"),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}, 3, "grad_avg"),
    "late": (Late, {}, {}, 3, "exp_avg"), "before the first step": (adamw, {}, {}, 0, None),
    "lbfgs": (torch.optim.LBFGS, {}, {}, 1, None),
}


@pytest.mark.parametrize(("case", "compressor"), [
    (case, compressor) for case in CASES for compressor in (True, False)
    if not (compressor and case == "lbfgs")  # which a Compressor refuses
])
def test_state_that_was_not_saved_is_removed(tmp_path, case, compressor):
    """Loads failed, and named the state that a run has beyond the checkpoint that it is set back to."""
    kind, saved_options, own_options, steps, unsaved = CASES[case]
    model, optimizer = make_pair(kind, steps, **saved_options)
    expected, reference = make_pair(kind, 5, **own_options)
    expected.load_state_dict(model.state_dict())
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other, target = make_pair(kind, 5, **own_options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        restore(tmp_path / "a", compressor, (model, optimizer), other, target)
    warned = [str(warning.message) for warning in caught if "is not in the checkpoint" in str(warning.message)]
    assert len(warned) == (unsaved is not None)
    names = ["bias", "weight"] if compressor else ["0", "1"]
    assert all(f"'optimizer.state.{name}.{unsaved}'" in text for text in warned for name in names)
    assert not find_differences(target.state_dict(), reference.state_dict())
    for pair in ((expected, reference), (other, target)):
        train(*pair, 4)
    assert not find_differences(other.state_dict(), expected.state_dict())


@pytest.mark.parametrize("compressor", [True, False])
def test_a_new_optimizer_with_more_state_takes_the_saved_options(tmp_path, compressor):
    source, target = make_pair(adamw, 3), make_pair(adamw, 0, amsgrad=True)
    restore(tmp_path / "a", compressor, source, *target)
    assert not find_differences(target[1].state_dict(), source[1].state_dict())
    train(*target, 2)


def test_a_parameter_without_saved_state_has_none(tmp_path):
    """As objects; a `Compressor` did so before."""
    model = nn.ModuleDict({name: nn.Linear(80, 80) for name in "ab"})
    optimizer = adamw(model.parameters())
    train(model["a"], optimizer, 2)
    dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    train(model["b"], optimizer, 2)
    dsq_ckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "a")
    assert optimizer.state.keys() == set(model["a"].parameters())


@pytest.mark.parametrize("compressor", [True, False])
@pytest.mark.parametrize(("saved", "own", "missing"), [
    (Lion, adamw, "step"), (torch.optim.Adam, torch.optim.NAdam, "mu_product"),
    (torch.optim.Adagrad, adamw, "exp_avg"), (torch.optim.Adam, torch.optim.Adamax, "exp_inf"),
], ids=["lion", "nadam", "adagrad", "adamax"])
@pytest.mark.filterwarnings("ignore:what was saved of 'optimizer'")
def test_state_of_another_class_is_refused(tmp_path, compressor, saved, own, missing):
    """Some of its state has the same names; the next step would fail without the rest."""
    other, target = make_pair(own, 2)
    before = copy.deepcopy(target.state_dict())
    number = "[a-z]+" if compressor else "0"
    with pytest.raises(dsq_ckpt.LoadFailed, match=rf"has no 'optimizer\.state\.{number}\.{missing}'"):
        restore(tmp_path / "a", compressor, make_pair(saved, 2), other, target)
    assert not find_differences(target.state_dict(), before)


def test_saved_state_of_which_nothing_fits_is_kept_for_the_error():
    """So are names of parameters where the optimizer has numbers, and an optimizer that was not saved."""
    def remaining(*paths):
        state = {0: {"step": 1, "sums": {"a": 2, "b": [3, 4]}}}
        named = remove_unsaved_state("o", state, Nesting({".".join(map(str, path)): path for path in paths}))
        return state, named

    everything = remaining()[0]
    for paths in ([], [("p", "state", "0", "step")], [("o", "state", "0", "other")], [("o", "state", "w", "step")]):
        assert remaining(*paths) == (everything, [])
    assert remaining(("o", "state", "0", "step")) == ({0: {"step": 1}}, ["o.state.0.sums"])
    assert remaining(("o", "state", "0", "sums", "b", 0)) == ({0: {"sums": {"b": [3]}}}, ["o.state.0.step"])
    assert remaining(("o", "state", "0", "sums")) == ({0: {"sums": None}}, ["o.state.0.step"])
    assert remaining(("o", "state", "1", "step")) == ({}, [])
