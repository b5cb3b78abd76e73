"""Which update an optimizer makes, by the names and values of what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from dsq_ckpt.quantization.update_rules import (
    find_extra_state,
    find_optimizer_objects,
    find_prenormalized,
    find_unknown_updates,
)


def test_state_of_other_optimizers_beside_first_moments() -> None:
    of = "optimizer.state.layer.weight."
    adam = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step", "mu_product", "exp_avg_slow", "z", "master_param"]
    assert find_extra_state([of + name for name in adam] + ["model.layer.weight", "hessian"]) == {}
    others = ["exp_avg", "exp_avg_sq", "hessian", "exp_avg_var", "Q.0", "Q.1"]
    known = [f"optimizer.state.known.weight.{name}" for name in adam]
    extra = find_extra_state([*known, *(of + name for name in others)])
    assert extra == {of + "exp_avg": {"hessian", "exp_avg_var", "Q"}}
    assert find_extra_state([of + name for name in others[1:]]) == {}


def test_state_of_other_optimizers_beside_momentum() -> None:
    """Beside that of SGD and RMSprop there is nothing else; Shampoo and PSGD have preconditioners."""
    of = "optimizer.state.layer.weight."
    usual = ["momentum_buffer", "square_avg", "grad_avg", "step", "master_param"]
    assert find_extra_state([*(of + name for name in usual), "model.layer.weight"]) == {}
    for other, named in (("inv_precond_0", "inv_precond_0"), ("Q.0", "Q"), ("exp_avg_sq", "exp_avg_sq")):
        assert find_extra_state([of + name for name in (*usual, other)]) == {of + "momentum_buffer": {named}}


def test_optimizers_are_known_by_their_settings() -> None:
    """Optimizers without settings of SGD or RMSprop in any group are others (Muon); none is known without any."""
    muon = ["a.param_groups.0.momentum", "a.param_groups.0.ns_steps", "a.param_groups.1.dampening"]
    sgd = ["b.param_groups.0.momentum", "b.param_groups.0.dampening", "b.param_groups.0.params"]
    rmsprop = ["c.param_groups.layer.weight.centered", "c.param_groups.layer.weight.lr"]
    flat = ["d.param_groups.layer.weight.ns_steps"]
    state = [f"{owner}.state.0.momentum_buffer" for owner in "abcde"]
    assert find_unknown_updates([*muon, *sgd, *rmsprop, *flat, *state, "e.param_groups"]) == {"a.state.", "d.state."}
    assert find_unknown_updates(["param_groups.0.ns_steps"]) == {"state."}


def test_state_in_the_groups_of_an_optimizer_is_beside_all_of_its_moments() -> None:
    """Such as one projection for all; not beside those of another optimizer."""
    moments = [f"{owner}.state.{number}.{name}" for owner, number, name in (
        ("a", 0, "exp_avg"), ("a", 1, "momentum_buffer"), ("b", 0, "exp_avg"),
    )]
    beside = {"a.state.0.exp_avg": {"basis"}, "a.state.1.momentum_buffer": {"basis"}}
    for name in ("a.param_groups.0.basis", "a.param_groups.1.basis.2", "a.param_groups.layer.weight.basis"):
        assert find_extra_state([*moments, name]) == beside
    assert find_extra_state(["state.0.exp_avg", "param_groups.0.basis"]) == {"state.0.exp_avg": {"basis"}}


@dataclass
class Basis:
    values: torch.Tensor
    step: int = 0


class Kind(Enum):
    LEFT = 1


class Projection:
    """An object of which nothing is known."""


@pytest.mark.parametrize("value", [
    (torch.eye(4), 3), [{"q": torch.eye(4)}], Basis(torch.eye(4)), np.eye(4), Projection(), (Projection(),),
])
def test_objects_beside_moments(value: Any) -> None:
    """Whatever they are made of; by names of the optimizer's state or groups, and no others."""
    of = ("optimizer.state.layer.weight.basis", "optimizer.param_groups.0.basis", "param_groups.0.basis")
    assert find_optimizer_objects({**dict.fromkeys(of, value), "sampler.state_of_data": value}) == set(of)


@pytest.mark.parametrize("value", [
    3, 0.1, True, None, "rms", b"a", (0.9, 0.999), [1, 2], {"a": (1, 2)}, Kind.LEFT, np.float32(3), torch.tensor(3.0),
    (torch.tensor([1.0]), 2), Basis(torch.tensor(1.0)), torch.float32, torch.device("cpu"), {1, 2},
    list(range(1 << 20)),
])
def test_settings_are_none(value: Any) -> None:
    """Numbers, text and names, by themselves or together, as tensors of one element beside moments are none."""
    assert find_optimizer_objects({"optimizer.state.weight.k": value, "optimizer.param_groups.0.k": value}) == set()


@pytest.mark.parametrize("value, expected", [
    ((0.99, 0.95), True), ([0.9, 0.5], True), ((0.9, 0.999), False), ((0.9, 0.9), False), ((0.98, 0.92, 0.99), False),
    ((torch.tensor(0.99), 0.95), False), (0.9, False), (None, False),
])
def test_decay_rates_by_which_first_moments_last_longer(value: Any, expected: bool) -> None:
    name = "optimizer.param_groups.0.betas"
    assert find_optimizer_objects({name: value, "model.betas": value}) == ({name} if expected else set())


def test_an_object_that_contains_itself_is_no_setting() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert find_optimizer_objects({"optimizer.state.0.k": endless}) == {"optimizer.state.0.k"}


def test_optimizers_that_average_divided_gradients_are_known_by_name() -> None:
    """LaProp by its state, or settings of earlier versions; ADOPT by its settings, of timm and of its authors."""
    names = [
        "a.state.layer.weight.exp_avg_lr_1", "b.param_groups.0.exp_avg_lr_1", "c.param_groups.w.clip_exp",
        "d.param_groups.0.decouple", "d.param_groups.0.capturable", "plain.w.exp_avg_lr_1", "model.clip_exp",
    ]
    assert find_prenormalized(names) == {"a.state.", "b.state.", "c.state.", "d.state.", "plain.w."}


@pytest.mark.parametrize("kind", [
    torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.SGD,
    torch.optim.RMSprop, torch.optim.Adafactor,
])
def test_no_optimizer_of_torch_averages_divided_gradients(kind: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = kind([parameter])
    parameter.sum().backward()
    optimizer.step()
    names = [f"o.state.w.{key}" for key in optimizer.state[parameter]]
    assert not find_prenormalized([*names, *(f"o.param_groups.0.{key}" for key in optimizer.param_groups[0])])
