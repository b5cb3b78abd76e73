"""Optimizers whose steps cannot be replayed from gradients, or whose state does not fit into a log."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor

import dsq_ckpt.lowdiff
from dsq_ckpt.lowdiff import GradientLog, train_state
from tests.helpers.odd_optimizers import CountingAdamW, ForwardingAdamW, HiddenStateAdamW, HookedSGD, SlowWeights
from tests.lowdiff.loops import Case, Loop, differences
from tests.lowdiff.workers.replica import known_holders, replica_of

pytestmark = pytest.mark.usefixtures("one_thread")
holders = pytest.fixture(known_holders)


@pytest.mark.parametrize("kind", [HiddenStateAdamW, SlowWeights, ForwardingAdamW])
def test_optimizers_around_others_are_refused(tmp_path, kind):
    """They were recovered without the state of the inner one, or not at all."""
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters())
    with pytest.raises(dsq_ckpt.ConfigError, match=rf"{kind.__name__} cannot be logged: it is .* around AdamW.*pass"):
        dsq_ckpt.lowdiff.GradientLog(tmp_path / "run", model, optimizer)
    assert not list(tmp_path.glob("run/*"))
    assert isinstance(optimizer.optimizer, torch.optim.AdamW) and not optimizer.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(("kind", "key"), [(CountingAdamW, "own"), (HookedSGD, "hooked")])
def test_state_beside_that_of_parameters_is_refused(tmp_path, kind, key):
    """Such state was lost, and `exact` was True."""
    model = nn.Linear(4, 4)
    with pytest.raises(dsq_ckpt.ConfigError, match=rf"{kind.__name__} cannot be logged: its state_dict.. has '{key}'"):
        GradientLog(tmp_path / "run", model, kind(model.parameters()))


def test_parameters_without_memory_of_their_own_are_refused(tmp_path):
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(dsq_ckpt.ConfigError, match="'weight' is a TwoTensor, which has no memory of its own"):
        GradientLog(tmp_path, model, optimizer)


def test_steps_do_not_ask_for_the_state_dict():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_state_dict_post_hook(lambda *_: pytest.fail("the state dict was asked for"))
    train_state.check_state_keys(optimizer)
    optimizer.state["k"] = torch.zeros(())
    with pytest.raises(dsq_ckpt.ConfigError, match="its state has 'k', which belongs to no parameter"):
        train_state.check_state_keys(optimizer)


class Failing(SGD):
    def state_dict(self):
        raise RuntimeError("not now")


def test_a_state_dict_that_fails(tmp_path):
    model = nn.Linear(4, 4)
    with pytest.raises(dsq_ckpt.ConfigError, match=r"state_dict.. fails .RuntimeError: not now."):
        GradientLog(tmp_path / "run", model, Failing(model.parameters()))


class Descent(torch.optim.Optimizer):
    """Gradient descent that notes something in each step."""

    def __init__(self, parameters, lr=0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.note(self.param_groups[0], self.param_groups[0]["params"][0])
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)

    def note(self, group, parameter):
        raise NotImplementedError


class Counted(Descent):
    """One with a count of steps beside the states of parameters, as MADGRAD; it is there from the first step on."""

    def note(self, group, parameter):
        count = self.state["k"] = self.state.get("k", torch.zeros(())) + 1
        group["lr"] = 0.1 / float(count)


class Listed(Descent):
    """One that keeps large tensors in a list, as SOAP of heavyball."""

    def note(self, group, parameter):
        self.state[parameter]["factors"] = [torch.zeros(600, 600)]


class Seen(Descent):
    def note(self, group, parameter):
        self.state[parameter]["seen"] = {1, 2}


class Described(Descent):
    """One that keeps an object with its hyperparameters from the fourth step on."""

    def note(self, group, parameter):
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] > 3:
            group["object"] = object()


LATE = {
    Counted: r"Counted cannot be logged: its state has 'k', which belongs to no parameter, and would be lost",
    Listed: r"'factors' of the optimizer's state of '0.weight'\[0\] is a tensor of 1440000 bytes; .* may have 1048576",
    Seen: r"'seen' of the optimizer's state of '0.weight' is a set, which cannot be written",
    Described: r"'object' of the optimizer's group 0 is a object, which cannot be written",
}


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.usefixtures("in_thread")
def test_state_that_comes_while_training_runs_ends_the_log(tmp_path, kind):
    """Training goes on with one warning. The error ended it, or the state was lost where `exact` was True."""
    case = Case(lambda model: kind(model.parameters(), 0.1), log={"compressor": "none", "snapshot_every": 4})
    loop, alone, table = Loop(case), Loop(case), [Loop(case).state()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        log = loop.log(tmp_path)
        for number in range(8):
            loop.step(number)
            log.step()
            table.append(loop.state())
            alone.step(number)
        assert not log.logging
        log.close()
    message, at_end = [str(warning.message) for warning in caught if "scalar" not in str(warning.message)]
    assert re.search(f"{LATE[kind]}.*Training goes on", message)
    assert "are not in the log, which has ended" in at_end or "are not all in the log" in at_end
    assert differences(alone.state()["model"], table[8]["model"]) == []
    again = Loop(case, seed=5)
    recovered = again.recover(tmp_path)
    assert recovered.snapshot == 0 and recovered.step in (3, 4) and recovered.exact
    assert differences(again.state(), table[recovered.step]) == []


@pytest.mark.usefixtures("in_thread")
def test_a_log_that_has_lost_state_is_not_exact(tmp_path, monkeypatch):
    """Earlier versions wrote snapshots without state that belongs to no parameter."""
    case = Case(lambda model: Counted(model.parameters(), 0.1), log={"compressor": "none", "snapshot_every": 3})
    loop = Loop(case)
    with monkeypatch.context() as patch:
        patch.setattr(train_state, "check_optimizer_state", lambda optimizer: None)
        with loop.log(tmp_path) as log:
            for number in range(5):
                loop.step(number)
                log.step()
                log._require_client().wait("saved", 240)
    again = Loop(case, seed=5)
    with pytest.warns(UserWarning, match=r"not exactly that of step 5: Counted cannot be logged: its state has 'k'"):
        recovered = again.recover(tmp_path)
    assert (recovered.snapshot, recovered.step) == (3, 5) and not recovered.exact


@pytest.mark.parametrize("kind", [Counted, Listed, Seen])
def test_state_that_comes_while_training_runs_ends_a_replica(tmp_path, holders, kind):
    case = Case(lambda model: kind(model.parameters(), 0.1))
    loop = Loop(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        replica = replica_of(loop, tmp_path)
        replica._require_client().wait("saved", 60)
        for number in range(4):
            loop.step(number)
            replica.step()
        assert not replica.logging
        replica.close()
    message, at_end = [str(warning.message) for warning in caught if "scalar" not in str(warning.message)]
    assert re.search(f"{LATE[kind]}.*Training goes on", message)
    assert "not all in the log, which has ended" in at_end
    again = Loop(case, seed=5)
    recovered = again.recover(tmp_path)
    assert recovered.exact and recovered.step == 0
    assert differences(again.state(), Loop(case).state()) == []
