"""One-shot codes that make up for each other's errors: smaller, what was measured, and of nothing else than weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq_ckpt
from tests.helpers.states import load_copy

pytestmark = pytest.mark.usefixtures("one_thread")


class Regression(nn.Module):
    """Two layers on inputs that have much in common, fitted to noise: its loss is well above zero."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(96, 96), nn.Linear(96, 96)
            self.x = torch.randn(512, 12) @ torch.randn(12, 96)
            self.y = torch.randn(512, 96)
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            for _ in range(60):
                optimizer.zero_grad()
                self.fit().backward()
                optimizer.step()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))

    def fit(self) -> Tensor:
        return F.mse_loss(self(self.x), self.y)

    @torch.no_grad()
    def loss(self) -> float:
        return float(self.fit())


def test_a_checkpoint_is_smaller_and_is_what_was_measured(tmp_path):
    model = Regression()
    exact = model.loss()
    plain = dsq_ckpt.compress(model, tmp_path / "plain", evaluate=hidden(model), max_degradation=0.01)
    result = dsq_ckpt.compress(model, tmp_path / "found", evaluate=model.loss, max_degradation=0.01)
    assert plain["quality"].get("compensated") is None and result["quality"]["compensated"] == 1
    assert result["bytes_kept"] < 0.85 * plain["bytes_kept"]
    model.load_state_dict(load_copy(tmp_path / "found", model.state_dict()))
    assert model.loss() / exact - 1 == pytest.approx(result["quality"]["degradation"], rel=1e-6)
    assert result["by_kind"]["weights"]["bytes_base"] == pytest.approx(result["quality"]["predicted_bytes"], rel=0.1)


def hidden(model: Regression) -> Callable[[], float]:
    """Return the metric of copies of the weights, in which nothing is seen."""
    def loss() -> float:
        with torch.no_grad():
            state = {name: value.clone() for name, value in model.state_dict().items()}
            return float(F.mse_loss(torch.func.functional_call(model, state, (model.x,)), model.y))

    return loss


def test_an_evaluation_that_cannot_be_looked_into(tmp_path):
    model = Regression()

    def loss() -> float:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise NotImplementedError("no modes here")
        return model.loss()

    result = dsq_ckpt.compress(model, tmp_path / "a", evaluate=loss, max_degradation=0.01)
    assert result["quality"]["satisfied"] and "compensated" not in result["quality"]


def test_a_bound_that_nothing_keeps_where_nothing_can_be_looked_into(tmp_path):
    model = Regression()
    exact = {name: value.clone() for name, value in model.state_dict().items()}

    def loss() -> float:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise NotImplementedError("no modes here")
        return model.loss()

    with pytest.warns(UserWarning, match="stored exactly"):
        result = dsq_ckpt.compress(model, tmp_path / "a", evaluate=loss, max_degradation=1e-12)
    assert not result["quality"]["satisfied"]
    read = load_copy(tmp_path / "a", exact)
    assert all(torch.equal(read[name], value) for name, value in exact.items())


def test_defaults_of_torch_do_not_matter(tmp_path):
    model, results = Regression(), []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            results.append(dsq_ckpt.compress(model, tmp_path / str(dtype), evaluate=model.loss, max_degradation=0.01))
        finally:
            torch.set_default_dtype(torch.float32)
    assert [result["quality"]["compensated"] for result in results] == [1, 1, 1]
    assert len({result["quality"]["degradation"] for result in results}) == 1


@pytest.mark.parametrize("granularity", ["layer", "tensor"])
def test_weights_beside_the_model(tmp_path, granularity):
    """An average of the weights has no inputs: in one group with the weights, all codes are nearest ones."""
    model = Regression()
    average = {name: value * 0.5 for name, value in model.state_dict().items()}
    state = {"model": dict(model.state_dict()), "average": average}
    result = dsq_ckpt.compress(
        state, tmp_path / "a", model=model, evaluate=model.loss, max_degradation=0.05,
        config={"quantize": {"granularity": granularity}},
    )
    assert result["quality"].get("compensated") == (None if granularity == "layer" else 1)
    read = load_copy(tmp_path / "a", {"average": average})
    for name, value in average.items():
        assert float((read["average"][name] - value).norm() / value.norm()) < 0.5, name


def test_scaled_tensors_of_one_group(tmp_path):
    """Tensors of one codebook, a hundred times as large as each other."""
    model = Regression()
    with torch.no_grad():
        model.first.weight *= 100
        model.x /= 100
    exact = model.loss()
    result = dsq_ckpt.compress(
        model, tmp_path / "a", evaluate=model.loss, max_degradation=0.01, config={"quantize": {"granularity": "layer"}},
    )
    assert result["quality"]["compensated"] == 1
    model.load_state_dict(load_copy(tmp_path / "a", model.state_dict()))
    assert model.loss() / exact - 1 == pytest.approx(result["quality"]["degradation"], rel=1e-6)


def test_small_weights_have_steps_and_small_moments_stay(tmp_path):
    model = nn.Sequential(nn.Linear(96, 20), nn.Linear(20, 96))
    x, y = torch.randn(64, 96), torch.randn(64, 96)
    optimizer = torch.optim.Adam(model.parameters())
    F.mse_loss(model(x), y).backward()
    optimizer.step()

    def loss() -> float:
        with torch.no_grad():
            return float(F.mse_loss(model(x), y))

    alone = dsq_ckpt.compress(model, tmp_path / "a", evaluate=loss, max_degradation=0.05)
    assert len(alone["quality"]["steps"]) == 2
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    dsq_ckpt.compress(state, tmp_path / "b", model=model, evaluate=loss, max_degradation=0.05)
    moments = optimizer.state_dict()["state"][0]
    read = load_copy(tmp_path / "b", state)["optimizer"]["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(read[name], moments[name], rtol=0.004), name


def test_codes_of_a_model_that_learned_nothing(tmp_path):
    """Nearest codes are smaller than those that make up for errors, and serve a metric that bears all errors."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = nn.Linear(128, 128), torch.randn(256, 128), 100 * torch.randn(256, 128)

    def loss() -> float:
        with torch.no_grad():
            return float(F.mse_loss(model(x), y))

    sizes = [
        dsq_ckpt.compress(model, tmp_path / str(probes), evaluate=loss, max_degradation=0.05, probes=probes)
        ["by_kind"]["weights"]["bytes_base"] for probes in (0, 64)
    ]
    assert sizes[1] <= sizes[0] + 100


def test_tied_weights_and_transposed_ones(tmp_path):
    class Tied(Regression):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.first(x)) @ self.first.weight

    model = Tied()
    exact = model.loss()
    result = dsq_ckpt.compress(model, tmp_path / "a", evaluate=model.loss, max_degradation=0.05)
    model.load_state_dict(load_copy(tmp_path / "a", model.state_dict()))
    assert model.loss() / exact - 1 == pytest.approx(result["quality"]["degradation"], rel=1e-6)


def test_a_refinement_layer_is_of_the_values_themselves(tmp_path):
    model = Regression()
    config = {"quantize": {"weights": {"refinement_bits": 8}}}
    result = dsq_ckpt.compress(model, tmp_path / "a", config=config, evaluate=model.loss, max_degradation=0.01)
    assert "compensated" not in result["quality"]
    read = load_copy(tmp_path / "a", model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.allclose(read[name], value, atol=2e-3 * float(value.std())), name
