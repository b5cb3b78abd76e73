"""Weights that are rounded to bf16: tensors that quantization leaves exact are exact, and a search refuses them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.storage.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BF16 = {"quantize": {"weights": {"method": "bf16"}}}


class BitLinear(nn.Linear):
    def forward(self, x):
        quantized = self.weight.sign() * self.weight.abs().mean()
        return nn.functional.linear(x, self.weight + (quantized - self.weight).detach(), self.bias)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.signs = nn.Linear(128, 128), BitLinear(128, 128)
        self.still = nn.Linear(128, 128).requires_grad_(False)
        self.register_buffer("table", torch.randn(128, 128))
        self.register_buffer("counts", torch.randint(0, 100_000, (128, 128)).float())

    def forward(self, x):
        return self.signs(torch.tanh(self.trained(x))) + self.still(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(32, 128)).square().mean().backward()
        optimizer.step()


def loaded(path) -> dict:
    target: dict = {}
    dsq_ckpt.load(target, path)
    return target


@pytest.mark.filterwarnings("ignore:the model rounds")
def test_only_trained_weights_are_rounded(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    compressor = dsq_ckpt.Compressor(model, optimizer, BF16)
    for name in "ab":
        train(model, optimizer)
        compressor.save(tmp_path / name)
        after = loaded(tmp_path / name)["model"]
        for key, value in model.state_dict().items():
            expected = value.bfloat16().float() if key == "trained.weight" else value
            assert torch.equal(after[key], expected), key


@pytest.mark.parametrize("kind", ["whole numbers", "large", "small", "subnormal", "beside L-BFGS", "named by a rule"])
def test_values_that_bf16_does_not_hold_are_exact(tmp_path, kind):
    values, config, others = torch.randn(128, 128), BF16, {}
    if kind == "whole numbers":
        values = torch.randint(-100_000, 100_000, (128, 128)).float()
    elif kind in ("large", "small"):
        values = (1e39 if kind == "large" else 1e-60) * values.double()
    elif kind == "subnormal":
        values *= 1e-42
    elif kind == "beside L-BFGS":
        others = {"optim": {"state": {"w": {"prev_flat_grad": torch.randn(128 * 128)}}}}
    else:
        config = {"quantize": {**BF16["quantize"], "rules": [{"pattern": "*w", "group": "linear"}]}}
    dsq_ckpt.save({"model": {"w": values}, **others}, tmp_path / "a", config=config)
    rounded = kind == "named by a rule"
    assert torch.equal(loaded(tmp_path / "a")["model"]["w"], values.bfloat16().float() if rounded else values)


def test_weights_that_no_optimizer_trains_are_exact(tmp_path):
    """An average of weights that is not near them, such as a table that another program made, has no state."""
    torch.manual_seed(0)
    state = {
        "model": {"w": torch.randn(128, 128), "table.weight": torch.randn(100, 128)},
        "optim": {"state": {"w": {name: torch.rand(128, 128) for name in ("exp_avg", "exp_avg_sq")}}},
    }
    dsq_ckpt.save(state, tmp_path / "a", config=BF16)
    after = loaded(tmp_path / "a")["model"]
    assert torch.equal(after["table.weight"], state["model"]["table.weight"])
    assert torch.equal(after["w"], state["model"]["w"].bfloat16().float())


@pytest.mark.parametrize("config", [BF16, {"quantize": {"groups": {"embedding": {"method": "bf16"}}}}])
def test_a_search_does_not_pass_over_them(tmp_path, config):
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64))

    def evaluate() -> float:
        with torch.no_grad():
            return float(model(torch.arange(100)).square().mean())

    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"does not measure what rounding to bf16 .* costs"):
        dsq_ckpt.Compressor(model, optimizer, config, evaluate).save(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"does not measure what rounding to bf16 .* costs in .*'0\.weight'"):
        dsq_ckpt.compress(model, tmp_path / "a", config=config, evaluate=evaluate)
    assert not (tmp_path / "a").exists()
    result = dsq_ckpt.Compressor(model, optimizer, config).save(tmp_path / "a")
    assert Manifest.read(tmp_path / "a").save_id == result.save_id
