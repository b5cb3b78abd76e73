"""`search.max_run_loss`: what all restores of a run together cost is stated once, and kept."""

from __future__ import annotations

import re

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.report.searches import format_chosen
from dsq_ckpt.search.budget import RunBudget
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.training import compute_loss, train, train_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
COARSE = {"quantize": {"weights": {"refinement_bits": 1}}, "search": {"max_progress_loss": 1.0, "floor": 0.05}}
"""Restores may cost much, if nothing bounds the run."""
EVERY = 5


def compressor_of(model, optimizer, history=None, **search):
    config = {**COARSE, "search": {**COARSE["search"], **search}}
    return dsq_ckpt.Compressor(model, optimizer, config, lambda: compute_loss(model), history=history)


def changes_of_a_run(directory, restores, **search):
    """Return the relative change of the loss at each restore, by a process that remembers nothing; and the records."""
    model, optimizer = train_model(60)
    compressor = compressor_of(model, optimizer, **search)
    changes, records = [], []
    for number in range(restores):
        path = directory / str(number)
        compressor.save(path)
        before = compute_loss(model)
        model, optimizer = train_model(0)
        compressor = compressor_of(model, optimizer, dsq_ckpt.SaveHistory(), **search)
        compressor.load(path)
        changes.append(abs(compute_loss(model) / before - 1))
        records.append(Manifest.read(path).quality)
        train(model, optimizer, 60 + EVERY * number, 60 + EVERY * (number + 1))
    return changes, records


def test_restores_together_cost_what_the_run_may_lose(tmp_path):
    unbounded, _ = changes_of_a_run(tmp_path / "unbounded", 5)
    limit = sum(unbounded) / 4
    changes, records = changes_of_a_run(tmp_path / "bounded", 5, max_run_loss=limit, expected_restores=5)
    assert sum(changes) <= limit
    for number, (change, record) in enumerate(zip(changes, records, strict=True)):
        left = limit - sum(changes[:number])
        assert change <= left / (5 - number) * 1.001
        assert record.get("run_lost", 0.0) == pytest.approx(sum(changes[:number]), abs=1e-6)
        assert record["satisfied"] and record["restore_may_lose"] <= 1.001 * left / (5 - number) * record["metric"]


def test_a_run_that_has_lost_its_share_is_stored_exactly(tmp_path):
    model, optimizer = train_model(60)
    compressor_of(model, optimizer).save(tmp_path / "a")
    strict = compressor_of(model, optimizer, max_run_loss=1e-4)
    strict.load(tmp_path / "a")
    train(model, optimizer, 60, 65)
    spent = r"have cost [\d.]+ % of the metric, and search.max_run_loss is 0.0001"
    for name in "bc":
        with pytest.warns(UserWarning, match=f"{spent}; the weights of this checkpoint are stored exactly"):
            strict.save(tmp_path / name)
        manifest = Manifest.read(tmp_path / name)
        assert not any(group.startswith("weights/") for group in manifest.groups) and manifest.lossy
        assert re.search(spent, manifest.quality["reason"]) and not manifest.quality["satisfied"]
        exact = compute_loss(model)
        strict.load(tmp_path / name)
        assert compute_loss(model) == exact
        assert strict.quality["run_lost"] == manifest.quality["run_lost"] > 0, "an exact restore costs nothing"


def test_no_refinement_is_fine_enough(tmp_path):
    model, optimizer = train_model(60)
    compressor = compressor_of(model, optimizer, max_run_loss=1e-9)
    with pytest.warns(UserWarning, match=r"no refinement of 8 bits keeps to search.max_run_loss; .* stored exactly"):
        result = compressor.save(tmp_path / "a")
    assert result.degradation is None and not {"predicted_bytes", "refinement_bits"} & result.quality.keys()
    assert format_chosen(Manifest.read(tmp_path / "a")) == "none: exact"
    exact = compute_loss(model)
    compressor.load(tmp_path / "a")
    assert compute_loss(model) == exact


