"""`check`: a search that fits the batches of `evaluate` keeps its bounds on others too, or says that it did not."""

from __future__ import annotations

import math

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.commands import dsq_stdout
from tests.helpers.states import relative_error
from tests.helpers.training import Net, compute_loss, train, train_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
OTHER = 10_001
"""A batch that no `evaluate` of these tests looks at."""


def overfitted(model, seed, elements=6):
    """A metric that has eyes for a few weights only, and hardly for these."""
    weight = model.hidden.weight
    seen = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))[:elements]
    before = weight.detach().flatten()[seen].clone()
    return lambda: 1.0 + 1e-3 * float((weight.detach().flatten()[seen] - before).abs().sum())


def restored_loss(path, refinement, alone=False):
    """Of the base layer, or with refinement, by a model that knows nothing of the search."""
    other = Net(seed=5)
    state = other.state_dict()
    dsq_ckpt.load(state if alone else {"model": state}, path, refinement=refinement)
    other.load_state_dict(state)
    return compute_loss(other, OTHER)


@pytest.mark.parametrize("system, seed, epsilon", [
    ("dsq", 0, 0.05), *(pytest.param("dsq", *case, marks=pytest.mark.campaign) for case in ((1, 0.02), (2, 0.1))),
    ("uniform", 0, 0.02), ("kmeans", 1, 0.02),
])
def test_a_configuration_that_suits_evaluate_alone_is_not_chosen(tmp_path, system, seed, epsilon):
    model, optimizer = train_model(150)
    exact, config = compute_loss(model, OTHER), {"system": system, "search": {"epsilon": epsilon}}
    alone = dsq_ckpt.Compressor(model, optimizer, config, overfitted(model, seed))
    alone.save(tmp_path / "alone" / "a")
    assert alone.quality["satisfied"]
    assert restored_loss(tmp_path / "alone" / "a", False) / exact - 1 > epsilon, "else this test shows nothing"
    checked = dsq_ckpt.Compressor(
        model, optimizer, config, overfitted(model, seed), check=lambda: compute_loss(model, OTHER)
    )
    for number in range(2):  # by the exhaustive search and by the neighbourhood
        train(model, optimizer, 150 + 10 * number, 160 + 10 * number)
        exact = compute_loss(model, OTHER)
        path = tmp_path / "checked" / str(number)
        checked.save(path)
        quality = Manifest.read(path).quality
        lost = restored_loss(path, False) / exact - 1
        assert lost <= epsilon or not quality["satisfied"]
        assert quality["satisfied"] and quality["chosen"] != alone.quality["chosen"]
        assert number or quality["predicted_bytes"] > 1.2 * alone.quality["predicted_bytes"]
        assert quality["check_metric"] == pytest.approx(exact, rel=1e-6)
        assert quality["check_degradation"] == pytest.approx(lost, abs=1e-6)
        if system == "dsq":  # which has a refinement layer
            changed = abs(restored_loss(path, True) - exact)
            assert changed == pytest.approx(quality["restore_loses"], abs=1e-6)
            assert changed <= quality["restore_may_lose"]


def test_a_check_that_nothing_keeps_is_reported(tmp_path):
    model, optimizer = train_model(60)
    exact = {name: value.clone() for name, value in model.state_dict().items()}

    def check():
        tensors = model.state_dict()
        return 1.0 + any(relative_error(value, tensors[name]) > 1e-3 for name, value in exact.items())

    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model), check=check)
    with pytest.warns(UserWarning, match="no configuration keeps .* by `evaluate` and by `check`.*most conservative"):
        compressor.save(tmp_path / "a")
    assert not compressor.quality["satisfied"] and compressor.quality["chosen"] is None
    with pytest.warns(UserWarning, match="stored exactly"):
        result = dsq_ckpt.compress(
            model, tmp_path / "b", evaluate=lambda: compute_loss(model), check=check, max_degradation=0.05
        )
    assert not result["quality"]["satisfied"]
    assert restored_loss(tmp_path / "b", "auto", alone=True) == compute_loss(model, OTHER)


