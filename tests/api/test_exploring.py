"""`explore`: each bound is kept as others measure it, and who is beaten is told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dsq_ckpt
from dsq_ckpt import CheckpointExists, ConfigError, Tradeoff
from dsq_ckpt.api.exploring import _mark_front
from tests.helpers.states import find_differences, load_copy

pytestmark = pytest.mark.usefixtures("one_thread")
X, Y = (torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))


def loss(model: nn.Module, rows: slice = slice(0, 128)) -> float:
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(X[rows]), Y[rows]))


def test_each_bound_is_kept_and_beaten_ones_are_reported(tmp_path):
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []
    found = dsq_ckpt.explore(
        model, tmp_path, evaluate=lambda: loss(model), check=lambda: loss(model, slice(128, 256)),
        bounds=[0.01, 0.1, 0.05], probes=4, progress=seen.append,
    )
    assert find_differences(model.state_dict(), before) == []
    assert [one.path for one in found] == [tmp_path / f"within-{bound}" for bound in ("0.1", "0.05", "0.01")]
    assert [one.path for one in seen] == [one.path for one in found]
    exact, other = (loss(model), loss(model, slice(128, 256))), net()
    for one in found:
        other.load_state_dict(load_copy(one.path, before))
        assert loss(other) / exact[0] - 1 == pytest.approx(one.degradation, abs=1e-6)
        assert loss(other, slice(128, 256)) / exact[1] - 1 == pytest.approx(one.check_degradation, abs=1e-6)
        assert max(one.degradation, one.check_degradation) <= one.max_degradation
        assert one.bytes_kept == dsq_ckpt.describe(one.path)["bytes_kept"] < one.bytes_logical
        assert one.evaluations > 1 and one.seconds > 0
    smallest = min(found, key=lambda one: (one.bytes_kept, max(one.degradation, one.check_degradation)))
    assert smallest.on_front


def test_it_ends_with_the_first_bound_that_nothing_keeps(tmp_path):
    model = net()

    def brittle() -> float:
        return 1.0 if find_differences(model.state_dict(), state) == [] else 1.07

    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="stored exactly"):
        found = dsq_ckpt.explore(model, tmp_path, evaluate=brittle, bounds=[0.1, 0.05, 0.01], probes=0)
    assert [(one.max_degradation, one.degradation) for one in found] == [(0.1, pytest.approx(0.07)), (0.05, 0.0)]
    assert [one.exact for one in found] == [False, True]
    assert find_differences(load_copy(found[1].path, state), state) == []
    assert not (tmp_path / "within-0.01").exists()


def test_a_metric_that_stays_the_same_does_not_mean_exact(tmp_path):
    """As an accuracy does: the harm by `check` is told all the same, and the weights are not exact."""
    model = net()
    whole = loss(model)

    def steady() -> float:
        return 1.0 if abs(loss(model) - whole) < 0.05 * whole else 2.0

    found = dsq_ckpt.explore(
        model, tmp_path, evaluate=steady, check=lambda: loss(model, slice(128, 256)), bounds=[0.05], probes=0
    )
    assert [(one.degradation, one.exact) for one in found] == [(0.0, False)]
    assert 0 < found[0].check_degradation <= 0.05


def test_nothing_is_searched_if_a_bound_is_wrong_or_a_checkpoint_is_there(tmp_path):
    model, calls = net(), []

    def evaluate() -> float:
        calls.append(1)
        return loss(model)

    for bounds in ([], [0.1, 0.1], [0.1, 0.1 + 1e-9], [0.1, 0.0], [float("nan")], ["0.1"], [True], 0.05, "0.1", None):
        with pytest.raises(ConfigError, match=r"bounds are .*; expected"):
            dsq_ckpt.explore(model, tmp_path / "a", evaluate=evaluate, bounds=bounds)
    dsq_ckpt.save(model.state_dict(), tmp_path / "b" / "within-0.01")
    with pytest.raises(CheckpointExists, match=r"within-0\.01"):
        dsq_ckpt.explore(model, tmp_path / "b", evaluate=evaluate, bounds=[0.1, 0.01])
    assert not calls and not (tmp_path / "a").exists() and not (tmp_path / "b" / "within-0.1").exists()
    found = dsq_ckpt.explore(model, tmp_path / "b", evaluate=evaluate, bounds=[0.1, 0.01], overwrite=True, probes=0)
    assert len(found) == 2 and calls


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-2, 2)), min_size=1, max_size=6))
def test_the_front_is_what_nothing_else_beats(figures):
    def at(size: int, harm: int) -> Tradeoff:
        return Tradeoff(0.1, float(harm), None, False, 100, size, 1, 1.0, False, path=None)

    marked = _mark_front([at(size, harm) for size, harm in figures])
    front = {(one.bytes_kept, one.degradation) for one in marked if one.on_front}
    strictly = {
        (size, harm) for size, harm in figures
        if not any(s <= size and h <= harm and (s, h) != (size, harm) for s, h in figures)
    }
    assert front == strictly and len(front) == sum(one.on_front for one in marked)  # of equal ones, one
