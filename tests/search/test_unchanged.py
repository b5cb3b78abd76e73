"""An `evaluate` that changes what is to be saved is found out, named, and costs the model nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.core.checksums import _weighted_sum, checksum
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.storage.manifest import is_complete
from tests.helpers.peak_memory import PeakMemory
from tests.helpers.training import Net, batch, loss_of, train


def in_place(model, optimizer):
    with torch.no_grad():
        model.norm.weight.clamp_(-0.5, 0.5)


def through_data(model, optimizer):
    model.hidden.weight.data[3, 5] += 1e-6


def replaced(model, optimizer):
    model.head.weight.data = model.head.weight.data.clone()


def another(model, optimizer):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def another_layer(model, optimizer):
    model.hidden = nn.Linear(model.hidden.in_features, model.hidden.out_features)


def one_more(model, optimizer):
    model.head.extra = nn.Parameter(torch.zeros(3))


def removed(model, optimizer):
    model.hidden.bias = None


def trained(model, optimizer):
    train(model, optimizer, 90, 91)


def gradients(model, optimizer):
    model.embed.weight.grad.mul_(0.5)


def moments(model, optimizer):
    optimizer.state[model.hidden.weight]["exp_avg"].mul_(0.9)


def steps(model, optimizer):
    optimizer.state[model.head.bias]["step"] += 1


def cleared(model, optimizer):
    optimizer.state.clear()


def faster(model, optimizer):
    optimizer.param_groups[0]["lr"] *= 2


def more_state(model, optimizer):
    optimizer.state[model.head.bias]["new"] = torch.zeros(3)


@pytest.mark.parametrize("change, name", [
    (in_place, "norm.weight"), (through_data, "hidden.weight"), (replaced, "head.weight"),
    (another, "head.weight"), (another_layer, "hidden.weight"), (one_more, "head.extra"), (removed, "hidden.bias"),
    (trained, "embed.weight"),
    (gradients, "embed.weight.grad"), (moments, "optimizer.state.hidden.weight.exp_avg"),
    (steps, "optimizer.state.head.bias.step"),
])
@pytest.mark.parametrize("at", [1, 3])
def test_what_evaluate_changes_is_named(tmp_path, change, name, at):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 20)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    calls = []

    def evaluate():
        calls.append(1)
        if len(calls) == at:
            change(model, optimizer)
        return loss_of(model)

    parameters = {name: (parameter, parameter.data_ptr(), parameter.detach().clone()) for name, parameter in
                  model.named_parameters()}
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate)
    with pytest.raises(SaveFailed, match=f"`evaluate`( or `check`)? changed .*'{name}'"):
        compressor.save(tmp_path / "a")
    assert not is_complete(tmp_path / "a")
    assert [name for name, _ in model.named_parameters()] == list(parameters)
    for name, parameter in model.named_parameters():
        own, address, values = parameters[name]
        assert parameter is own and parameter.data_ptr() == address and torch.equal(parameter, values), name
    compressor.save(tmp_path / "a")  # it did so once


@pytest.mark.parametrize("change", [cleared, faster, more_state])
@pytest.mark.parametrize("function", ["evaluate", "check"])
def test_an_optimizer_that_is_changed_fails_the_save(tmp_path, change, function):
    """What it consists of: changed values are found like those of the model."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 20)

    def changes():
        change(model, optimizer)
        return loss_of(model)

    functions = {"evaluate": lambda: loss_of(model), function: changes}
    compressor = dsq_ckpt.Compressor(model, optimizer, **functions)
    with pytest.raises(SaveFailed, match=f"`{function}` changed the optimizer"):
        compressor.save(tmp_path / "a")
    assert not is_complete(tmp_path / "a")


def test_what_evaluate_may_do_leaves_no_trace(tmp_path):
    """Caches, running statistics, flags, gradients that were not there, and random numbers."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 20)
    optimizer.zero_grad()
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    model.register_buffer("seen", torch.zeros(3))
    kept = {"seen": model.seen, "mean": model.norm.running_mean.clone()}

    def evaluate():
        loss_of(model)
        model.train()
        nn.functional.cross_entropy(model(batch(7)[0]), batch(7)[1]).backward()
        model.requires_grad_(False)
        model.cache, model.seen = torch.zeros(len(model.cache) + 1), model.seen + 1
        with torch.no_grad():  # weights that are swapped for others and put back
            own = model.head.weight.clone()
            model.head.weight.mul_(0.5)
            model.head.weight.copy_(own)
        random.random(), np.random.rand(), torch.rand(1)
        return loss_of(model)

    states = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate).save(tmp_path / "a")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model.seen is kept["seen"] and not model.seen.any() and len(model.cache) > 1
    assert torch.equal(model.norm.running_mean, kept["mean"])
    assert (random.getstate(), np.random.get_state()[2]) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("of", [checksum, lambda tensor: _weighted_sum(tensor.contiguous().view(-1))])
def test_checksums_see_every_change(dtype, of):
    """Also of signs, of order and of the last bit."""
    values = torch.arange(-60, 60).to(dtype).view(10, 12)
    other = values.clone()
    assert of(values) == of(other) == of(values.t().contiguous().t())
    other.view(-1)[7] = 0
    assert of(values) != of(other)
    if dtype != torch.bool:
        assert len({of(values), of(-values), of(values.flip(0)), of(values.flip(1))}) == 4


def test_checksums_on_a_device_take_little_memory():
    values = torch.zeros(1 << 23)
    with PeakMemory() as memory:
        _weighted_sum(values)
    assert memory.peak <= 48 << 20


@pytest.mark.parametrize("expanded", [True, False])
def test_buffers_that_share_memory_are_no_change(tmp_path, expanded):
    """With themselves, as `expand` makes them, or with a parameter: a save failed, or took it for changed."""
    model, data = nn.Linear(80, 80), torch.randn(32, 80)
    model.register_buffer("mask", torch.ones(80, 1).expand(80, 80) if expanded else model.weight.detach())
    model.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)

    def loss():
        model.sparse.mul_(2)
        return float(((model(data) * model.mask.mean()).detach() - data).square().mean())

    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = dsq_ckpt.Compressor(model, evaluate=loss).save(tmp_path / "a")
    assert result.quality["evaluations"] > 2
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert model.sparse.to_dense().equal(torch.eye(3))
