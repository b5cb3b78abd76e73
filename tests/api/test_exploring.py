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
    points = dsq_ckpt.explore(
        model, tmp_path, evaluate=lambda: loss(model), check=lambda: loss(model, slice(128, 256)),
        bounds=[0.01, 0.1, 0.05], probes=4, progress=seen.append,
    )
    assert find_differences(model.state_dict(), before) == []
    assert [point.path for point in points] == [tmp_path / f"within-{bound}" for bound in ("0.1", "0.05", "0.01")]
    assert [point.path for point in seen] == [point.path for point in points]
    exact, other = (loss(model), loss(model, slice(128, 256))), net()
    for point in points:
        other.load_state_dict(load_copy(point.path, before))
        assert loss(other) / exact[0] - 1 == pytest.approx(point.degradation, abs=1e-6)
        assert loss(other, slice(128, 256)) / exact[1] - 1 == pytest.approx(point.check_degradation, abs=1e-6)
        assert max(point.degradation, point.check_degradation) <= point.max_degradation
        assert point.bytes_kept == dsq_ckpt.describe(point.path)["bytes_kept"] < point.bytes_logical
        assert point.evaluations > 1 and point.seconds > 0
    smallest = min(points, key=lambda point: (point.bytes_kept, max(point.degradation, point.check_degradation)))
    assert smallest.on_front


def test_it_ends_with_the_first_bound_that_nothing_keeps(tmp_path):
    model = net()

    def brittle() -> float:
        return 1.0 if find_differences(model.state_dict(), state) == [] else 1.07

    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="stored exactly"):
        points = dsq_ckpt.explore(model, tmp_path, evaluate=brittle, bounds=[0.1, 0.05, 0.01], probes=0)
    assert [(point.max_degradation, point.degradation) for point in points] == [(0.1, pytest.approx(0.07)), (0.05, 0.0)]
    assert [point.exact for point in points] == [False, True]
    assert find_differences(load_copy(points[1].path, state), state) == []
    assert not (tmp_path / "within-0.01").exists()


def test_a_metric_that_stays_the_same_does_not_mean_exact(tmp_path):
    """As an accuracy does: the degradation by `check` is told all the same, and the weights are not exact."""
    model = net()
    whole = loss(model)

    def steady() -> float:
        return 1.0 if abs(loss(model) - whole) < 0.05 * whole else 2.0

    points = dsq_ckpt.explore(
        model, tmp_path, evaluate=steady, check=lambda: loss(model, slice(128, 256)), bounds=[0.05], probes=0
    )
    assert [(point.degradation, point.exact) for point in points] == [(0.0, False)]
    assert 0 < points[0].check_degradation <= 0.05


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
    points = dsq_ckpt.explore(model, tmp_path / "b", evaluate=evaluate, bounds=[0.1, 0.01], overwrite=True, probes=0)
    assert len(points) == 2 and calls


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-2, 2)), min_size=1, max_size=6))
def test_the_front_is_what_nothing_else_beats(figures):
    def at(size: int, degradation: int) -> Tradeoff:
        return Tradeoff(0.1, float(degradation), None, False, 100, size, 1, 1.0, False, path=None)

    marked = _mark_front([at(size, degradation) for size, degradation in figures])
    front = {(point.bytes_kept, point.degradation) for point in marked if point.on_front}
    strictly = {
        (size, degradation) for size, degradation in figures
        if not any(s <= size and h <= degradation and (s, h) != (size, degradation) for s, h in figures)
    }
    assert front == strictly and len(front) == sum(point.on_front for point in marked)  # of equal ones, one
