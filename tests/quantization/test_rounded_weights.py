"""Weights that their module rounds in the forward pass are restored bit for bit, so that none is rounded otherwise."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, get_default_qat_qconfig, prepare_qat
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import dsq_ckpt
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.rounded_weights import find_rounded_weights
from tests.helpers.states import load_copy


def ternary(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().mean()
    return weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()


class Ternary(nn.Module):
    """A parametrization, as those of users are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return ternary(weight)


class TernaryLinear(nn.Linear):
    """A layer of BitNet b1.58."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, ternary(self.weight), self.bias)


class Own(TernaryLinear):
    """Some layer whose class comes from one with a telling name."""


class Wrapper(nn.Module):
    """A layer that keeps its weights in another one, and has a quantizer for them."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.linear, self.weight_quantizer = nn.Linear(64, 64), quantizer


def find_rounded(model: nn.Module) -> set[str]:
    return {name for name, is_rounded in find_rounded_weights(model).items() if is_rounded}


def parametrized(function: nn.Module, layer: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return parametrize.register_parametrization(layer or nn.Linear(96, 96), "weight", function)


def make_named_layer(name: str) -> nn.Module:
    layer: nn.Module = type(name, (nn.Linear,), {})(8, 8)
    return layer


@pytest.mark.parametrize("name", [
    "BitLinear", "AutoBitLinear", "BitLinear158b", "TernaryLinear", "BinaryConv2d", "BinarizeLinear", "HardBinaryConv",
    "QLinear", "QuantLinear", "QuantConv2d", "QuantConvTranspose2d", "FakeQuantizedLinear", "FakeQuantizedEmbedding",
    "Int8DynActInt4WeightQATLinear", "Conv2dLSQ", "Linear_Q", "TEQLinearFakeQuant",
])
def test_layers_are_known_by_the_name_of_their_class(name: str) -> None:
    assert find_rounded(make_named_layer(name)) == {"weight", "bias"}


@pytest.mark.parametrize("name", [
    "Linear", "Bilinear", "Linear4bit", "Linear8bitLt", "Float8Linear", "Conv1D", "SeqLinear", "UnitLinear",
    "LinearQKV", "NonDynamicallyQuantizableLinear", "BinnedEmbedding", "SignalConv", "EmbedSigns", "QueryEmbedding",
    "BinaryConvClassifier", "QDenseNet", "VQEmbedding", "LinearQ", "BinEmbedding", "QuantileLinear", "QuantityConv",
    "TernaryConvBlock",
])
def test_other_names_tell_nothing(name: str) -> None:
    assert find_rounded_weights(make_named_layer(name)) == {}


def test_ordinary_models_are_as_before() -> None:
    torch.manual_seed(0)
    layers = [parametrizations.weight_norm(nn.Linear(64, 64)), parametrizations.orthogonal(nn.Linear(64, 64)),
              parametrizations.spectral_norm(nn.Conv2d(8, 8, 3)), nn.TransformerEncoderLayer(64, 2), nn.LSTM(64, 64)]
    assert find_rounded_weights(nn.Sequential(*layers)) == find_rounded_weights(None) == {}


def test_a_script_tells_nothing_and_breaks_nothing() -> None:
    assert find_rounded_weights(torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(1, 8))) == {}


def test_all_names_of_a_tied_weight_are_reported() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 64), "head": TernaryLinear(64, 9), "other": nn.Linear(9, 9)})
    model["embedding"].weight = model["head"].weight
    assert find_rounded(model) == {"embedding.weight", "head.weight", "head.bias"}
    assert find_rounded(nn.Sequential(Own(64, 64))) == {"0.weight", "0.bias"}


def test_layers_with_quantizers_of_their_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).train()
    model.qconfig = get_default_qat_qconfig("fbgemm")
    model[2].qconfig = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao calls itself deprecated
        prepared = prepare_qat(model)
    assert find_rounded(prepared) == {"0.weight", "0.bias"}
    assert find_rounded(Wrapper(nn.Module())) == {"linear.weight", "linear.bias"}
    assert find_rounded_weights(Wrapper(nn.Identity())) == {}
    layer = nn.Linear(64, 64)
    layer.rounds = FakeQuantize()
    assert find_rounded(layer) == {"weight", "bias"}


@pytest.mark.parametrize("name, rounded", [
    ("BitNetTrainingLinearWeight", True), ("TernaryWeight", True), ("BinaryWeightTensor", True),
    ("FakeQuantTensor", True), ("AffineFakeQuantizedTensor", True), ("FakeQuantizedWeight", True),
    ("BitLinearWeight", True), ("TernaryParameter", True), ("Int8MixedPrecisionTrainingLinearWeight", False),
    ("BitNetPacked2bitLinearWeight", False),
    ("AffineQuantizedTensor", False), ("MyTensor", False), ("BinaryTreeNode", False),
])
def test_weights_are_known_by_the_name_of_their_own_class(name: str, rounded: bool) -> None:
    """No layer tells of torchao's BitNet training: its weights round themselves, and came back lossy."""
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(type(name, (torch.Tensor,), {})))
    assert type(layer.weight).__name__ == name and find_rounded(layer) == ({"weight"} if rounded else set())


