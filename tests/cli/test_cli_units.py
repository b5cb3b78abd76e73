"""`dsq inspect` says in which unit each number is."""

from __future__ import annotations

import re

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.cli import inspect_command
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.commands import dsq_stdout
from tests.helpers.small_run import NAMES
from tests.helpers.training import Net, compute_loss


@pytest.mark.parametrize(("columns", "levels"), [(80, ""), (120, "; levels: values besides zero")])
def test_tables_have_legends(trained, columns, levels):
    text = dsq_stdout("inspect", trained[0] / NAMES[2], columns=columns)
    for legend in (
        "ratio: uncompressed over stored bytes; KiB: 1024 bytes", f"elements: k is 1000{levels}",
        "step: of a lattice, in units of the tensors once divided by their powers of two",
        "bits (per element), base error (relative, root mean square): of the base layer",
        "restored: the error after a restore", "errors of first moments: those of the optimizer's next update",
    ):
        assert f"\n{legend}" in text
    assert re.search(r"^group .* step +coded", text, re.M)
    for name in Manifest.read(trained[0] / NAMES[2]).groups:
        assert re.search(rf"^{name} ", text, re.M), "in one piece"


def test_figures_of_a_search_have_units(run):
    path = run / NAMES[2]
    Manifest.read(path).model_copy(update={"quality": {
        "metric": 2.5, "degradation": 0.03, "restore_loses": 0.01, "predicted_bytes": 1200.5, "evaluations": 5,
        "seconds": 1.25, "refinement_bits": 3, "satisfied": True, "reason": None, "later": 7,
        "chosen": {"variant": "default", "step": 2.8},
    }}).write(path, exclusive=False, fsync=False)
    text = dsq_stdout("inspect", path, columns=100)
    assert re.search(r"^search +measured +unit *$", text, re.M)
    for name, value, unit in (
        ("metric", "2.5", "as evaluate gives it"), ("degradation", "0.03", "share of the metric"),
        ("restore loses", "0.01", "units of the metric"), ("predicted bytes", "1200.5", "bytes"),
        ("evaluations", "5", "calls of evaluate"), ("seconds", "1.25", "s"),
        ("refinement bits", "3", "bits per weight"), ("satisfied", "yes", ""), ("reason", "none", ""),
        ("chosen", "variant default, step 2.8", "step: root mean squares"), ("later", "7", ""),
    ):
        unit = f" +{unit}" if unit else ""
        assert re.search(rf"^{name} +{re.escape(value)}{unit} *$", text, re.M), name


def test_every_figure_that_a_search_records_has_a_unit(tmp_path):
    """Those of a real search: whoever adds one adds its unit."""
    model = Net()
    compressor = dsq_ckpt.Compressor(
        model, evaluate=lambda: compute_loss(model), check=lambda: compute_loss(model, 10_001)
    )
    for name in "ab":
        compressor.save(tmp_path / name)
    for name, value in compressor.quality.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert inspect_command._unit(name, value), name


def test_the_tensor_that_loses_most_is_named(tmp_path):
    """With its error; not where all tensors of a group lose about the same."""
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(128, 64, generator=generator) for name in ("large", "small")}
    dsq_ckpt.save(state, tmp_path / "alike")
    assert "loses most" not in dsq_stdout("inspect", tmp_path / "alike")
    state["small"] /= 7
    dsq_ckpt.save(state, tmp_path / "apart")
    text = dsq_stdout("inspect", tmp_path / "apart")
    [(group, report)] = Manifest.read(tmp_path / "apart").groups.items()
    assert f"loses most of {group}: small, {report.worst_error:.1%} off" in text


def test_first_moments_have_one_error_after_a_restore(run):
    """The error of the next update is shown, which is computed; an estimate of the same may be three times as large."""
    path = run / NAMES[2]
    manifest = Manifest.read(path)
    name, group = next((name, group) for name, group in manifest.groups.items() if name.startswith("exp_avg/"))
    changed = {name: group.model_copy(update={"refined_error": 0.66, "update_error": 0.2345})}
    manifest.model_copy(update={"groups": {**manifest.groups, **changed}}).write(path, exclusive=False, fsync=False)
    text = dsq_stdout("inspect", path)
    assert re.search(rf"^{name} .* 23\.45 % *$", text, re.M) and "66.00 %" not in text
