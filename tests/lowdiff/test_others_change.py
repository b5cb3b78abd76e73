"""What others than the optimizer change is never recovered wrongly: the log goes on with a snapshot."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff import GradientLog, recover
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.capture import copy_buffers
from dsq_ckpt.lowdiff.worker_client import ArenaLayout

pytestmark = [pytest.mark.usefixtures("in_thread", "one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]
STEPS = 12


class Taught(nn.Module):
    """A student, and a teacher that follows it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(40, 40), nn.Linear(40, 40)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        return self.student(x) - self.teacher(x)

    @torch.no_grad()
    def follow(self):
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.lerp_(other, 0.1)


def adam(model):
    return Adam(model.student.parameters(), 0.01)


def state(model, optimizer):
    moments = [value for own in optimizer.state_dict()["state"].values() for value in own.values()]
    return [tensor.clone() for tensor in (*model.state_dict().values(), *moments)]


def backward(model, optimizer, number):
    optimizer.zero_grad()
    model(torch.randn(8, 40, generator=torch.Generator().manual_seed(number))).square().mean().backward()


def check(run, table):
    """What comes back is what training had after that step."""
    model = Taught()
    optimizer = adam(model)
    recovery = recover(run, model, optimizer)
    assert recovery is not None and recovery.exact
    assert all(
        torch.equal(a, b) for a, b in zip(state(model, optimizer), table[recovery.step], strict=True)
    ), recovery.step
    return recovery


def train(run, *, each=lambda model, number: None, before=lambda optimizer: None, after=lambda optimizer: None):
    model = Taught()
    optimizer = adam(model)
    before(optimizer)
    table = [state(model, optimizer)]
    with GradientLog(run, model, optimizer, compressor="none", batch=1) as log:
        after(optimizer)
        for number in range(STEPS):
            backward(model, optimizer, number)
            optimizer.step()
            each(model, number)
            log.step()
            table.append(state(model, optimizer))
    return table


def test_nothing_is_lost_where_nothing_is_changed(tmp_path):
    assert check(tmp_path, train(tmp_path)).step == STEPS


@pytest.mark.parametrize("every", [1, 5])
def test_a_teacher_follows(tmp_path, every):
    table = train(tmp_path, each=lambda model, number: model.follow() if number % every == 0 else None)
    assert check(tmp_path, table).step == STEPS


def test_a_hook_after_the_step_clamps(tmp_path):
    def clamp(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.05, 0.05)

    check(tmp_path, train(tmp_path, before=lambda optimizer: optimizer.register_step_post_hook(clamp)))


def test_a_hook_before_the_step_clips(tmp_path):
    """Registered after that of the log, it is seen all the same."""
    def halve(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    table = train(tmp_path, after=lambda optimizer: optimizer.register_step_pre_hook(halve))
    assert check(tmp_path, table).step == STEPS


def test_the_optimizer_is_loaded(tmp_path):
    model = Taught()
    optimizer = adam(model)
    optimizer_state, table = optimizer.state_dict(), [state(model, optimizer)]
    with GradientLog(tmp_path, model, optimizer, compressor="none", batch=1) as log:
        for number in range(STEPS):
            if number == 6:
                optimizer.load_state_dict(optimizer_state)
            backward(model, optimizer, number)
            optimizer.step()
            log.step()
            table.append(state(model, optimizer))
    assert check(tmp_path, table).step >= 6


def test_moments_are_edited(tmp_path):
    """As by a user who clears momentum after a spike of the loss; replay went on with the moments as they were."""
    def clear(optimizer):
        for own in optimizer.state.values():
            own["exp_avg"].zero_()

    model = Taught()
    optimizer = adam(model)
    table = [state(model, optimizer)]
    with GradientLog(tmp_path, model, optimizer, compressor="none", batch=1) as log:
        for number in range(STEPS):
            backward(model, optimizer, number)
            optimizer.step()
            log.step()
            table.append(state(model, optimizer))
            if number == 6:
                clear(optimizer)
    assert check(tmp_path, table).step == STEPS


class Counting(torch.optim.Optimizer):
    """An optimizer that counts its steps beside the states of parameters, which a log cannot see before the first."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def test_state_that_is_no_dict_does_not_end_training(tmp_path):
    model = Taught()
    optimizer = Counting(model.student.parameters())
    with GradientLog(tmp_path, model, optimizer, compressor="none", batch=1) as log:
        for number in range(3):
            backward(model, optimizer, number)
            optimizer.step()
            log.step()
    recovered = Taught()
    assert recover(tmp_path, recovered, Counting(recovered.student.parameters())).step == 3
    assert recovered.student.weight.equal(model.student.weight)


def test_a_gradient_that_is_changed_in_the_last_step_is_reported(tmp_path):
    """After it was compressed: the checkpointing process finds it, and the step is not in the log."""
    model = Taught()
    optimizer = adam(model)
    log = GradientLog(tmp_path, model, optimizer, compressor="topk:0.1")
    backward(model, optimizer, 0)
    model.student.weight.grad.add_(1.0)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"'student.weight' is not zero where its compression had left it so"):
        log.step()
        log.close()


def test_state_of_no_parameter_is_refused(tmp_path):
    model = Taught()
    optimizer = adam(model)
    optimizer.state["global"]["seen"] = 3
    with pytest.raises(ConfigError, match="'global', which belongs to no parameter"):
        GradientLog(tmp_path, model, optimizer)


@pytest.mark.parametrize(("compressor", "left"), [("kmeans:4", False), ("topk:0.1", True)])
def test_sent_elements_are_not_sent_again(tmp_path, compressor, left):
    """What error feedback holds back is that of the snapshot, where nothing was sent since."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    optimizer = SGD(model.parameters(), 0.1)
    with GradientLog(tmp_path, model, optimizer, compressor=compressor, snapshot_every=4, batch=1) as log:
        for number in range(6):
            backward(model, optimizer, number)
            optimizer.step()
            log.step()
            while log._client.saving:
                log._client.poll(0.01)
    other = nn.Linear(40, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recovery = recover(tmp_path, other, SGD(other.parameters(), 0.1))
    assert recovery.replayed == 2 and any(tensor.any() for tensor in recovery.residual.values())
    assert any(bool(tensor.any()) for tensor in recovery.residuals().values()) == left
    for name, places in recovery.sent.items():
        if places is not None:
            assert not recovery.residuals()[name].view(-1)[places].any()


class _Slots:
    """A slot with gradients in it, and room for a small buffer."""

    def __init__(self):
        self.memory = Arena.create(256)
        self.memory.tensor.fill_(7)

    def arena(self, slot):
        return self.memory

    def ensure_arena(self, slot, size):
        assert size <= self.memory.size
        return self.memory, False


def test_buffers_that_grow_do_not_cost_gradients():
    slots, layout = _Slots(), ArenaLayout()
    layout.add(128)
    at = layout.size
    assert copy_buffers([("small", torch.zeros(4))], slots, 0, at) is not None
    assert copy_buffers([("large", torch.zeros(400))], slots, 0, at) is None
    assert bool((slots.memory.tensor[:128] == 7).all())
