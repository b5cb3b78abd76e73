"""Runs that fail and are restored from their own checkpoints, and what a restore costs in iterations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate import app
from evaluation import create, online, rework
from evaluation.results import Results
from typer.testing import CliRunner

import dsq_ckpt
from dsq_ckpt.storage.description import list_linked_refinement
from dsq_ckpt.storage.manifest import iter_checkpoints
from tests.helpers.commands import unwrap_text


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """The run of gpt-tiny without failures, and the directory it is kept in."""
    directory = tmp_path_factory.mktemp("reference")
    return online.reference("gpt-tiny", 0, directory), directory


@pytest.fixture(scope="module")
def dsq_run(tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """A run with our own system: its figures and its checkpoints."""
    run = tmp_path_factory.mktemp("ours")
    return online.train_with_failures(create("gpt-tiny"), dsq_ckpt.DSQConfig(), run, failures=2, per_failure=2), run


@pytest.fixture
def few_probes(monkeypatch):
    """Losses of training are those of four batches: they are compared with each other alone."""
    monkeypatch.setattr(rework, "PROBE_BATCHES", 4)


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def test_reference_is_the_plain_run_and_is_kept(reference, tmp_path) -> None:
    exact, directory = reference
    workload = create("gpt-tiny")
    workload.train(0, workload.steps)
    assert (exact["loss"], exact["accuracy"]) == (workload.evaluate(), workload.accuracy())
    assert exact["losses"]["every"] == 10 and len(exact["losses"]["values"]) == 6
    assert exact["losses"]["values"][-1] == exact["loss"] < exact["losses"]["values"][0]
    lines: list[str] = []
    assert online.reference("gpt-tiny", 0, directory, lines.append) == exact
    assert not lines
    (tmp_path / online.REFERENCE_FILE).write_text(json.dumps(exact | {"settings": {"of": "another run"}, "loss": 0.0}))
    assert online.reference("gpt-tiny", 0, tmp_path, lines.append)["loss"] == exact["loss"]
    assert len(lines) == 1
    (tmp_path / online.REFERENCE_FILE).write_text(json.dumps(
        {key: value for key, value in exact.items() if key != "losses"}  # of a version that did not keep them
    ))
    assert online.reference("gpt-tiny", 0, tmp_path, lines.append) == exact and len(lines) == 2


def test_noise_restores_the_exact_state_but_for_a_millionth(reference) -> None:
    exact, _ = reference
    results = Results(None, "online", {})
    [row] = online.run_system("gpt-tiny", 0, "noise", [0.05], results, exact, failures=3, per_failure=1)
    assert row["loss"] == pytest.approx(exact["loss"], rel=1e-2)
    at_30_and_60 = [row["checkpoints"][1]["loss"], row["loss"]]  # one of them may round to that of the exact run
    assert at_30_and_60 != exact["losses"]["values"][2::3]
    assert [restore["step"] for restore in row["restores"]] == [15, 30, 45]
    assert [save["step"] for save in row["checkpoints"]] == [15, 30, 45, 60]
    assert row["checkpoints"][-1]["loss"] == row["loss"]
    assert 0 < max(abs(restore["after"] / restore["before"] - 1) for restore in row["restores"]) < 1e-5
    assert online.run_system("gpt-tiny", 0, "noise", [0.05], results, exact, failures=3, per_failure=1) == [row]


def test_exact_equals_the_run_without_failures(reference, tmp_path) -> None:
    exact, _ = reference
    config = dsq_ckpt.DSQConfig.create({"system": "exact"})
    row = online.train_with_failures(create("gpt-tiny"), config, tmp_path, failures=3, per_failure=1)
    assert (row["loss"], row["accuracy"]) == (exact["loss"], exact["accuracy"])
    assert row["worst_restore"] == 0.0 and [restore["step"] for restore in row["restores"]] == [15, 30, 45]
    assert row["ratio_state_kept"] == row["ratio_written"] > 1
    assert row["ratio_weights_kept"] is None and row["best_delta"] is None
    assert row["lossy_resumes"] == 0 and row["evaluations_per_checkpoint"] == 0
    assert [save["step"] for save in row["checkpoints"]] == [15, 30, 45, 60]
    assert row["checkpoints"][1]["loss"] == exact["losses"]["values"][2]  # both at step 30


def test_figures_are_those_of_the_checkpoints_on_disk(dsq_run) -> None:
    row, run = dsq_run
    assert _finite(row)
    checkpoints = list(iter_checkpoints(run))
    assert [path.name for path, _ in checkpoints] == [f"step-{step:06d}" for step in range(10, 61, 10)]
    assert len(row["checkpoints"]) == 6 and len(row["restores"]) == 2 == row["lossy_resumes"]
    own = {file.stat().st_ino: file.stat().st_size for path, _ in checkpoints for file in path.iterdir()}
    bytes_kept = sum(own.values())  # what an older checkpoint shares with a newer one is there once
    logical = sum(sizes.logical for _, manifest in checkpoints for sizes in manifest.kinds.values())
    assert row["ratio_state_kept"] == pytest.approx(logical / bytes_kept)
    weights = [manifest.kinds["weights"] for _, manifest in checkpoints]
    base = sum(sizes.base for sizes in weights)
    assert row["ratio_weights_base"] == pytest.approx(sum(sizes.logical for sizes in weights) / base)
    linked = list_linked_refinement([manifest for _, manifest in checkpoints])
    ids = {file.name[:16] for file in linked} | {manifest.save_id for _, manifest in checkpoints[-3:]}
    layers = [sizes.refinement for (_, of), sizes in zip(checkpoints, weights, strict=True) if of.save_id in ids]
    assert row["ratio_weights_kept"] == pytest.approx(sum(sizes.logical for sizes in weights) / (base + sum(layers)))
    dropped = sum(
        sizes.refinement for _, manifest in checkpoints if manifest.refinement == "dropped"
        for sizes in manifest.kinds.values()
    )
    written = bytes_kept - sum(file.size for file in linked) + dropped
    assert dropped and row["ratio_written"] == pytest.approx(logical / written)
    assert row["ratio_state_kept"] > row["ratio_written"] > 1
    assert row["ratio_weights_base"] > row["ratio_weights_kept"] > 1
    ratios = [save["ratio_weights"] for save in row["checkpoints"] if not save["keyframe"]]
    assert row["unchanged_deltas"] == ratios.count(None) == [sizes.base for sizes in weights].count(0)
    assert row["best_delta"] == max(ratio for ratio in ratios if ratio)
    evaluations = [manifest.quality["evaluations"] for _, manifest in checkpoints if manifest.quality]
    assert row["evaluations_per_checkpoint"] == pytest.approx(sum(evaluations) / 6)


def test_every_failure_takes_all_of_the_state(dsq_run) -> None:
    workload = create("gpt-tiny")
    workload.train(0, 1)
    assert online._damaged(workload) == 0
    online._destroy(workload)
    assert online._damaged(workload) == sum(tensor.numel() for tensor in online._tensors(workload))
    assert math.isnan(workload.evaluate())


def test_a_restore_that_restores_nothing_is_noticed(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(dsq_ckpt.Compressor, "load", lambda self, path: {})
    config = dsq_ckpt.DSQConfig.create({"system": "exact"})
    with pytest.raises(RuntimeError, match=r"step-000030 left \d+ values as the failure had made them"):
        online.train_with_failures(create("gpt-tiny"), config, tmp_path, failures=1, per_failure=2)


def test_too_many_checkpoints_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="60 steps are too few for 80 checkpoints"):
        online.train_with_failures(create("gpt-tiny"), dsq_ckpt.DSQConfig(), tmp_path, failures=19)


def test_bounds_become_stricter_until_one_keeps_within(monkeypatch) -> None:
    losses = iter([1.5, math.nan, 1.009])
    monkeypatch.setattr(online, "train_with_failures", lambda *arguments: {"loss": next(losses)})
    results = Results(None, "online", {})
    exact = {"loss": 1.0, "accuracy": 0.5, "losses": {"every": 60, "values": [1.0]}}
    epsilons = [0.05, 0.02, 0.01, 0.005]
    rows = online.run_system("gpt-tiny", 0, "inshrinkerator", epsilons, results, exact)
    assert [row["bound"] for row in rows] == ["relative 0.05", "relative 0.02", "relative 0.01"]
    assert [row["within"] for row in rows] == [False, False, True]
    assert [row["loss"] for row in rows] == [1.5, None, 1.009]  # JSON has no NaN
    assert [row["settings"]["config"]["search"]["epsilon"] for row in rows] == epsilons[:3]
    assert online.run_system("gpt-tiny", 0, "inshrinkerator", epsilons, results, exact) == rows  # `losses` is empty


def test_ours_and_exact_are_run_once() -> None:
    [(bound, config)] = online.configurations("dsq", [0.1])
    assert config == dsq_ckpt.DSQConfig() and bound.startswith(config.search.bound)
    assert len(list(online.configurations("exact", [0.1, 0.2]))) == 1
    texts = ["{}", '{"quantize":{"weights":{"method":"exact"}}}']
    (usual, config), (label, other) = online.configurations("dsq", [0.05], texts)
    assert config == dsq_ckpt.DSQConfig() and label == f"{usual}, {texts[1]}"
    assert other is not None and other.quantize.weights.method == "exact"


def test_ours_is_compared_where_it_does_no_more_harm() -> None:
    def row(name: str, loss: float | None, weights: float | None, workload: str = "gpt") -> dict[str, Any]:
        return {"workload": workload, "seed": 0, "failures": 10, "every": 36, "name": name, "bound": "b", "loss": loss,
                "worse_by": None if loss is None else loss - 1, "ratio_weights_kept": weights,
                "ratio_weights_base": 2 * weights if name == "dsq" and weights else weights}

    rows = [row("dsq", 1.01, 60.0), row("uniform", 1.2, 20.0), row("lc", 1.0, 10.0), row("scar", None, 5.0),
            row("exact", 1.0, None), row("uniform", 1.2, 20.0, workload="vit")]
    comparison = online.versus(rows)
    assert [(row["name"], row["harmless"], row["times_weights"], row["times_base"]) for row in comparison] == [
        ("uniform", True, 3.0, 6.0), ("lc", False, None, None), ("scar", True, 12.0, 24.0),
    ]


def test_targets_follow_the_row() -> None:
    row = {
        "workload": "gpt", "within": True, "ratio_weights_kept": 51.0, "ratio_state_kept": 39.0, "ratio_written": 15.0,
        "best_delta": None,
    }
    assert [met for _, met in online.targets(row)] == [True, True, False, True, False]
    assert [met for _, met in online.targets(row | {"workload": "resnet"})] == [True, True, True, False]


def test_an_interrupted_command_goes_on_where_it_was(reference, tmp_path, monkeypatch) -> None:
    _, directory = reference
    path = tmp_path / "online.json"
    trained: list[str] = []
    train = online.train_with_failures

    def watched(workload: Any, config: dsq_ckpt.DSQConfig, *rest: Any) -> dict[str, Any]:
        if config.system == interrupt_at:
            raise KeyboardInterrupt
        trained.append(config.system)
        return train(workload, config, *rest)

    monkeypatch.setattr(online, "train_with_failures", watched)
    command = ["online", "gpt-tiny", "--systems", "exact,dsq", "--failures", "1", "--per-failure", "1"]
    command += ["--directory", str(directory), "--json", str(path)]
    interrupt_at = "dsq"
    assert CliRunner().invoke(app, command).exit_code != 0
    [first] = json.loads(path.read_text())["rows"]
    interrupt_at = ""
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert trained == ["exact", "dsq"]
    written = json.loads(path.read_text())
    assert [row["name"] for row in written["rows"]] == ["exact", "dsq"] and written["rows"][0] == first
    assert written["versus"] == []  # exact checkpoints have no quantized weights
    assert written["command"] and written["machine"]["processor"] and written["torch"] == torch.__version__
    assert written["dsq_ckpt"] == dsq_ckpt.__version__ and written["date"]
    # Another cadence is another run.
    assert CliRunner().invoke(app, [*command, "--systems", "exact", "--failures", "2"]).exit_code == 0
    assert trained == ["exact", "dsq", "exact"]
    other = CliRunner().invoke(app, ["rework", "gpt-tiny", "--json", str(path)])
    assert other.exit_code == 2 and "name another file" in unwrap_text(other.output)


def test_arguments_are_checked() -> None:
    for arguments in (["gtp"], ["gpt-tiny", "--systems", "exact,qsd"]):
        assert CliRunner().invoke(app, ["online", *arguments]).exit_code == 2
        assert CliRunner().invoke(app, ["rework", *arguments]).exit_code == 2


def test_failures_are_drawn_once_and_within_the_run() -> None:
    plan = rework.Experiment("gpt-tiny", 0, every=1, trials=20, limit=10)
    drawn = plan.failures(60)
    assert drawn == sorted(set(drawn)) == plan.failures(60) and len(drawn) == 20
    assert min(drawn) >= 6 and max(drawn) <= 36
    assert drawn != rework.Experiment("gpt-tiny", 1, every=1, trials=20, limit=10).failures(60)
    with pytest.raises(ValueError, match="31 steps to fail at, fewer than 32 trials"):
        rework.Experiment("gpt-tiny", 0, every=1, trials=32, limit=10).failures(60)


@pytest.mark.usefixtures("few_probes")
def test_rework_of_exact_checkpoints_is_what_was_lost() -> None:
    """Restored bit for bit, training is back after the steps since the checkpoint, if the loss fell all along."""
    plan = rework.Experiment("gpt-tiny", 0, every=3, trials=4, limit=10)
    curve = rework.loss_curve(plan)
    row = rework.run_method(plan, rework.Method("exact", "exact"), curve, Results(None, "rework", {}))
    assert [trial["step"] for trial in row["trials"]] == plan.failures(60)
    for trial in row["trials"]:
        since = range(trial["checkpoint"], trial["step"] + 1)
        assert trial["restored"] == curve[trial["checkpoint"]]
        assert trial["iterations"] == next(n for n, step in enumerate(since) if curve[step] <= curve[trial["step"]])


@pytest.mark.slow
@pytest.mark.usefixtures("few_probes")
def test_rework_command(tmp_path) -> None:
    path = tmp_path / "rework.json"
    command = ["rework", "gpt-tiny", "--systems", "dsq,inshrinkerator", "--trials", "2", "--every", "4", "--json"]
    for _ in range(2):
        result = CliRunner().invoke(app, [*command, str(path)])
        assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["dsq, base", "inshrinkerator, base"]
    for row in rows:
        assert 0 < row["bytes"] < row["bytes_written"] and 0 < row["share"] < 0.2
        assert len(row["trials"]) == 2 and row["iterations"] <= row["iterations_worst"] <= 200
        assert all(trial["checkpoint"] % 4 == 0 for trial in row["trials"])


def test_summary_counts_trials_over_the_limit() -> None:
    trials = [{"iterations": count, "restored": 1.1, "loss": 1.0} for count in (2, 4, None)]
    summary = rework._summary(trials, rework.Experiment("gpt-tiny", 0, 1, 3, limit=9))
    assert summary["iterations"] == 5 and summary["over_limit"] == 1 and summary["iterations_worst"] == 9
    assert summary["restore_rise"] == pytest.approx(0.1)
    # Exact quantile of Student's t with 49 degrees of freedom: 2.0096.
    many = [{"iterations": count % 2, "restored": 1.0, "loss": 1.0} for count in range(50)]
    half = rework._summary(many, rework.Experiment("gpt-tiny", 0, 1, 50, limit=9))["iterations_ci95"]
    assert half == pytest.approx(2.0096 * (0.25 * 50 / 49) ** 0.5 / 50**0.5, rel=1e-3)


def test_methods_of_the_papers_are_of_equal_size() -> None:
    names = [(method.name, method.like.name if method.like else None)
             for method in rework.methods(["lc", "topn", "scar", "dsq"], [2, 3])]
    assert names == [
        ("lc, 2 bits", None), ("topn, as lc 2", "lc, 2 bits"), ("scar, as lc 2", "lc, 2 bits"),
        ("lc, 3 bits", None), ("topn, as lc 3", "lc, 3 bits"), ("scar, as lc 3", "lc, 3 bits"), ("dsq, base", None),
    ]
    for method in rework.methods(["lc", "topn", "scar"], [2]):
        config = method.config()
        assert config.quantize.momentum.method == "exact" and config.quantize.weights.refinement_bits == 0


def test_sizes_are_matched_on_a_line() -> None:
    tried = [(0.05, 980 + 0.05 * 7000)]
    for _ in range(3):
        fraction = rework._next_fraction(tried, 1120.0)
        tried.append((fraction, 980 + fraction * 7000))
    assert tried[-1][1] == pytest.approx(1120.0, rel=1e-6) and fraction == pytest.approx(0.02)
    assert rework._next_fraction([(0.05, 1330.0), (0.04, 1260.0)], 500.0) == 0.01  # less than any fraction makes
