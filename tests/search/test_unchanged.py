"""An `evaluate` that changes what is to be saved is found out, named, and costs the model nothing."""

from __future__ import annotations

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsq_ckpt
from dsq_ckpt.core.checksums import _weighted_sum, checksum
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.storage.manifest import is_complete
from tests.helpers.peak_memory import PeakMemory
from tests.helpers.training import Net, compute_loss, make_batch, train


class Packed(torch.Tensor):
    """A tensor that consists of codes and a factor: a copy packs decoded numbers anew, as NF4's do."""

    @staticmethod
    def __new__(cls, codes, factor):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, factor):
        self.codes, self.factor = codes, factor

    def __tensor_flatten__(self):
        return ["codes", "factor"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["factor"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].factor.detach())
        if func is torch.ops.aten.clone.default:
            return cls(args[0].codes.clone(), args[0].factor * 1.01)
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1].codes), args[0].factor.copy_(args[1].factor)
            return args[0]
        raise NotImplementedError(func)


class Adapted(nn.Module):
    """A layer on packed weights, which are frozen; so is a packed table beside them."""

    def __init__(self, inner):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(-9, 9, (inner, inner), generator=generator, dtype=torch.int8)
        self.weight = nn.Parameter(Packed(codes, torch.tensor(0.01)), requires_grad=False)
        self.register_buffer("table", Packed(codes.clone(), torch.tensor(0.1)))
        self.adapter = nn.Parameter(torch.randn(inner, inner, generator=generator) * 0.01)

    def forward(self, x):
        weight, table = (part.codes * part.factor for part in (self.weight, self.table))
        return x + x @ (weight + self.adapter) + x @ table


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


CHANGES = [(in_place, "norm.weight"), (through_data, "hidden.weight"), (replaced, "head.weight"),
           (another, "head.weight"), (another_layer, "hidden.weight"), (one_more, "head.extra"),
           (removed, "hidden.bias"), (trained, "embed.weight"), (gradients, "embed.weight.grad"),
           (moments, "optimizer.state.hidden.weight.exp_avg"), (steps, "optimizer.state.head.bias.step")]

@pytest.mark.parametrize("change, name, at", [
    pytest.param(*change, at, marks=pytest.mark.campaign if at == 1 and number % 4 else ())  # calls are checked alike
    for at in (3, 1) for number, change in enumerate(CHANGES)])
def test_state_that_evaluate_changes_is_named(tmp_path, change, name, at):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 20)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    calls = itertools.count(1)

    def evaluate():
        if next(calls) == at:
            change(model, optimizer)
        return compute_loss(model)

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
        return compute_loss(model)

    functions = {"evaluate": lambda: compute_loss(model), function: changes}
    compressor = dsq_ckpt.Compressor(model, optimizer, **functions)
    with pytest.raises(SaveFailed, match=f"`{function}` changed the optimizer"):
        compressor.save(tmp_path / "a")
    assert not is_complete(tmp_path / "a")


@pytest.mark.parametrize("change, name", [
    (in_place, "'norm.weight'"), (one_more, "'head.extra'"), (gradients, "'embed.weight.grad'"),
    (moments, "'optimizer.state.hidden.weight.exp_avg'"), (faster, "the optimizer"), (cleared, "the optimizer"),
])
@pytest.mark.parametrize("function", ["evaluate", "check"])
def test_state_that_evaluate_changes_before_it_raises_is_named(tmp_path, change, name, function):
    """The fallback was stored, and training went on with what was changed."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 20)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)

    def changes():
        change(model, optimizer)
        raise RuntimeError("out of memory")

    functions = {"evaluate": lambda: compute_loss(model), function: changes}
    compressor = dsq_ckpt.Compressor(model, optimizer, **functions)
    raised = r"raised RuntimeError: out of memory \(.*\), and changed"
    with pytest.raises(SaveFailed, match=rf"`{function}`( or `check`)? ({raised}|changed) .*{name}") as failed:
        compressor.save(tmp_path / "a")
    assert not is_complete(tmp_path / "a")
    if change is not moments:
        causes, error = [], failed.value
        while error is not None:
            causes.append(str(error))
            error = error.__cause__
        assert "out of memory" in causes


@pytest.mark.parametrize("at", [1, 3])
def test_a_forward_pass_that_fails_leaves_a_sharded_model_usable(tmp_path, at):
    """The root of FSDP2 kept gathered parameters, which were taken for changed, and the next step failed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model, data, calls = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), torch.randn(32, 64), []
        for module in (model[1], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())

        def loss():
            return (model(data) - data).square().mean()

        def evaluate():
            calls.append(1)
            if len(calls) != at:
                return loss().item()
            with model[1].register_forward_pre_hook(lambda *_: 1 / 0):
                return loss().item()

        loss().backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate).save(tmp_path / "a")
        assert is_complete(tmp_path / "a")
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()


