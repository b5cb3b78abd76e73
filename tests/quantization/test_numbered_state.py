"""Weights find their gradients in optimizer state that is named by numbers, and get the same steps as by names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import dsq_ckpt
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.numbered_state import Shape, match_state_to_weights, parse_numbered_name
from dsq_ckpt.quantization.scales import find_gauges

MATRIX = (64, 128)


def shapes(weights: Mapping[str, Shape], numbered: Mapping[str, Shape]) -> dict[str, Shape]:
    return dict(weights) | {f"{name}.exp_avg_sq": shape for name, shape in numbered.items()}


def match_weights(weights: Mapping[str, Shape], numbered: Mapping[str, Shape]) -> dict[str, str]:
    names = [f"{name}.exp_avg_sq" for name in numbered]
    return {weight: name.removesuffix(".exp_avg_sq")
            for weight, name in match_state_to_weights(names, shapes(weights, numbered)).items()}


def test_weights_of_a_shape_come_in_the_order_of_numbers() -> None:
    weights = {"m.a": MATRIX, "m.a_bias": (64,), "m.b": (128, 64), "m.c": MATRIX, "m.norm": (64,)}
    numbered = {"o.state.10": MATRIX, "o.state.2": MATRIX, "o.state.3": (128, 64), "o.state.4": (64,)}
    assert match_weights(weights, numbered) == {"m.a": "o.state.2", "m.c": "o.state.10", "m.b": "o.state.3"}


def test_an_optimizer_alone_and_state_by_names() -> None:
    assert match_weights({"w": MATRIX}, {"state.0": MATRIX}) == {"w": "state.0"}
    assert match_weights({"m.w": MATRIX}, {"o.state.w": MATRIX, "o.state.0.deep": MATRIX}) == {}


def test_a_shape_with_more_weights_than_state_is_left_out() -> None:
    weights = {"m.frozen": MATRIX, "m.a": MATRIX, "m.b": (32, 32), "m.frozen_too": (16, 16)}
    assert match_weights(weights, {"o.state.0": MATRIX, "o.state.1": (32, 32)}) == {"m.b": "o.state.1"}


def test_a_tied_weight_has_two_names() -> None:
    weights = {"m.embedding": MATRIX, "m.a": (32, 32), "m.b": (32, 32), "m.head": MATRIX}
    numbered = {"o.state.0": MATRIX, "o.state.1": (32, 32), "o.state.2": (32, 32)}
    assert match_weights(weights, numbered) == {
        "m.embedding": "o.state.0", "m.a": "o.state.1", "m.b": "o.state.2", "m.head": "o.state.0",
    }


def test_copies_share_state_and_twins_have_none() -> None:
    """An average of the weights fits the optimizer as the weights do; two models of the same shapes fit both."""
    weights = {"model.a": MATRIX, "average.a": MATRIX}
    assert match_weights(weights, {"o.state.0": MATRIX}) == {"model.a": "o.state.0", "average.a": "o.state.0"}
    twins = {"actor.a": MATRIX, "actor.b": (9, 9), "critic.a": MATRIX}
    numbered = {"actor_opt.state.0": MATRIX, "actor_opt.state.1": (9, 9), "critic_opt.state.0": MATRIX}
    assert match_weights(twins, numbered) == {"actor.b": "actor_opt.state.1"}


@pytest.mark.parametrize("kind", ["adam", "momentum"])
def test_weights_are_stored_as_with_names(tmp_path: Path, kind: str) -> None:
    """Layers whose gradients differ a hundredfold; without them, all would have steps of their own size."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 96) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    parameters = [  # matrices first, as with a weight decay of their own
        {"params": [parameter for parameter in model.parameters() if (parameter.ndim > 1) == matrices]}
        for matrices in (True, False)
    ]
    optimizer = (
        torch.optim.AdamW(parameters, lr=1e-3) if kind == "adam" else torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    )
    for _ in range(3):
        loss = model(torch.randn(32, 96)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for number, layer in enumerate(layers):
            assert layer.weight.grad is not None
            layer.weight.grad *= 10.0**-number
        optimizer.step()
    weights, names = model.state_dict(), get_state_dict(model, optimizer)[1]
    got = {}
    for name, state in {"names": names, "numbers": optimizer.state_dict(), "object": optimizer, "alone": {}}.items():
        dsq_ckpt.save({"model": weights, "optimizer": state}, tmp_path / name, parent=None)
        got[name] = {key: torch.zeros_like(value) for key, value in weights.items()}
        dsq_ckpt.load({"model": got[name]}, tmp_path / name)
    for key in weights:
        assert torch.equal(got["names"][key], got["numbers"][key])
        assert torch.equal(got["names"][key], got["object"][key])
    assert any(not torch.equal(got["names"][key], got["alone"][key]) for key in weights)


def test_modules_named_like_keys_of_optimizers_have_theirs() -> None:
    """By numbers and by names; a parameter `state.0` has a name, not the number 0."""
    weights = {"m.a": MATRIX, "m.opt.0.weight": MATRIX, "m.state.0.weight": (64, 64), "m.state.1": (96, 64)}
    by_number = {f"o.state.{number}": shape for number, shape in enumerate(weights.values())}
    by_name = {f"o.state.{name.removeprefix('m.')}": shape for name, shape in weights.items()}
    for owners in (by_number, by_name):
        state = {f"{name}.exp_avg_sq": "exp_avg_sq" for name in owners}
        layout = Layout(dict.fromkeys(weights, "weights/linear"), {}, state, shapes=shapes(weights, owners))
        gauges = {weight: gauge.name for weight, gauge in find_gauges(layout).items()}
        assert gauges == dict(zip(weights, state, strict=True))
    names = ("state.0", "app.opt.state.2", "state.opt.state.3", "state.b.state.4")
    assert [parse_numbered_name(f"{name}.m") for name in names] \
        == [("state", 0), ("app.opt.state", 2), ("state.opt.state", 3), None]


def test_each_of_two_optimizers_tells_of_its_model() -> None:
    """A generator and its discriminator, whose optimizers both begin with number 0; the latter has a list."""
    weights = {"g.a": MATRIX, "g.b": (64, 64), "d.w.0": (96, 96), "d.w.1": (96, 80)}
    numbered = {
        "opt_g.state.0": MATRIX, "opt_g.state.1": (64, 64), "opt_d.state.0": (96, 80), "opt_d.state.1": (96, 96),
    }
    state = {f"{name}.exp_avg_sq": "exp_avg_sq" for name in numbered}
    layout = Layout(dict.fromkeys(weights, "weights/linear"), {}, state, shapes=shapes(weights, numbered))
    assert {weight: gauge.name for weight, gauge in find_gauges(layout).items()} == {
        "g.a": "opt_g.state.0.exp_avg_sq", "g.b": "opt_g.state.1.exp_avg_sq",
        "d.w.0": "opt_d.state.1.exp_avg_sq", "d.w.1": "opt_d.state.0.exp_avg_sq",
    }
