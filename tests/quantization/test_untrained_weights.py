"""Weights that no optimizer of a save trains, told by its state alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import dsq_ckpt
from dsq_ckpt.quantization.groups import kind_of
from dsq_ckpt.quantization.untrained_weights import find_stateless_weights, group_tied_names

M, T, V = (80, 80), (70, 80), (9, 90)


def doubtful(shapes: dict[str, tuple[int, ...]], tied: dict[str, str] | None = None) -> dict[str, bool]:
    weights = {name for name in shapes if kind_of(name) == "weights" and name not in (tied or {})}
    return find_stateless_weights(weights, shapes, group_tied_names((tied or {}).items()))


def sure(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, False)


def perhaps(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, True)


def state(*owners: str, shape: tuple[int, ...] = M, leaf: str = "exp_avg", optimizer: str = "optimizer") -> dict:
    return {f"{optimizer}.state.{owner}.{leaf}": shape for owner in owners}


@pytest.mark.parametrize("shapes, expected", [
    ({"m.a.weight": M, "m.b.weight": M}, {}),  # no optimizer
    ({"m.a.weight": M, "m.b.weight": M} | state("a.weight"), sure("m.b.weight")),
    ({"m.a.weight": M, "m.b.weight": M} | state("a.weight", shape=(), leaf="step"), sure("m.b.weight")),
    ({"m.a.weight": M, "m.b.weight": M} | state("a.weight.GG", leaf="0"), sure("m.b.weight")),  # lists of SOAP
    ({"m.a.weight": M, "ema.a.weight": M} | state("a.weight"), perhaps("m.a.weight", "ema.a.weight")),
    ({"model.a.weight": M, "ema.a.weight": M} | state("a.weight"), perhaps("ema.a.weight")),
    ({"app.model.a.weight": M, "app.ema.a.weight": M} | state("a.weight", optimizer="app.optim"),
     perhaps("app.ema.a.weight")),
    ({"model.a.weight": M, "extra.vae.a.weight": T} | state("a.weight"), perhaps("extra.vae.a.weight")),
    ({"0.weight": M, "vae.encoder.0.weight": M} | state("0.weight"), perhaps("vae.encoder.0.weight")),
    ({"m.module.a.weight": M, "m.b.weight": M} | state("_orig_mod.a.weight"), sure("m.b.weight")),
    ({"m.a.weight": M, "m.a.bias": V} | state("a.bias", shape=V), sure("m.a.weight")),
    ({"m.a.weight": M, "m.a.bias": V} | state("net.a.bias", shape=V), {}),
    ({"m.a.weight": M, "m.b.weight": M} | state("net.a.weight"), {}),  # names of another tree: nothing is known
    ({"m.a.weight": M, "m.b.weight": M} | state("a.weight", "c.weight"), {}),
    ({"m.a.weight": M, "m.b.weight": M} | state("0"), perhaps("m.a.weight", "m.b.weight")),  # one of them
    ({"m.a.weight": M, "m.b.weight": T} | state("0"), sure("m.b.weight")),
    ({"m.a.weight": M, "m.b.weight": M} | state("0", "1"), {}),
    ({"model.a.weight": M, "ema.a.weight": M} | state("0"), perhaps("ema.a.weight")),
    ({"policy.a.weight": M, "reference.a.weight": M} | state("0"), perhaps("policy.a.weight", "reference.a.weight")),
    ({"g.a.weight": M, "d.a.weight": M} | state("0", optimizer="g_opt") | state("0", optimizer="d_opt"), {}),
    ({"m.a.weight": M, "m.b.weight": M} | state("0", shape=V), {}),  # not kept in the parameter's shape
    # Factors of Adafactor, which have the shapes of biases.
    ({"m.a.weight": M, "m.a.bias": (80,)} | state("0", shape=(80,), leaf="exp_avg_sq_row")
     | state("0", shape=(80,), leaf="exp_avg_sq_col") | state("1", shape=(80,), leaf="exp_avg_sq"), {}),
    ({"m.a.weight": M, "m.b.weight": T} | state("0") | state("a.weight", optimizer="other"), {}),  # both ways
    # Modules whose names are like keys of optimizers.
    ({"m.state.0.weight": M, "m.b.weight": M} | state("state.0.weight"), sure("m.b.weight")),
    ({"state.0.weight": M, "b.weight": M} | state("state.0.weight"), sure("b.weight")),
    ({"m.opt.0.weight": M, "m.b.weight": M} | state("opt.0.weight"), sure("m.b.weight")),
    ({"model.exp_avg.0": M, "model.b.weight": M} | state("exp_avg.0"), sure("model.b.weight")),
    ({"model.a.state": M, "model.b.weight": M} | state("a.state"), sure("model.b.weight")),
    ({"m.state": M, "m.b.weight": M} | state("state"), sure("m.b.weight")),
    ({"model.state.0": M, "model.b.weight": M} | state("state.0"), sure("model.b.weight")),  # not the number 0
    ({"model.state.0.weight": M, "model.b.weight": T} | state("0"), sure("model.b.weight")),
    ({"m.opt.0.weight": M, "m.b.weight": M, "m.c.weight": T} | state("0") | state("1"), sure("m.c.weight")),
    ({"m.opt.0.weight": M, "m.b.weight": M} | state("0"), perhaps("m.b.weight")),  # one of them
    ({"m.a.weight": M, "optimizer.masters.0": M} | state("0"), {}),
    ({"m.a.weight": M, "optimizer.masters.a.weight": M} | state("a.weight"), {}),
    ({"m.a.weight": M, "model.optimizer.masters.a.weight": M} | state("a.weight", optimizer="model.optimizer"), {}),
])
def test_weights_without_state_are_in_doubt(shapes: dict[str, tuple[int, ...]], expected: dict[str, bool]) -> None:
    assert doubtful(shapes) == expected


def test_a_model_that_is_given_tells_what_is_its_own() -> None:
    shapes = {"m.state.table": M, "m.b.weight": M} | state("state.table")
    types = {"state.table": "other", "b.weight": "linear"}
    assert find_stateless_weights({"m.state.table", "m.b.weight"}, shapes, {}, types) == sure("m.b.weight")
    stateless = find_stateless_weights({"m.b.weight"}, shapes, {}, types)
    assert stateless == sure("m.b.weight"), "though it is stored exactly"


class Net(nn.Module):
    """Three layers, the second of which has a name to be chosen."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.backbone = nn.Linear(80, 80)
        self.add_module(name, nn.Sequential(nn.Linear(80, 80)))
        self.head = nn.Linear(80, 80)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.get_submodule(self.name)(self.backbone(x)))