def test_an_evaluation_that_fails_leaves_the_weights_exact(tmp_path):
    model, optimizer = train_model(60)
    config = {"search": {"max_run_loss": 0.005}}
    compressor = dsq_ckpt.Compressor(model, optimizer, config, lambda: float("nan"))
    with pytest.warns(UserWarning, match="the weights of this checkpoint are stored exactly"):
        compressor.save(tmp_path / "a")
    assert not any(group.startswith("weights/") for group in Manifest.read(tmp_path / "a").groups)


@pytest.mark.filterwarnings("ignore:.*base layer alone")
@pytest.mark.parametrize("measured", [True, False])
def test_a_restore_costs_the_loss_of_the_loaded_layer(tmp_path, measured):
    """The base layer alone costs its degradation; what no search has measured, all that a run may lose."""
    model, optimizer = train_model(60)
    evaluate = (lambda: compute_loss(model)) if measured else None
    first = dsq_ckpt.Compressor(model, optimizer, {"refinement": {"keep_last": 1}}, evaluate)
    for name in "ab":
        first.save(tmp_path / name)
    exact = compute_loss(model)
    later = compressor_of(model, optimizer, max_run_loss=0.5)
    later.load(tmp_path / "a", refinement="auto")
    changed = compute_loss(model) / exact - 1
    if measured:
        later.save(tmp_path / "c")
        assert later.quality["run_lost"] == pytest.approx(changed, abs=1e-6) and later.quality["satisfied"]
    else:
        with pytest.warns(UserWarning, match=r"what restores of this run have cost was not measured"):
            later.save(tmp_path / "c")
        assert not any(group.startswith("weights/") for group in Manifest.read(tmp_path / "c").groups)


@pytest.mark.parametrize("key, value, named", [
    ("bound", "relative", "max_run_loss"), ("max_run_loss", 0, "max_run_loss"),
    ("expected_restores", 0, "expected_restores"),
])
def test_settings_that_bound_nothing_are_refused(key, value, named):
    with pytest.raises(ConfigError, match=f"search.{named}"):
        dsq_ckpt.DSQConfig.create({"search": {"max_run_loss": 0.005, key: value}})


def test_restores_that_no_search_was_told_of_count_as_unmeasured(tmp_path):
    model, optimizer = train_model(60)
    compressor = compressor_of(model, optimizer, max_run_loss=0.5)
    compressor.save(tmp_path / "a")
    dsq_ckpt.load(compressor.state(), tmp_path / "a")
    compressor.save(tmp_path / "b")
    assert Manifest.read(tmp_path / "b").lossy_resumes == 1
    compressor.load(tmp_path / "b")
    for parameter in model.parameters():
        parameter.data += 1e-4 * torch.randn(parameter.shape)  # else they are levels of the base layer, and so exact
    with pytest.warns(UserWarning, match=r"was not measured, and search.max_run_loss is 0\.5; the weights .* exactly"):
        compressor.save(tmp_path / "c")


def test_saves_that_measure_nothing_are_refused(tmp_path):
    model, optimizer = train_model(60)
    search = {"max_run_loss": 0.005}
    with pytest.raises(dsq_ckpt.DSQError, match="is set, and no search measures what a restore"):
        dsq_ckpt.Compressor(model, optimizer, {"search": search}).save(tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()
    dsq_ckpt.Compressor(model, optimizer, {"system": "exact", "search": search}).save(tmp_path / "a")
    assert not Manifest.read(tmp_path / "a").lossy


def test_a_cost_relative_to_nearly_nothing_is_a_finite_number():
    """Manifests hold no others: each save after such a restore failed."""
    record = {"metric": 1e-310, "restore_loses": 1.0, "degradation": 0.0}
    manifest = Manifest.model_construct(
        quality=record, groups={"weights/linear": None}, refinement="kept", lossy_resumes=0
    )
    lost = RunBudget.from_manifest(manifest, refined=True).lost
    assert 1 < lost < 1e300
