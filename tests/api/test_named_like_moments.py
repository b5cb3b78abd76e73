"""Tensors of a model with the names of moments, saved and restored."""

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.engine.merging import merge


class Contrast(nn.Module):
    """A trained layer, and buffers, a frozen and a trained parameter that are named like moments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 80)
        self.momentum_buffer = nn.Parameter(torch.randn(90, 64))
        self.register_buffer("exp_avg", torch.randn(100, 64))
        self.register_buffer("exp_avg_sq", torch.rand(110, 64))
        self.frozen = nn.ParameterDict({"exp_avg": nn.Parameter(torch.randn(70, 64), requires_grad=False)})


def trained() -> tuple[Contrast, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Contrast()
    optimizer = torch.optim.AdamW(model.parameters())
    (model.layer(torch.randn(8, 64)).square().sum() + model.momentum_buffer.square().sum()).backward()
    optimizer.step()
    return model, optimizer


def check(model: Contrast, other: Contrast, error: float = 0.02) -> None:
    own = other.state_dict()
    for name, value in model.state_dict().items():
        if name in ("exp_avg", "exp_avg_sq", "frozen.exp_avg"):
            assert torch.equal(own[name], value), name
        assert (own[name] - value).norm() <= error * value.norm(), name


@pytest.mark.parametrize("way", ["model", "alone", "compressor", "search"])
def test_a_given_model_gets_its_own_tensors_back_whatever_their_names(tmp_path, way):
    """Buffers and frozen parameters bit for bit, trained ones within what weights lose, or what a search accepts."""
    model, optimizer = trained()
    other = Contrast()
    others = torch.optim.AdamW(other.parameters())
    if way == "model":
        dsq_ckpt.save({"net": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "0", model=model)
        dsq_ckpt.load(state := {"net": other.state_dict(), "o": others.state_dict()}, tmp_path / "0")
        other.load_state_dict(state["net"])
    elif way == "alone":
        dsq_ckpt.save(model, tmp_path / "0")
        dsq_ckpt.load(other, tmp_path / "0")
    else:
        evaluate = None if way == "compressor" else lambda: sum(p.square().mean().item() for p in model.parameters())
        dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate).save(tmp_path / "0")
        dsq_ckpt.Compressor(other, others).load(tmp_path / "0")
    check(model, other, 1.0 if way == "search" else 0.02)


def test_checkpoints_of_such_models_are_merged(tmp_path):
    """A merge has no model to ask, and counts bytes by the kinds that the saves have counted."""
    model, _ = trained()
    for number in range(3):
        with torch.no_grad():
            model.momentum_buffer.add_(torch.randn(90, 64) * 1e-2)
        dsq_ckpt.save(model, tmp_path / str(number))
    merge(tmp_path / "2", tmp_path / "merged")
    dsq_ckpt.load(other := Contrast(), tmp_path / "merged")
    check(model, other)