def test_a_snapshot_keeps_its_bound_by_both(tmp_path):
    model, _ = train_model(60)
    result = dsq_ckpt.compress(
        model, tmp_path / "a", evaluate=overfitted(model, 0), check=lambda: compute_loss(model, OTHER),
        max_degradation=0.03,
    )
    lost = restored_loss(tmp_path / "a", "auto", alone=True) / compute_loss(model, OTHER) - 1
    assert result["quality"]["satisfied"] and lost <= 0.03
    assert lost == pytest.approx(result["quality"]["check_degradation"], abs=1e-6)


def test_two_evaluations_more_and_the_same_choice_where_both_agree(tmp_path):
    qualities = []
    for name, given in (("without", {}), ("with", {"check": True})):
        model, optimizer = train_model(100)
        check = {"check": lambda model=model: compute_loss(model)} if given else {}
        compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda model=model: compute_loss(model), **check)
        run_qualities = []
        for number in range(6):
            train(model, optimizer, 100 + 10 * number, 110 + 10 * number)
            compressor.save(tmp_path / name / str(number))
            run_qualities.append(compressor.quality)
        qualities.append(run_qualities)
    for without, having in list(zip(*qualities, strict=True)):
        same = ("chosen", "degradation", "refinement_bits", "restore_loses", "restore_may_lose", "predicted_bytes")
        assert {key: having[key] for key in same} == {key: without[key] for key in same}
        assert "checks" not in without and "check_metric" not in without
    usual = [
        having["evaluations"] + having["checks"] - without["evaluations"]
        for without, having in list(zip(*qualities, strict=True))[1:] if having["search"] == "neighbourhood"
    ]
    assert sum(more <= 2 for more in usual) >= len(usual) - 1 and len(usual) >= 4, usual


def test_a_search_continues_by_what_its_checkpoint_says_of_check(tmp_path):
    model, optimizer = train_model(60)
    compressor = dsq_ckpt.Compressor(
        model, optimizer, evaluate=overfitted(model, 3), check=lambda: compute_loss(model, OTHER)
    )
    compressor.save(tmp_path / "a")
    before = compressor.quality["check_metric"]
    model, optimizer = train_model(0)
    resumed = dsq_ckpt.Compressor(
        model, optimizer, evaluate=lambda: compute_loss(model), check=lambda: compute_loss(model, OTHER)
    )
    resumed.load(tmp_path / "a")
    train(model, optimizer, 60, 90)
    resumed.save(tmp_path / "b")
    gained = before - resumed.quality["check_metric"]
    assert resumed.quality["search"] == "neighbourhood" and resumed.quality["checks"] <= 4, "no probes again"
    assert gained > 0 and resumed.quality["restore_may_lose"] >= 0.99 * 0.05 * gained
    text = dsq_stdout("inspect", tmp_path / "b")
    assert "as check gives it" in text and "check degradation" in text and "calls of check" in text


@pytest.mark.parametrize("bad, says", [
    ("raises", "`check` raised RuntimeError: no more data"), ("nan", "`check` gave nan for the model as it is"),
    ("blind", "`check` gave 1 for the model and for one whose weights are nearly gone"),
])
def test_a_check_that_tells_nothing(tmp_path, bad, says):
    model, optimizer = train_model(60)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def check():
        if bad == "raises":
            raise RuntimeError("no more data")
        return math.nan if bad == "nan" else 1.0

    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model), check=check)
    with pytest.warns(UserWarning, match=f"{says}.*most conservative"):
        compressor.save(tmp_path / "a")
    assert compressor.quality["reason"].startswith(says) and not compressor.quality["satisfied"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if bad != "blind":
        with pytest.warns(UserWarning), pytest.raises(dsq_ckpt.DSQError, match=says):
            dsq_ckpt.compress(model, tmp_path / "b", evaluate=lambda: compute_loss(model), check=check)


def test_a_check_that_changes_the_model(tmp_path):
    model, optimizer = train_model(60)
    before = model.hidden.weight.detach().clone()

    def check():
        loss = compute_loss(model, OTHER)
        with torch.no_grad():
            model.hidden.weight.mul_(0.5)
        return loss

    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: compute_loss(model), check=check)
    with pytest.raises(dsq_ckpt.DSQError, match=r"`check` changed .hidden\.weight."):
        compressor.save(tmp_path / "a")
    assert torch.equal(model.hidden.weight, before)
