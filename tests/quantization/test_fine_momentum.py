"""Momentum whose update is not known, since a matrix function may be taken of it, comes back more finely than SGD's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest

FINE = 0.0625
Kind = Callable[..., torch.optim.Optimizer]


class Shampoo(torch.optim.SGD):
    """SGD by its settings, which keeps a preconditioner beside momentum."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter, own in self.state.items():
            own["inv_precond_0"] = torch.eye(len(parameter))


def sgd(kind: Kind, parameters: Any) -> torch.optim.Optimizer:
    return kind(parameters, lr=0.01, momentum=0.9)


def trained(kind: Kind, steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(70, 80, bias=False)
    optimizer = kind(model.parameters()) if kind is torch.optim.Muon else sgd(kind, model.parameters())
    for _ in range(steps):
        model(torch.randn(9, 70)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def off(optimizer: torch.optim.Optimizer, path: Path) -> float:
    """Return the error of the momentum that a checkpoint holds."""
    own = next(iter(optimizer.state.values()))["momentum_buffer"]
    got: dict[str, Any] = {}
    dsq_ckpt.load(got, path, history=dsq_ckpt.SaveHistory())
    state = next(iter(got["optimizer"]["state"].values())) if "state" in got["optimizer"] else got["optimizer"]
    buffer = next(value for key, value in state.items() if key.endswith("momentum_buffer"))
    return float((buffer - own).norm() / own.norm())


@pytest.mark.parametrize("kind, fine", [
    (torch.optim.Muon, True), (Shampoo, True), (torch.optim.SGD, False), (torch.optim.RMSprop, False),
])
@pytest.mark.parametrize("form", ["optimizer", "names", "flat"])
def test_momentum_of_optimizers_other_than_sgd_is_finer_in_each_form_of_state(tmp_path, recwarn, kind, fine, form):
    """Newton-Schulz and the roots of Shampoo enlarge the small parts of momentum: restarts lost up to 30 steps."""
    model, optimizer = trained(kind)
    optimizers = []
    for number in range(2):  # at a keyframe, and given codes
        state: Any = optimizer
        if form != "optimizer":
            asked = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
            state = get_optimizer_state_dict(model, optimizer, options=asked)
        dsq_ckpt.save({"model": model, "optimizer": state}, tmp_path / str(number))
        assert "momentum/linear/relative" in Manifest.read(tmp_path / str(number)).groups
        optimizers.append(copy.deepcopy(optimizer))
        model(torch.randn(9, 70)).square().sum().backward()
        optimizer.step()
    for number, then in enumerate(optimizers):
        assert 0 < off(then, tmp_path / str(number)) < FINE if fine else 0.1 < off(then, tmp_path / str(number)) < 0.26
    assert [str(warning.message) for warning in recwarn if "momentum" in str(warning.message)] == []


@pytest.mark.parametrize("quantize, least, most", [
    ({"momentum": {"codebook": {"error": 0.01}}}, 0.0, 0.02), ({"momentum": {"method": "exact"}}, -1, 1e-9),
    ({"rules": [{"pattern": "*.momentum_buffer", "group": "linear"}]}, 0.1, 0.26),
])
def test_settings_that_ask_for_less_error_and_rules_have_the_last_word(tmp_path, quantize, least, most):
    model, optimizer = trained(torch.optim.Muon)
    dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "0", config={"quantize": quantize})
    assert least < off(optimizer, tmp_path / "0") < most
