"""Weights beside the state of L-BFGS and Rprop, which is of use at these very weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dsq_ckpt


def fitted(steps: int) -> tuple[nn.Module, torch.optim.LBFGS]:
    """A network that fits a sine, in float64, after steps of L-BFGS."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 80), nn.Tanh(), nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 1)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.LBFGS) -> float:
    inputs = torch.linspace(0, 6, 60, dtype=torch.float64)[:, None]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sin()).square().mean()
        loss.backward()
        return loss

    return float(optimizer.step(closure))


@pytest.mark.parametrize("named", [False, True])
def test_all_weights_are_exact_and_a_warning_says_so_once(tmp_path, recwarn, named) -> None:
    """So a run goes on as if it had not been restored; under any key of the state dict."""
    model, optimizer = fitted(4)
    for number in range(2):
        step(model, optimizer)
        state = {"model": model.state_dict(), "lbfgs": optimizer.state_dict()} if named else {
            "model": model, "optimizer": optimizer
        }
        dsq_ckpt.save(state, tmp_path / str(number))
    assert len([warning for warning in recwarn if "is state of L-BFGS" in str(warning.message)]) == 1
    other, restored = fitted(1)
    if named:
        state = {"model": {}, "lbfgs": {}}
        dsq_ckpt.load(state, tmp_path / "1")
        other.load_state_dict(state["model"])
        restored.load_state_dict(state["lbfgs"])
    else:
        dsq_ckpt.load({"model": other, "optimizer": restored}, tmp_path / "1")
    assert [step(other, restored) for _ in range(4)] == [step(model, optimizer) for _ in range(4)]


def test_a_rule_has_the_last_word(tmp_path) -> None:
    model, optimizer = fitted(2)
    config = {"quantize": {"rules": [{"pattern": "*2.weight", "group": "linear"}]}}
    dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "0", config=config)
    target = {"model": {}}
    dsq_ckpt.load(target, tmp_path / "0")
    off = {name for name, value in model.state_dict().items() if not value.equal(target["model"][name])}
    assert off == {"2.weight"}


def test_in_the_background_and_in_a_search(tmp_path) -> None:
    """A metric sees the weights alone, not whether the next steps move."""
    model, optimizer = fitted(2)
    dsq_ckpt.async_save({"model": model, "optimizer": optimizer}, tmp_path / "0").result()
    metric = lambda: step(model, torch.optim.LBFGS(model.parameters(), lr=0.0))  # noqa: E731
    compressor = dsq_ckpt.Compressor(model, torch.optim.Adam(model.parameters()), evaluate=metric)
    compressor.save(tmp_path / "1", extra={"lbfgs": optimizer.state_dict()})
    for path in ("0", "1"):
        target = {"model": {}}
        dsq_ckpt.load(target, tmp_path / path)
        assert all(value.equal(target["model"][name]) for name, value in model.state_dict().items())
    assert math.isfinite(step(model, optimizer))


def rprop(steps: int) -> tuple[nn.Module, torch.optim.Rprop]:
    model, _ = fitted(0)
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
    for _ in range(steps):
        step_of_rprop(model, optimizer)
    return model, optimizer


def step_of_rprop(model: nn.Module, optimizer: torch.optim.Rprop) -> float:
    inputs = torch.linspace(0, 6, 60, dtype=torch.float64)[:, None]
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sin()).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def test_a_run_of_rprop_goes_on_as_if_not_restored(tmp_path, recwarn) -> None:
    """Its steps have shrunk, and would take long to bring back weights that are a little off."""
    model, optimizer = rprop(50)
    for number in range(2):
        step_of_rprop(model, optimizer)
        dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / str(number))
    assert len([warning for warning in recwarn if "is state of Rprop" in str(warning.message)]) == 1
    other, restored = rprop(1)
    dsq_ckpt.load({"model": other, "optimizer": restored}, tmp_path / "1")
    for value, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert value.equal(loaded)
    assert step_of_rprop(other, restored) == step_of_rprop(model, optimizer)


def test_a_step_size_alone_is_no_state_of_rprop(tmp_path) -> None:
    original = {"w": torch.randn(80, 80), "optimizer": {"state": {"w": {"step_size": torch.rand(80, 80)}}}}
    dsq_ckpt.save(original, tmp_path / "0")
    target = {"w": torch.empty(80, 80)}
    dsq_ckpt.load(target, tmp_path / "0")
    assert not target["w"].equal(original["w"])
