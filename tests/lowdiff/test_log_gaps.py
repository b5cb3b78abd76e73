"""What logged gradients do not tell: the log goes on with a snapshot, and never gives a state that never was."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from dsq_ckpt.errors import ConfigError, LoadFailed
from tests.lowdiff.loops import (
    ADAM,
    TOPK,
    Case,
    Loop,
    check_recovers,
    cut,
    differences,
    normalized,
    perceptron,
    recorded,
    seeded,
    until,
)

pytestmark = pytest.mark.usefixtures("in_thread", "one_thread")


def edit_in_place(parameter):
    with torch.no_grad():
        parameter.copy_(parameter * 0.5)


def edit_data(parameter):
    parameter.data.clamp_(-0.01, 0.01)


def replace_data(parameter):
    parameter.data = parameter.data.clone() + 1


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("edit", [edit_in_place, edit_data, replace_data])
def test_parameters_are_edited(tmp_path, edit, batch):
    """Gradients do not tell of it, so the log goes on with a snapshot, and never gives a state that never was."""
    loop, table = Loop(ADAM), {}

    def train(count):
        for _ in range(count):
            loop.step(log.steps_done)
            log.step()
            log._require_client().wait("saved", 240)
            table[log.steps_done] = loop.state()

    with loop.log(tmp_path, batch=batch, compressor="none", keep=2) as log:
        train(3)
        edit(loop.model[0].weight)
        with pytest.warns(UserWarning, match="changed by something other than the optimizer"):
            train(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(2)
            edit(loop.model[0].weight)
            train(5)
        assert log.logging
    check_recovers(ADAM, tmp_path, table[11], 11)
    # From the first snapshot the log leads to the last step before the edit.
    for path in sorted(tmp_path.glob("step-*"))[1:]:
        shutil.rmtree(path)
    loop = Loop(ADAM, seed=1)
    recovered = loop.recover(tmp_path)
    assert not differences(loop.state(), table[recovered.step])
    assert recovered.ended is not None


@pytest.mark.parametrize("make", [
    lambda seed: perceptron(seed).bfloat16(), lambda seed: perceptron(seed).double(),
    lambda seed: seeded(seed, normalized),
], ids=["bfloat16", "float64", "channels_last"])
def test_data_of_any_kind_is_edited(tmp_path, make):
    """Through `.data`, which torch does not count."""
    case = Case(lambda m: SGD(m.parameters(), 0.1), model=make)
    loop = Loop(case)
    with loop.log(tmp_path, compressor="none") as log:
        for number in range(6):
            loop.step(number)
            if number == 2:
                for parameter in loop.model.parameters():
                    parameter.data.clamp_(-0.02, 0.02)
                with pytest.warns(UserWarning, match="changed by something other than the optimizer"):
                    log.step()
            else:
                log.step()
            log._require_client().wait("saved", 240)
    check_recovers(case, tmp_path, loop.state(), 6)


def begins_anew(log, loop):
    """The log stops, goes on with a snapshot, and logs some steps after it."""
    until(log, loop, lambda: not log.logging)
    until(log, loop, lambda: log.logging)
    for _ in range(3):
        loop.step(log.steps_done)
        log.step()
    assert log.logging


def test_the_model_is_cast(tmp_path):
    """The log begins anew with what there is then."""
    case = Case(lambda m: SGD(m.parameters(), 0.1))
    loop = Loop(case)
    with loop.log(tmp_path, compressor="none") as log:
        for number in range(3):
            loop.step(number)
            log.step()
        loop.model.double()
        begins_anew(log, loop)
    other = Loop(case, seed=1)
    other.model.double()
    recovery = other.recover(tmp_path)
    assert recovery.step == log.steps_done and recovery.replayed > 0 and recovery.exact
    assert differences(other.state(), loop.state()) == []
    with pytest.raises(LoadFailed, match="float64"):
        Loop(case, seed=1).recover(tmp_path)


def clipped_weights(log, loop):
    """As for a Wasserstein GAN: after each step weights are clamped."""
    loop.step(log.steps_done)
    for parameter in loop.model.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    log.step()


def clipped_without_a_step(log, loop):
    if log.steps_done % 2:
        loop.step(log.steps_done)
    else:
        edit_data(loop.model[0].weight)
    log.step()


@pytest.mark.parametrize("iteration", [clipped_weights, clipped_without_a_step])
def test_parameters_are_edited_in_every_iteration(tmp_path, iteration):
    """Whenever it is killed, what comes back is a state at the end of an iteration."""
    loop = Loop(ADAM)
    table = [loop.state()]
    with warnings.catch_warnings(), loop.log(tmp_path, compressor="none") as log:
        warnings.simplefilter("ignore")
        for number in range(8):
            iteration(log, loop)
            table.append(loop.state())
            log._require_client().wait("saved", 240)
            run_copy = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{number}"))
            for lock in run_copy.glob("log/*.lock"):
                lock.unlink()
            again = Loop(ADAM, seed=1)
            recovered = again.recover(run_copy)
            assert differences(again.state(), table[recovered.step]) == [], (number, recovered.step)


def test_a_gap_within_a_batch(tmp_path):
    """Steps around one that could not be logged do not share a segment."""
    loop, table = Loop(ADAM), {}
    with warnings.catch_warnings(), loop.log(tmp_path, batch=100, keep=2, compressor="none") as log:
        warnings.simplefilter("ignore")
        for number in range(12):
            if number == 4:
                edit_in_place(loop.model[0].weight)
            loop.step(number)
            log.step()
            log._require_client().wait("saved", 240)
            table[number + 1] = loop.state()
    check_recovers(ADAM, tmp_path, table[12], 12)
    newest = sorted(tmp_path.glob("step-*"))[-1]
    shutil.rmtree(newest)
    loop = Loop(ADAM, seed=1)
    recovered = loop.recover(tmp_path)
    assert recovered.step == 4 and not differences(loop.state(), table[4])


@pytest.mark.parametrize("change", [0.5, -1.0])
def test_gradients_change_where_nothing_was_sent(tmp_path, change):
    """Noise on a gradient that top-k had left zero, or other signs on its zeros: from then on it is logged whole."""
    loop = Loop(TOPK)

    def changed(parameters):
        for parameter in parameters:
            if change < 0:
                parameter.grad.mul_(change)
            else:
                parameter.grad.add_(change)

    with pytest.warns(UserWarning, match="from now on gradients are logged whole"), loop.log(tmp_path) as log:
        for number in range(3):
            loop.step(number)
            log.step()
        loop.case = Case(TOPK.optimizer, clip=changed)
        begins_anew(log, loop)
        truth, steps = loop.state(), log.steps_done
    check_recovers(TOPK, tmp_path, truth, steps)


def test_another_group_is_added(tmp_path):
    """The log starts anew with what the optimizer has now."""
    case = Case(lambda m: Adam(m[0].parameters(), 0.01))
    loop = Loop(case)
    with loop.log(tmp_path, compressor="none") as log:
        for number in range(3):
            loop.step(number)
            log.step()
        loop.optimizer.add_param_group({"params": list(loop.model[3].parameters()), "lr": 0.1})
        until(log, loop, lambda: not log.logging)
        until(log, loop, lambda: log.logging)
        loop.step(log.steps_done)
        log.step()
        truth, steps = loop.state(), log.steps_done

    def both(model):
        optimizer = case.optimizer(model)
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 1.0})
        return optimizer

    with pytest.raises(LoadFailed, match=r"'3\.weight' was logged, and the optimizer has no such parameter"):
        Loop(case, seed=1).recover(tmp_path)
    check_recovers(Case(both), tmp_path, truth, steps)


def test_a_scaler_that_skips_within_the_optimizer(tmp_path):
    """A fused optimizer is told of an overflow by the scaler, and does nothing in its step; a log cannot see that."""
    loop = Loop(Case(lambda m: Adam(m.parameters(), 0.01, fused=True), scaler=True))
    with loop.log(tmp_path), pytest.raises(ConfigError, match="make it with fused=False"):
        loop.step(0)


def test_overflow_is_not_held_back(tmp_path):
    """Infinite gradients of a step that the scaler skips do not stay in what error feedback adds to later ones."""
    case = Case(ADAM.optimizer, scaler=True, log={"compressor": "topk:0.05"})
    loop = Loop(case)
    with loop.log(tmp_path) as log:
        for number in range(12):
            loop.step(number)
            log.step()
        truth = loop.state()
        steps = int(truth["optimizer"]["state"][0]["step"])
        assert steps >= 8, f"{12 - steps} steps of 12 were skipped, 3 overflowed"
    check_recovers(case, tmp_path, truth, 12)


def test_buffers_that_change_their_sign(tmp_path):
    class Flips(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 12)
            self.register_buffer("zero", torch.zeros(3))

        def forward(self, x):
            self.zero.neg_()
            return self.linear(x)

    case = Case(ADAM.optimizer, lambda seed: seeded(seed, Flips))
    table = recorded(case, tmp_path, 3, compressor="none")
    check_recovers(case, tmp_path, table[3], 3)
    cut(tmp_path, 2)
    check_recovers(case, tmp_path, table[2], 2)


def test_buffers_that_are_lazy_conjugates(tmp_path):
    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 12)
            self.register_buffer("wave", torch.complex(torch.arange(6.0), torch.ones(6)))
            self.register_buffer("back", self.wave.conj())

        def forward(self, x):
            return self.linear(x)

    case = Case(ADAM.optimizer, lambda seed: seeded(seed, Waves))
    table = recorded(case, tmp_path, 3, compressor="none")
    assert torch.equal(table[3]["model"]["back"], table[3]["model"]["wave"].conj())
    check_recovers(case, tmp_path, table[3], 3)
