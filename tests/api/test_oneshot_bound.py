"""`compress` with a bound: kept as others measure it, configured, and what it says about models that do not fit."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt import ConfigError, DSQConfig, SaveFailed
from dsq_ckpt.api.oneshot_config import _bounded_config
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.source_files import plain_state, write_safetensors, write_torch
from tests.helpers.states import find_differences, load_copy

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A regression of noise: its loss stays well above zero, so that a relative bound means something."""

    def __init__(self, seed: int = 0, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(64, 64, bias=False)
            self.hidden = nn.Linear(64, 64)
            self.last = nn.Linear(64, 64, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(torch.relu(self.first(x)))))

    def loss(self) -> float:
        with torch.no_grad():
            return float(nn.functional.mse_loss(self(*data()[:1]), data()[1]))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(256, 64, generator=g), torch.randn(256, 64, generator=g)


@functools.cache
def trained_weights(tied: bool) -> dict[str, torch.Tensor]:
    model = Net(tied=tied)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        nn.functional.mse_loss(model(data()[0]), data()[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(tied: bool = False) -> Net:
    model = Net(seed=1, tied=tied)
    model.load_state_dict(trained_weights(tied))
    return model


def measured(path: Path, exact: Net, *prefix: str, **options) -> float:
    """Degradation by a checkpoint, told by a model that knows nothing of the search."""
    other = Net(seed=9)
    state = inner = {}
    for name in prefix:
        inner[name] = {}
        inner = inner[name]
    inner.update(other.state_dict())
    dsq_ckpt.load(state, path, **options)
    other.load_state_dict(inner)
    return other.loss() / exact.loss() - 1


def test_a_bound_is_kept(tmp_path):
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = []
    for bound in (0.01, 0.1):
        path = tmp_path / str(bound)
        result = dsq_ckpt.compress(model, path, evaluate=model.loss, max_degradation=bound)
        quality = result["quality"]
        assert quality["satisfied"] and quality["bound"] == "relative" and quality["chosen"]
        assert 0 < measured(path, model) <= bound
        assert measured(path, model) == pytest.approx(quality["degradation"], abs=1e-6)
        assert result["refinement"] == "none"
        sizes.append(result["by_kind"]["weights"]["bytes_base"])
        quality.clear()  # the caller's own, while parsed manifests are kept
        assert Manifest.read(path).quality["satisfied"]
    assert sizes[1] < sizes[0]
    assert find_differences(model.state_dict(), before) == []


def test_a_script(tmp_path):
    exact = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.trace(exact, data()[0])

    def loss() -> float:
        with torch.no_grad():
            return float(nn.functional.mse_loss(model(data()[0]), data()[1]))

    result = dsq_ckpt.compress(model, tmp_path / "a", evaluate=loss, max_degradation=0.05)
    assert result["quality"]["compensated"] == 1
    assert measured(tmp_path / "a", exact) == pytest.approx(result["quality"]["degradation"], abs=1e-6)
    assert find_differences(model.state_dict(), exact.state_dict()) == []


@pytest.mark.parametrize("form", ["safetensors", "torch", "state dict", "tied"])
def test_a_bound_with_a_model_beside_the_source(tmp_path, form):
    exact = trained(tied=form == "tied")
    weights = dict(exact.state_dict())
    if form == "tied":
        del weights["last.weight"]  # as safetensors files leave out what is there under another name
    source, prefix = weights, []
    if form in ("safetensors", "tied"):
        source = write_safetensors(weights, tmp_path / "source")
    elif form == "torch":
        source, prefix = write_torch({"epoch": 3, "nets": {"best": weights}}, tmp_path / "source"), ["nets", "best"]
    model = Net(seed=5, tied=form == "tied")
    result = dsq_ckpt.compress(source, tmp_path / "a", evaluate=model.loss, max_degradation=0.05, model=model)
    assert find_differences(dict(model.state_dict()), dict(exact.state_dict())) == []
    if form == "tied":
        assert set(load_copy(tmp_path / "a", weights)) == set(weights)
        assert result["quality"]["satisfied"]
    else:
        assert measured(tmp_path / "a", exact, *prefix) == pytest.approx(result["quality"]["degradation"], abs=1e-6)
        assert measured(tmp_path / "a", exact, *prefix) <= 0.05


def test_a_bound_that_nothing_keeps_means_exact(tmp_path):
    model = trained()
    exact = {name: value.clone() for name, value in model.state_dict().items()}

    def evaluate():
        return 1.0 + bool(find_differences(dict(model.state_dict()), exact))

    with pytest.warns(UserWarning, match="stored exactly"):
        dsq_ckpt.compress(model, tmp_path / "a", evaluate=evaluate, max_degradation=0.01)
    assert find_differences(load_copy(tmp_path / "a", exact), exact) == []
    conservative = {"search": {"fallback": "conservative"}}
    with pytest.warns(UserWarning, match="most conservative"):
        dsq_ckpt.compress(model, tmp_path / "b", config=conservative, evaluate=evaluate, max_degradation=0.01)
    assert find_differences(load_copy(tmp_path / "b", exact), exact) != []


def test_evaluate_alone_searches_as_configured(tmp_path):
    model = trained()
    config = {"search": {"epsilon": 0.2}, "system": "uniform", "storage": {"fsync": False}}
    result = dsq_ckpt.compress(model, tmp_path / "a", config=config, evaluate=model.loss)
    assert result["quality"]["bound"] == "progress" and result["quality"]["system"] == "uniform"
    assert 0.01 < measured(tmp_path / "a", model, refinement=False) <= 0.2


def test_a_configuration_goes_over_the_bound(tmp_path):
    def bits(config):
        quantize = _bounded_config(config, 0.02, 64).quantize
        return [getattr(quantize, kind).refinement_bits for kind in ("weights", "exp_avg", "exp_avg_sq", "momentum")]

    (tmp_path / "c.yaml").write_text("quantize: {weights: {refinement_bits: 4}}")
    step = DSQConfig().with_values(**{"quantize.weights.codebook.step": 1.0})
    assert bits(None) == bits({"system": "uniform"}) == bits(step) == bits(DSQConfig()) == [0, 0, 0, 0]
    assert bits(tmp_path / "c.yaml") == [4, 0, 0, 0]
    assert bits({"quantize": {"exp_avg": {"refinement_bits": 2}}}) == [0, 2, 0, 0]
    assert bits(DSQConfig().with_values(**{"quantize.weights.refinement_bits": 6})) == [6, 0, 0, 0]
    bound = _bounded_config(step, 0.02, 64)
    assert bound.quantize.weights.codebook.step == 1.0 and bound.quantize.exp_avg == DSQConfig().quantize.exp_avg \
        .model_copy(update={"refinement_bits": 0})
    assert (bound.search.epsilon, bound.search.bound, bound.search.fallback) == (0.02, "relative", "exact")
    groups = DSQConfig.create({"quantize": {"groups": {"embedding": {"codebook": {"step": 0.3}}}}})
    for config in (groups, {"quantize": {"groups": {"embedding": {"codebook": {"step": 0.3}}}}}):
        group = _bounded_config(config, 0.02, 64).quantize.groups["embedding"]
        assert (group.codebook.step, group.refinement_bits) == (0.3, 0)
    preset = _bounded_config(DSQConfig.preset("moments_exact"), 0.02, 64)
    assert preset.quantize.exp_avg.method == "exact" and preset.quantize.weights.method == "quantize"
    with pytest.raises(ConfigError, match=r"c\.yaml: 1 problem"):
        (tmp_path / "c.yaml").write_text("quantise: {}")
        _bounded_config(tmp_path / "c.yaml", 0.02, 64)


# Errors


def test_arguments_that_contradict_each_other(tmp_path):
    model, state, out = Net(), plain_state(), tmp_path / "out"
    with pytest.raises(ConfigError, match="max_degradation needs evaluate"):
        dsq_ckpt.compress(model, out, max_degradation=0.1)
    with pytest.raises(ConfigError, match="evaluate needs model"):
        dsq_ckpt.compress(state, out, evaluate=model.loss, max_degradation=0.1)
    with pytest.raises(ConfigError, match="leave model out"):
        dsq_ckpt.compress(model, out, evaluate=model.loss, model=Net())
    for bound in (0, -1, math.nan, 1, 5, 10, True, "0.05", [0.05]):
        with pytest.raises(ConfigError, match=r"max_degradation is .*preset 'exact'"):
            dsq_ckpt.compress(model, out, evaluate=model.loss, max_degradation=bound)


def test_models_that_do_not_match(tmp_path):
    model, out = Net(), tmp_path / "out"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own = {name: value + 1 for name, value in before.items()}
    for source, says in (
        (plain_state(), r"none of the model's keys \('first\.weight', .* and 1 more\); it has 'embed\.weight'"),
        ({"epoch": 1, "net": own | {"extra": torch.ones(3)}}, r"entry 'net' .*missing are none; not .* are 'extra'"),
        ({name: own[name] for name in list(own)[1:]}, r"the source has other keys .*missing are 'first\.weight'"),
        ({"net": own | {"first.weight": torch.ones(3)}}, r"'net\.first\.weight' of the source is float32 \(3,\), but"),
        (own | {"last.weight": own["last.weight"].half()}, r"float16 \(64, 64\), but float32 .*model\.to"),
    ):
        with pytest.raises(ConfigError, match=says):
            dsq_ckpt.compress(source, out, evaluate=model.loss, model=model)
    assert find_differences(dict(model.state_dict()), before) == [] and not out.exists()


@pytest.mark.parametrize("bad", ["raises", "raises later", "nan"])
def test_an_evaluation_that_fails(tmp_path, bad):
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def evaluate():
        if bad == "nan":
            return math.nan
        if bad == "raises" or find_differences(dict(model.state_dict()), before):
            raise RuntimeError("no data")
        return 1.0

    says = "gave nan for the model as it is" if bad == "nan" else "`evaluate` raised RuntimeError: no data"
    with pytest.warns(UserWarning), pytest.raises(SaveFailed, match=says):
        dsq_ckpt.compress(model, tmp_path / "out", evaluate=evaluate, max_degradation=0.1)
    assert find_differences(dict(model.state_dict()), before) == []
    assert not (tmp_path / "out" / "manifest.json").exists()
