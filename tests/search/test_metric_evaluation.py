"""A metric that is chance is said, whichever random numbers it draws, and others are not."""

from __future__ import annotations

import itertools
import random
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dsq_ckpt
from tests.helpers.training import Net, compute_loss, make_batch, train, train_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
AGAIN = " when asked again"
CHANCE = "is not deterministic: of the same weights it gave"


def loss_on(model: Net, step: int) -> float:
    return compute_loss(model, 20_000 + step)


def metrics(model: Net, kind: str):
    """Return a metric that is another one at each call."""
    numbers, own = itertools.count(), np.random.default_rng(0)
    if kind == "dropout":
        def with_dropout() -> float:
            tokens, targets = make_batch(10_000)
            model.train()
            with torch.no_grad():
                return float(nn.functional.cross_entropy(model(tokens), targets))
        return with_dropout
    draw = {
        "torch": lambda: int(torch.randint(1 << 20, ())), "numpy": lambda: np.random.randint(1 << 20),
        "python": lambda: random.randrange(1 << 20), "its own": lambda: int(own.integers(1 << 20)),
        "next batch": lambda: next(numbers),
    }[kind]
    return lambda: loss_on(model, draw())


def find_messages(recorded: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in recorded if CHANCE in str(warning.message)]


@pytest.mark.parametrize("kind", ["dropout", "torch", "numpy", "python", "its own", "next batch"])
def test_a_metric_that_is_chance_is_reported_once(tmp_path, kind):
    model, optimizer = train_model(60)
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=metrics(model, kind))
    state = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    messages = []
    for number in range(2):
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            compressor.save(tmp_path / str(number))
        messages.append(find_messages(recorded))
    assert [len(texts) for texts in messages] == [1, 0], messages
    assert "`evaluate`" in messages[0][0] and "0.02 %" in messages[0][0], "the bound that a restore has"
    assert (random.getstate(), np.random.get_state()[2]) == state[:2] and torch.equal(torch.get_rng_state(), state[2])


@pytest.mark.parametrize("function", ["evaluate", "check"])
def test_a_snapshot_by_a_metric_that_is_chance_is_reported(tmp_path, function):
    model, _ = train_model(60)
    functions = {"evaluate": lambda: compute_loss(model), function: metrics(model, "torch")}
    with pytest.warns(UserWarning, match=f"`{function}` {CHANCE}.* a bound of this search is 0.1 %"):
        dsq_ckpt.compress(model, tmp_path / "a", max_degradation=0.001, probes=0, **functions)


def test_noise_that_no_bound_notices_is_not_said(tmp_path):
    """Without a refinement layer there is no bound on restores, and a base layer may cost 5 %."""
    model, optimizer = train_model(60)
    functions = {"fixed batches": lambda: compute_loss(model), "a little": lambda: compute_loss(model) * (1 + noise())}

    def noise() -> float:
        return float(torch.rand(())) / 100

    for name, config in (("fixed batches", {}), ("a little", {"system": "uniform"})):
        compressor = dsq_ckpt.Compressor(model, optimizer, config, functions[name])
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            compressor.save(tmp_path / name)
        assert not find_messages(recorded)
        assert ("noise" in compressor.quality) == (name == "a little")


def test_a_bound_that_is_used_up_is_not_kept_by_chance(tmp_path):
    """Weights are stored exactly then, whatever a GPU's order of sums does to the last bits of a metric."""
    model, optimizer = train_model(60)
    dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "1")
    sign = itertools.cycle((1, -1))
    compressor = dsq_ckpt.Compressor(
        model, optimizer, {"search": {"max_run_loss": 0.005}}, lambda: compute_loss(model) * (1 + 1e-7 * next(sign))
    )
    compressor.load(tmp_path / "1")
    with pytest.warns(UserWarning, match="are stored exactly") as recorded:
        compressor.save(tmp_path / "2")
    assert not find_messages(list(recorded))


def test_weights_are_exact_where_a_restore_has_no_finite_metric(tmp_path):
    model, optimizer = train_model(60)
    trained = torch.cat([weight.detach().flatten() for weight in model.parameters()])

    def evaluate() -> float:
        moved = torch.cat([weight.detach().flatten() for weight in model.parameters()]) - trained
        return float("nan") if 0 < moved.norm() / trained.norm() < 0.02 else compute_loss(model)

    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate)
    with pytest.warns(UserWarning, match="no refinement of 8 bits keeps to a finite metric; the weights .* exactly"):
        compressor.save(tmp_path / "a")
    exact = compute_loss(model)
    compressor.load(tmp_path / "a")
    assert compute_loss(model) == exact


def test_the_same_seed_gives_the_same_trials(tmp_path):
    """So that ranks that draw alike, as for the length of a batch, go on to draw alike."""
    drawn = []
    for name in "ab":
        model, optimizer = train_model(20)
        train(model, optimizer, 20, 21)
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(7)
        drawn.append([])

        def evaluate(model=model) -> float:
            drawn[-1].append((torch.rand(()).item(), np.random.rand(), random.random()))
            return compute_loss(model)

        dsq_ckpt.compress(model, tmp_path / name, evaluate=evaluate, max_degradation=0.05, probes=0)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 2, "one trial has others"


@pytest.mark.parametrize("value, function, call, when", [
    (float("nan"), "evaluate", 1, ""), (float("nan"), "check", 2, AGAIN), (float("inf"), "evaluate", 2, AGAIN),
    (float("inf"), "check", 1, ""), (-1e305, "evaluate", 1, ""), (-1e305, "check", 2, AGAIN),  # all pairs of these
])
def test_a_first_metric_without_a_finite_number_leads_to_the_fallback(tmp_path, value, function, call, when):
    """Also one that is only too large for the manifest: the commit failed."""
    model, optimizer = train_model(60)
    calls = itertools.count(1)
    functions = {name: lambda: compute_loss(model) for name in ("evaluate", "check")}
    functions[function] = lambda: value if next(calls) == call else compute_loss(model)
    compressor = dsq_ckpt.Compressor(model, optimizer, **functions)
    gave = f"`{function}` gave {value} for the model as it is{when}, before"
    with pytest.warns(UserWarning, match=f"{re.escape(gave)}.* conservative"):
        compressor.save(tmp_path / "a")
    assert not compressor.quality["satisfied"]
    compressor.save(tmp_path / "b")
    assert compressor.quality["satisfied"]


@pytest.mark.parametrize("value", [0.0, -1e290, 1e-310])
@pytest.mark.parametrize("other", [1e298, 1e305])
def test_all_metrics_of_any_size_are_recorded(tmp_path, value, other):
    """Their ratios and differences may be beyond what a manifest holds."""
    model, _ = train_model(0)
    for at in (2, 4, 7):
        calls = itertools.count(1)
        compressor = dsq_ckpt.Compressor(
            model, evaluate=lambda at=at, calls=calls: value if next(calls) != at else other
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compressor.save(tmp_path / str(at))
        assert compressor.quality["metric"] == value