@pytest.mark.parametrize("name", ["Ternary", "WeightQuantizer", "Int4FakeQuant", "RoundSTE", "Sign", "Binarize"])
def test_parametrizations_are_known_by_the_name_of_their_class(name: str) -> None:
    function: nn.Module = type(name, (nn.Tanh,), {})()
    assert find_rounded(parametrized(function)) == {"parametrizations.weight.original"}
    assert find_rounded(parametrized(FakeQuantize())) == {"parametrizations.weight.original"}


@pytest.mark.parametrize("name", ["Symmetric", "Signal", "Rounded", "Orthogonal", "Quantiles", "Stereo", "Clip"])
def test_other_parametrizations_tell_nothing(name: str) -> None:
    function: nn.Module = type(name, (nn.Tanh,), {})()
    assert find_rounded_weights(parametrized(function)) == {}


def test_other_attributes_tell_nothing() -> None:
    layer = nn.Linear(8, 8)
    layer.quantile_weights, layer.quantity_weight, layer.weight_quant_bits = (0.1, 0.9), 0.3, 4
    assert find_rounded_weights(nn.Sequential(layer)) == {}


def test_nothing_of_the_model_is_called(tmp_path: Path) -> None:
    """A parametrization may draw numbers, or change its parameters: a save leaves all as it is."""
    model = parametrized(Ternary())
    inner = model.parametrizations["weight"][0]
    before, calls = {name: value.clone() for name, value in model.state_dict().items()}, inner.calls
    with pytest.warns(UserWarning, match="the model rounds"):
        dsq_ckpt.save({"model": model.state_dict()}, tmp_path / "0", model=model)
    assert inner.calls == calls and all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_one_rank_that_knows_is_enough() -> None:
    """A rank may hold none of a parameter's rows."""
    tensors = {"a.weight": "weights/linear", "b.weight": "weights/linear"}
    groups = {"weights/linear": dsq_ckpt.DSQConfig().quantize.weights}
    parts = [Layout(tensors, groups), Layout(tensors, groups, rounded_weights=frozenset({"a.weight"}))]
    agreed = Layout.union(parts)
    assert agreed.tensors.keys() == {"b.weight"} and agreed.rounded_weights == {"a.weight"}
    assert Layout.union([agreed]) == agreed


def network() -> nn.Sequential:
    torch.manual_seed(0)
    inner = parametrized(Ternary(), nn.Linear(96, 96))
    return nn.Sequential(TernaryLinear(64, 96), nn.Tanh(), inner, nn.Linear(96, 64))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()


KEPT = {"model.0.weight", "model.2.parametrizations.weight.original"}


@pytest.mark.parametrize("stage", ["copy", "quantize", None])
def test_rounded_weights_are_exact_and_a_warning_says_so_once(
    stage: str | None, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The network computes the same with them after a restore; others of the model are lossy as ever."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(3):
        train(model, optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        path = tmp_path / str(number)
        if stage is None:
            dsq_ckpt.save(state, path, model=model)
        else:
            dsq_ckpt.async_save(state, path, model=model, config={"storage": {"stage": stage}}).result()
    restored = load_copy(tmp_path / "2", state)
    same = {
        f"model.{name}" for name, value in model.state_dict().items() if torch.equal(restored["model"][name], value)
    }
    assert same >= KEPT and "model.3.weight" not in same
    messages = [str(warning.message) for warning in recwarn if "the model rounds" in str(warning.message)]
    assert len(messages) == 1 and all(name in messages[0] for name in KEPT) and "model.3" not in messages[0]


def test_a_rule_has_the_last_word(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model = network()
    state = {"model": model.state_dict()}
    config = {"quantize": {"rules": [{"pattern": "model.*", "group": "linear"}]}}
    dsq_ckpt.save(state, tmp_path / "ruled", model=model, config=config)
    dsq_ckpt.save(state, tmp_path / "exact", model=model, config={"quantize": {"weights": {"method": "exact"}}})
    assert not [warning for warning in recwarn if "the model rounds" in str(warning.message)]
    restored = load_copy(tmp_path / "ruled", state)["model"]
    assert not torch.equal(restored["0.weight"], model[0].weight)


@pytest.mark.filterwarnings("ignore:the model rounds")
def test_a_compressor_and_a_model_that_is_compressed_keep_them(tmp_path: Path) -> None:
    """In a search too, which has no weights left to try where all are rounded."""
    model = nn.Sequential(TernaryLinear(64, 96), nn.Tanh(), TernaryLinear(96, 64))
    optimizer, inputs = torch.optim.Adam(model.parameters()), torch.randn(64, 64)
    train(model, optimizer)
    before = model(inputs)
    dsq_ckpt.compress(model, tmp_path / "model")
    for name, evaluate in (("plain", None), ("searched", lambda: float(model(inputs).square().mean()))):
        dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate).save(tmp_path / name / "step")
    for path in ("model", "plain/step", "searched/step"):
        restored = nn.Sequential(TernaryLinear(64, 96), nn.Tanh(), TernaryLinear(96, 64))
        dsq_ckpt.load(restored if path == "model" else {"model": restored}, tmp_path / path)
        assert torch.equal(restored(inputs), before)