def test_permitted_effects_of_evaluate_leave_no_trace(tmp_path):
    """Caches, running statistics, flags, gradients that were not there, and random numbers."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 20)
    optimizer.zero_grad()
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    model.register_buffer("seen", torch.zeros(3))
    originals = {"seen": model.seen, "mean": model.norm.running_mean.clone()}

    def evaluate():
        compute_loss(model)
        model.train()
        nn.functional.cross_entropy(model(make_batch(7)[0]), make_batch(7)[1]).backward()
        model.requires_grad_(False)
        model.cache, model.seen = torch.zeros(len(model.cache) + 1), model.seen + 1
        with torch.no_grad():  # weights that are swapped for others and put back
            own = model.head.weight.clone()
            model.head.weight.mul_(0.5)
            model.head.weight.copy_(own)
        random.random(), np.random.rand(), torch.rand(1)
        return compute_loss(model)

    states = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate).save(tmp_path / "a")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model.seen is originals["seen"] and not model.seen.any() and len(model.cache) > 1
    assert torch.equal(model.norm.running_mean, originals["mean"])
    assert (random.getstate(), np.random.get_state()[2]) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_buffers_that_evaluate_registers_or_removes_leave_no_trace(tmp_path):
    """All but caches, which are not persistent: new ones stayed, and a removed cache became persistent."""
    model = Net()
    model.register_buffer("later", None)
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    buffers, names = dict(model.norm.named_buffers()), list(model.state_dict())

    def evaluate():
        loss = compute_loss(model)
        model.head.register_buffer("new", torch.ones(3))
        model.head.register_buffer("new_cache", torch.ones(3), persistent=False)
        model.later = torch.ones(3)
        model.register_buffer("cache", torch.ones(1))
        del model.norm.running_var, model.cache
        return loss

    dsq_ckpt.Compressor(model, evaluate=evaluate).save(tmp_path / "a")
    assert list(model.state_dict()) == names and model.later is None
    assert list(model.norm.named_buffers()) == list(buffers.items())
    assert dict(model.head.named_buffers()).keys() == {"new_cache"} and model.cache is not None


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


@pytest.mark.parametrize("changes", [False, True])
def test_packed_weights_are_neither_changed_nor_blamed(tmp_path, changes):
    """They have no memory of their own, and a copy of them may have other numbers: saves failed."""
    model, data = Adapted(80), torch.randn(32, 80)
    packed = {name: getattr(model, name) for name in ("weight", "table")}
    before = {name: (entry.codes.clone(), entry.factor.clone()) for name, entry in packed.items()}

    def loss():
        if changes:
            model.weight.codes[0, 0] += 1
        return float((model(data).detach() - data).square().mean())

    compressor = dsq_ckpt.Compressor(model, evaluate=loss)
    if changes:
        with pytest.raises(SaveFailed, match="`evaluate` changed 'weight'"):
            compressor.save(tmp_path / "a")
    else:
        assert compressor.save(tmp_path / "a").quality["evaluations"] > 2
    for name, (codes, factor) in before.items():
        assert getattr(model, name) is packed[name], name
        assert torch.equal(packed[name].codes, codes) and torch.equal(packed[name].factor, factor), name


class Cast(Packed):
    """A tensor that consists of one like it, as weights that layers cast: this one is stored in its place."""

    def __new__(cls, codes, factor=None):
        return Packed.__new__(cls, codes, factor)

    def __init__(self, codes, factor=None):
        super().__init__(codes, codes.new_ones(1))

    def __tensor_flatten__(self):
        return ["codes"], None


def test_a_search_judges_weights_inside_a_tensor(tmp_path):
    """They are lossy, so the metric has to be one of the values that a restore gives back."""
    inner, seen, model = torch.randn(80, 80), set(), nn.Module()
    model.weight = nn.Parameter(Cast(inner))

    def loss():
        seen.add(float(inner.double().sum()))
        return float(inner.square().mean())

    own = inner.clone()
    dsq_ckpt.Compressor(model, evaluate=loss).save(tmp_path / "a")
    assert torch.equal(inner, own) and len(seen) > 2


def test_sparse_gradients_may_be_there_at_a_save(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64, sparse=True), nn.Linear(64, 64))
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(64)

    def loss():
        return (model(rows) - 1).square().mean()

    for _ in range(2):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    gradient = model[0].weight.grad
    with dsq_ckpt.Compressor(model, optimizer, {"search": {"epsilon": 0.5}}, lambda: loss().item()) as compressor:
        compressor.save(tmp_path / "a")
    assert gradient.is_sparse and model[0].weight.grad is gradient and is_complete(tmp_path / "a")