@pytest.mark.parametrize("how", ["compressor", "names", "numbers", "flat"])
@pytest.mark.parametrize("name", ["state", "opt", "exp_avg", "momentum", "param_groups"])
def test_no_name_of_a_module_makes_what_rests_lossy_or_its_own_weights_large(tmp_path, name: str, how: str) -> None:
    """The backbone has no state of the optimizer; the module of that name is trained, small where the model tells."""
    torch.manual_seed(0)
    model = Net(name)
    optimizer = torch.optim.AdamW([parameter for own, parameter in model.named_parameters() if "backbone" not in own])
    history = dsq_ckpt.SaveHistory()
    compressor = dsq_ckpt.Compressor(model, optimizer, history=history)
    for number in range(3):
        model(torch.randn(30, 80)).square().sum().backward()
        optimizer.step()
        path = tmp_path / str(number)
        if how == "compressor":
            compressor.save(path)
        else:
            own = get_state_dict(model, optimizer)[1] if how != "numbers" else optimizer.state_dict()
            weights = model.state_dict() if how == "flat" else {"model": model.state_dict()}
            dsq_ckpt.save({**weights, "optimizer": own}, path, history=history)
    target = {} if how == "flat" else {"model": {}}
    dsq_ckpt.load(target, path)
    loaded = target if how == "flat" else target["model"]
    assert loaded["backbone.weight"].equal(model.backbone.weight)
    assert not loaded["head.weight"].equal(model.head.weight)
    if how == "compressor":
        assert not loaded[f"{name}.0.weight"].equal(model.get_submodule(name)[0].weight)


@pytest.mark.parametrize("owner", ["a.weight", "b.weight", "0"])
def test_state_of_either_name_is_that_of_a_tied_weight(owner: str) -> None:
    shapes = {"m.a.weight": M, "m.b.weight": M, "m.c.weight": T} | state(owner)
    assert doubtful(shapes, {"m.b.weight": "m.a.weight"}) == sure("m.c.weight")


def test_a_model_whose_weights_all_have_other_names_is_served() -> None:
    shapes = {"head.weight": M, "wte.weight": M, "wpe.weight": T} | state("0") | state("1", shape=T)
    assert doubtful(shapes, {"head.weight": "wte.weight"}) == {}
    assert doubtful(shapes, {"wte.weight": "head.weight"}) == {}


@pytest.mark.parametrize("how", ["names", "numbers", "all parameters"])
def test_frozen_layers_do_not_drift_where_no_model_is_given(tmp_path, how: str) -> None:
    """Half of the blocks are frozen; each restart begins a chain of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(80, 80) for _ in range(4)))
    model[:2].requires_grad_(False)
    first = {name: value.clone() for name, value in model.state_dict().items() if name < "2"}

    def states() -> tuple[dict, dict]:
        weights, by_name = get_state_dict(model, optimizer)
        return weights, by_name if how == "names" else optimizer.state_dict()

    for restart in range(3):
        history = dsq_ckpt.SaveHistory()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad or how == "all parameters"]
        optimizer = torch.optim.AdamW(trained)
        for number in range(4):
            model(torch.randn(30, 80)).square().sum().backward()
            optimizer.step()
            weights, own = states()
            path = tmp_path / f"{restart}-{number}"
            size = dsq_ckpt.save({"model": weights, "optimizer": own}, path, history=history).bytes_written
        target = {"model": {}}
        dsq_ckpt.load(target, path, history=history)
        assert not target["model"]["3.weight"].equal(model[3].weight)  # trained ones are lossy, once seen to change
        assert size < 60_000  # and frozen ones cost nothing at a delta
        model.load_state_dict(target["model"])
    assert all(value.equal(model.state_dict()[name]) for name, value in first.items())


def test_frozen_tensors_may_be_lossy_where_the_configuration_says_so(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80).requires_grad_(False))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model(torch.randn(30, 80)).square().sum().backward()
    optimizer.step()
    original = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    for setting in ("exact", "lossy"):
        dsq_ckpt.save(original, tmp_path / setting, config={"quantize": {"frozen": setting}}, parent=None)
        target = {"model": {}}
        dsq_ckpt.load(target, tmp_path / setting)
        assert target["model"]["1.weight"].equal(model[1].weight) == (setting == "exact")
