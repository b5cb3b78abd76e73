"""LC-Checkpoint's stages, its buckets and its case study, and the ranks that Inshrinkerator goes by."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluate_lc import app
from evaluation import ablations, case_study, create, factorization, promotion, rework
from evaluation.recording import record
from evaluation.results import Results
from typer.testing import CliRunner

from dsq_ckpt.codebooks.exponent import exponent_buckets
from tests.helpers.commands import unwrap_text

pytestmark = pytest.mark.usefixtures("one_thread", "_few_probes")


@pytest.fixture
def _few_probes(monkeypatch):
    """Losses of training are those of four batches: they are compared with each other alone."""
    monkeypatch.setattr(rework, "PROBE_BATCHES", 4)


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_buckets_are_those_that_promotion_keeps() -> None:
    """In the order of priority promotion: the first 2**x - 1 are what x bits keep, and zero is the last one."""
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    values[:40] = 0
    buckets = promotion.buckets_of(values)
    assert buckets.counts.sum() == 5000 and buckets.signs[-1] == 0 and buckets.counts[-1] == 40
    members = values[buckets.members == 0]
    assert (np.sign(members) == buckets.signs[0]).all()
    assert np.floor(np.log2(np.abs(members))).max() == np.floor(np.log2(np.abs(values).max())) == buckets.exponents[0]
    ascending, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    for bits in (1, 2, 3, 4):
        _, codes = exponent_buckets(ascending, ascending, ascending, counts, bits)
        assert ((buckets.members < 2**bits - 1) & (values != 0)).tolist() == (codes[place] > 0).tolist()


def test_exponents_add_up_and_the_largest_are_promoted() -> None:
    values = np.array([1.0, 1.5, -1.0, 0.5, 0.25, 0.25, 0.0, -0.0], np.float32)
    rows = promotion.exponents_of(values, 2)
    assert [row["exponent"] for row in rows] == [0, -1, -2, None]
    assert [row["share"] for row in rows] == [3 / 8, 1 / 8, 2 / 8, 2 / 8]
    assert [row["promoted"] for row in rows] == [3 / 8, 1 / 8, 0, 0]  # +1, -1 and +0.5 are three buckets


def test_stages_end_at_what_rework_measures(monkeypatch) -> None:
    """Each stage makes a checkpoint smaller, and the last one is the size that a chain of checkpoints has."""
    monkeypatch.setattr(rework, "SPAN", (0.6, 0.6))  # one failure, after the last of the checkpoints
    plan = rework.Experiment("gpt-tiny", 0, every=12, trials=1, limit=1)
    coarse, fine = (promotion.stages(plan, bits, samples=9) for bits in (2, 3))
    for row in (coarse, fine):
        assert row["steps"] == [12, 24, 36]
        assert 1 < row["bits_coded"] < row["bits_promoted"] == row["bits"] < row["bits_exponents"] < 9
        assert row["buckets"] == pytest.approx(2 ** row["bits_exponents"]) and row["exponents"] == []
    assert coarse["bits_coded"] < fine["bits_coded"]
    [lc] = rework.methods(["lc"], [2])
    row = rework.run_method(plan, lc, rework.loss_curve(plan), Results(None, "rework", {}))
    assert coarse["share_coded"] == pytest.approx(row["share"])


def test_rivals_are_as_large_as_the_paper_counts() -> None:
    """An element of top-n is 64 bits and one of SCAR 32; in files their places are coded, in less than a bit each."""
    plan, results = rework.Experiment("gpt-tiny", 0, every=6, trials=1, limit=2), Results(None, "rework", {})
    lc, topn, scar = rework.methods(["lc", "topn", "scar"], [2])
    curve = rework.loss_curve(plan)
    rows = [rework.run_method(plan, method, curve, results) for method in (topn, scar)]
    [first] = [row for row in results.rows if row["name"] == lc.name]
    assert [row["name"] for row in rows] == ["topn, as lc 2", "scar, as lc 2"]
    assert rows[0]["fraction"] == pytest.approx(first["share"] / 2) and rows[1]["parts"] == round(1 / first["share"])
    assert rows[0]["share"] == pytest.approx(first["share"]) and rows[1]["share"] == 1 / rows[1]["parts"]
    for row in rows:
        assert row["bytes"] / row["share"] == pytest.approx(first["bytes"] / first["share"])
    assert [method.config().delta.coder for method in (lc, topn, scar)] == ["huffman"] * 3


def test_in_files_all_have_one_coder() -> None:
    coded = rework.methods(["lc", "topn", "scar", "dsq"], [2], coded=True)
    assert [method.name for method in coded] == ["lc, rANS, 2 bits", "topn, rANS, as lc 2", "scar, rANS, as lc 2",
                                                 "dsq, base"]
    assert [method.config().delta.coder for method in coded] == ["rans"] * 4
    assert [method.like for method in coded[:3]] == [None, coded[0], coded[0]]


def test_deleted_buckets_leave_training_as_it_was(monkeypatch) -> None:
    monkeypatch.setattr(promotion, "SPANS", range(1, 3))
    plan = rework.Experiment("gpt-tiny", 0, every=1, trials=1, limit=1)
    rows = promotion.deleted(plan, start=0)
    assert [row["iterations"] for row in rows] == [10, 20]
    workload = create("gpt-tiny")
    probe = rework.Probe(workload)
    for row in rows:
        workload.train(row["iterations"] - 10, row["iterations"])
        assert row["loss"] == pytest.approx(probe(workload.model), rel=1e-6)
        assert sum(bucket["count"] for bucket in row["buckets"]) == workload.settings()["parameters"]
        assert 0 < row["kept_2"] < row["kept_3"] < row["kept_4"] <= 1
        assert row["buckets"][row["largest"] - 1]["error"] == max(bucket["error"] for bucket in row["buckets"])
        assert row["without_rest_4"] < row["without_rest_2"]
        assert [bucket["error"] for bucket in row["buckets"] if bucket["exponent"] is None] in ([], [0.0])


def test_equation_2() -> None:
    """The bucket of 2 changes a loss that is the sum of the state from 4 to 2, that of 1 from 4 to 3."""
    difference = np.array([2, 1, 1], np.float32)
    row = promotion._deletions(difference, lambda change: float(change.sum()))
    assert row["loss"] == 4 and row["largest"] == 1
    assert [bucket["error"] for bucket in row["buckets"]] == [0.25, 0.25]
    assert [
        (bucket["exponent"], bucket["sign"], bucket["count"]) for bucket in row["buckets"]
    ] == [(1, 1, 1), (0, 1, 2)]


def test_a_failure_costs_what_was_lost() -> None:
    """Full checkpoints go back to the start and repeat the run; those of each iteration go back by one."""
    plan = rework.Experiment("gpt-tiny", 0, every=5, trials=1, limit=1)
    exact, lossy, full = case_study.compare(plan, bits=3, iterations=6, failure=4, interval=10)
    assert len(exact["losses"]) == 7 and "restored" not in exact
    assert lossy["restored"] == 3 and full["restored"] == 0
    assert full["losses"] == exact["losses"][:5] + exact["losses"][1:] and full["costs"] == 4
    assert lossy["losses"][:5] == exact["losses"][:5] and lossy["losses"][5] != exact["losses"][4]
    assert lossy["losses"][-1] <= exact["losses"][-1] or lossy["costs"] is None
    again = case_study.with_failure(plan, case_study.FULL, 1, 4, exact["losses"])
    assert again["restored"] == 3 and again["costs"] == 1
    assert again["bytes"] > lossy["bytes"] > 0 and again["overhead"] > 0


def test_a_run_that_does_not_come_back_is_given_up() -> None:
    plan = rework.Experiment("gpt-tiny", 0, every=2, trials=1, limit=1)
    row = case_study.with_failure(plan, case_study.FULL, 1, 2, [9.0, 8.0, 0.0])
    assert row["costs"] is None and len(row["losses"]) == 3 + 5


def test_costs_are_told_from_where_the_exact_run_first_had_the_loss() -> None:
    """The run without a failure is at 8 after two iterations already, and the other one by an iteration more."""
    plan = rework.Experiment("gpt-tiny", 0, every=2, trials=1, limit=1)
    row = case_study.with_failure(plan, case_study.FULL, 1, 2, [9.0, 8.5, 8.0, 8.2, 8.0])
    assert row["losses"][-1] <= 8.0 and row["costs"] == len(row["losses"]) - 1 - 2 == 1


def test_the_matrix_is_that_of_the_words_of_the_text(monkeypatch) -> None:
    monkeypatch.setattr(factorization, "stdlib_bytes", lambda: b"for x in x: pass  # x in for\n" * 20)
    train, test = factorization.load_entries.__wrapped__()
    places, values = (np.concatenate(parts) for parts in zip(train, test, strict=True))
    assert len(test.values) == -(-len(values) // factorization.HELD_OUT_EVERY)
    text = [1, 0, 2, 0, 3, 0, 2, 1] * 20  # x is the most frequent word, then for, in, pass
    near = range(1, factorization.NEAR + 1)
    expected = Counter(pair for apart in near for pair in zip(text, text[apart:], strict=False))
    assert {tuple(place) for place in places.tolist()} == set(expected)
    ratios = np.exp(values.astype(np.float64)) / [expected[tuple(place)] for place in places.tolist()]
    assert ratios == pytest.approx(ratios[0])  # values have a mean of zero


def test_two_orders_of_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(20_000, generator=generator)
    same = ablations.ranked(weights, torch.full_like(weights, 0.5))
    assert same["correlation"] == pytest.approx(1) and same["pruned_by_both"] == 1
    assert same["large_insensitive"] == same["sensitive_small"] == 0
    assert np.diag(same["tenths"]) == pytest.approx(0.1)
    opposite = ablations.ranked(weights, weights.abs() ** -2)
    assert opposite["correlation"] == pytest.approx(-1) and opposite["large_insensitive"] == 1
    independent = ablations.ranked(weights, torch.randn(20_000, generator=generator) / weights)
    assert abs(independent["correlation"]) < 0.03 and independent["large_insensitive"] == pytest.approx(0.5, abs=0.05)
    assert np.sum(independent["tenths"]) == pytest.approx(1)


def test_ranks_of_a_recording(tmp_path: Path) -> None:
    rows = ablations.ranks(record("gpt-tiny", 0, tmp_path), lambda line: None, count=2)
    assert [row["step"] for row in rows] == [10, 60]
    assert all(row["elements"] == 40_960 and 0 < row["correlation"] < 1 for row in rows)


def test_commands_write_what_they_measure(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # where the window is narrow, heads are cut
    monkeypatch.setattr(promotion, "SPANS", range(1, 2))
    path = tmp_path / "measured.json"
    assert "E+P+H" in _run("stages", "gpt-tiny", "--bits", "2", "--every", "12", "--samples", "2", "--json", str(path))
    assert _document(path)["measured"] == "stages" and _document(path)["rows"][0]["steps"] == [12, 36]
    assert "first 7" in _run("deleted", "gpt-tiny", "--start", "0", "--json", str(path))
    assert len(_document(path)["rows"]) == 1
    case = ["case", "gpt-tiny", "--every", "2", "--iterations", "4", "--failure", "2", "--json", str(path)]
    assert "goes back to" in _run(*case)
    assert [row["name"] for row in _document(path)["rows"]] == ["no failure", "lc, 3 bits", "full"]
    assert CliRunner().invoke(app, ["deleted", "gtp", "--json", str(path)]).exit_code == 2


def test_a_case_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """A failure after the end; more steps than gpt-tiny's 60, at whose end the learning rate is zero."""
    case = ["case", "gpt-tiny", "--json", str(tmp_path / "case.json"), "--iterations", "4"]
    for arguments, message in (
        (["--every", "2", "--failure", "5"], "is past the last one, 4"),
        (["--every", "8", "--failure", "2"], "64 steps are more than the 60"),
    ):
        result = CliRunner().invoke(app, [*case, *arguments])
        assert result.exit_code == 2 and message in unwrap_text(result.output), result.output
    assert not (tmp_path / "case.json").exists()


def _document(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document
