"""Weights that share memory are stored once; layers that do not change cost next to nothing."""

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.manifest import Manifest
from tests.training import batch, loss_of


class Tied(nn.Module):
    def __init__(self, seed=0, tied=True):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed, self.hidden = nn.Embedding(128, 96), nn.Linear(96, 96)
            self.head = nn.Linear(96, 128, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.hidden(self.embed(tokens))))


def trained(model, steps=30):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        tokens, targets = batch(step)
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("how", ["save", "async", "compressor"])
def test_tied_weights_are_stored_once(tmp_path, how):
    model = Tied()
    optimizer = trained(model)
    if how == "compressor":
        dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: loss_of(model)).save(tmp_path / "a")
    elif how == "save":
        dsq_ckpt.save({"model": model.state_dict()}, tmp_path / "a", model=model)
    else:
        dsq_ckpt.async_save({"model": model.state_dict()}, tmp_path / "a", model=model).result()
    assert Manifest.read(tmp_path / "a").kinds["weights"].logical == 4 * (128 * 96 + 96 * 96)
    got = {"model": Tied(1, tied=False).state_dict()}
    dsq_ckpt.load(got, tmp_path / "a")
    assert torch.equal(got["model"]["head.weight"], got["model"]["embed.weight"])
    assert float((got["model"]["head.weight"] - model.head.weight).norm() / model.head.weight.norm()) < 0.2
    dsq_ckpt.save({"model": model.state_dict()}, tmp_path / "b", model=model)
    assert Manifest.read(tmp_path / "b").depth == 1


def test_two_tensors_of_equal_values_are_not_tied(tmp_path):
    state = {"a.weight": torch.randn(64, 80), "b.weight": torch.empty(64, 80)}
    state["b.weight"].copy_(state["a.weight"])
    dsq_ckpt.save(state, tmp_path / "a")
    assert Manifest.read(tmp_path / "a").kinds["weights"].logical == 2 * 4 * 64 * 80


def test_a_frozen_backbone_costs_next_to_nothing(tmp_path):
    model = Tied(tied=False)
    trained(model)
    model.embed.requires_grad_(False)
    model.hidden.requires_grad_(False)
    config = {"quantize": {"weights": {"refinement_bits": 0}}}
    dsq_ckpt.save({"model": model.state_dict()}, tmp_path / "0", model=model, config=config)
    everything = Manifest.read(tmp_path / "0").kinds["weights"].base
    frozen = {"model": {k: v for k, v in model.state_dict().items() if not k.startswith("head")}}
    dsq_ckpt.forget()
    dsq_ckpt.save(frozen, tmp_path / "only" / "0", model=model, config=config)
    trained(model, 5)
    dsq_ckpt.save(frozen, tmp_path / "only" / "1", model=model, config=config)
    cost = Manifest.read(tmp_path / "only" / "1").kinds["weights"].base
    assert cost < everything / 200, (cost, everything)
    got = {"model": {k: torch.zeros_like(v) for k, v in frozen["model"].items()}}
    dsq_ckpt.load(got, tmp_path / "only" / "1")
    assert float((got["model"]["embed.weight"] - model.embed.weight).norm() / model.embed.weight.norm()) < 0.3
