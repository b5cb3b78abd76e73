"""Merged steps of SGD give what torch.optim.SGD gives, up to rounding, in about log2 n merges with the state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsq_ckpt import ConfigError
from dsq_ckpt.lowdiff.step_merging import StepMerger
from dsq_ckpt.lowdiff.train_state import TrainState


def _model(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3, bias=False)).to(dtype)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.03}]
    return model, torch.optim.SGD(groups, **options)


def _gradients(model: nn.Module, density: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.numel(), generator=generator, dtype=torch.float64)
        value[torch.rand(parameter.numel(), generator=generator) > density] = 0
        if float(torch.rand(1, generator=generator)) > 0.1:  # now and then a parameter has none
            gradients[name] = value.to(parameter.dtype)
    return gradients


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 23), density=st.sampled_from([0.02, 0.1, 1.0]), seed=st.integers(0, 1000),
    before=st.integers(0, 2), options=st.fixed_dictionaries({
        "lr": st.just(0.1), "momentum": st.sampled_from([0.0, 0.9]), "weight_decay": st.sampled_from([0.0, 0.01]),
        "maximize": st.booleans(), "nesterov": st.booleans(), "dampening": st.sampled_from([0.0, 0.3]),
    }),
)
def test_merging_is_what_sgd_does(
    steps: int, density: float, seed: int, before: int, options: dict[str, Any]
) -> None:
    if not options["momentum"] or options["dampening"]:
        options = {**options, "nesterov": False}
    generator = torch.Generator().manual_seed(seed)
    one, optimizer = _model(options)
    other, merging_optimizer = _model(options)
    train_state = TrainState(other, merging_optimizer)

    def step(model: nn.Module, target: torch.optim.Optimizer, gradients: dict[str, torch.Tensor]) -> None:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].view(parameter.shape).clone() if name in gradients else None
        target.step()

    for _ in range(before):  # there may be a momentum buffer already
        gradients = _gradients(one, density, generator)
        step(one, optimizer, gradients)
        step(other, merging_optimizer, gradients)
    with StepMerger(train_state, 2) as merging:
        for number in range(steps):
            for target in (optimizer, merging_optimizer):
                target.param_groups[0]["lr"] = 0.1 / (1 + number)
            gradients = _gradients(one, density, generator)
            merging.step(train_state.hyper(), gradients)
            step(one, optimizer, gradients)
    for (name, expected), parameter in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-11, atol=1e-12, msg=name)
        wanted = optimizer.state[expected].get("momentum_buffer")
        got = merging_optimizer.state[parameter].get("momentum_buffer")
        assert (wanted is None) == (got is None), name
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12, msg=name)
    assert merging.merges <= math.floor(math.log2(steps)) + 1


def test_adam_cannot_be_merged() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Adam cannot be merged"):
        StepMerger(TrainState(model, torch.optim.Adam(model.parameters())), 1)
