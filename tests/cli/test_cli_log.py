"""`dsq log`: its tables, their JSON, and what it says of searches."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

import dsq_ckpt
from dsq_ckpt import DSQConfig
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout
from tests.helpers.small_run import NAMES


def test_log_json_adds_up(trained):
    run, _ = trained
    report = dsq_json("log", run)
    assert [entry["name"] for entry in report["checkpoints"]] == list(NAMES)
    assert [entry["depth"] for entry in report["checkpoints"]] == [0, 1, 2]
    assert [entry["keyframe"] for entry in report["checkpoints"]] == [True, False, False]
    assert [entry["refinement"] for entry in report["checkpoints"]] == ["dropped", "dropped", "kept"]
    assert report["damaged"] == report["incomplete"] == []
    for entry in report["checkpoints"]:
        about = dsq_ckpt.describe(run / entry["name"])
        everything = entry["classes"]["everything"]
        assert {name: everything[name] for name in ("bytes_logical", "bytes_written", "bytes_kept")} == {
            name: about[name] for name in ("bytes_logical", "bytes_written", "bytes_kept")
        }
        exact = 4 * (96 + 2 * 96 + 128)  # bytes of biases and norms, whose moments are bf16
        weights, moments = (entry["classes"][name]["bytes_logical"] for name in ("weights", "moments"))
        assert moments == 2 * (weights + exact)
    for name, part in report["total"].items():
        for field in ("bytes_logical", "bytes_written", "bytes_kept"):
            assert part[field] == sum(entry["classes"][name][field] for entry in report["checkpoints"])
        assert part["ratio_kept"] == pytest.approx(part["bytes_logical"] / part["bytes_kept"], rel=1e-3)
    files = {file.stat().st_ino: file.stat().st_size for path in run.iterdir() for file in path.iterdir()}
    assert report["total"]["everything"]["bytes_kept"] == sum(files.values())


def test_log_counts_links_of_deleted_checkpoints(run):
    for name in NAMES[:2]:
        shutil.rmtree(run / name)
    report = dsq_json("log", run)
    files = sum(file.stat().st_size for file in (run / NAMES[2]).iterdir())
    assert report["total"]["everything"]["bytes_kept"] == files
    assert report["checkpoints"][0]["classes"]["everything"]["bytes_kept"] < files


@pytest.mark.parametrize("columns", [80, 100, 140, None])
def test_tables_fit_the_terminal(trained, columns):
    run, _ = trained
    for command in (["log", run], ["inspect", run / NAMES[2]], ["verify", run], ["gc", run]):
        lines = dsq_stdout(*command, columns=columns).splitlines()
        assert max(map(len, lines)) <= (columns or 240)
        assert not any(line.rstrip().endswith("…") for line in lines)
    lines = dsq_stdout("log", run, columns=columns).splitlines()
    for name, line in zip(NAMES, lines[1:], strict=False):  # one line each, nothing folded
        assert re.match(rf"{name} .* \d+(\.\d+)? [KM]iB .*x .*x .*x .* s +(dropped|kept)", line)


def test_log_tells_of_what_is_no_checkpoint(run):
    (run / "aborted").mkdir()
    (run / "aborted" / "0123456789abcdef-00000.dsq").write_bytes(b"x")
    (run / NAMES[0] / "manifest.json").write_text("{}")
    (run / "notes").mkdir()
    (run / "notes" / "manifest.json").write_text("{}")  # somebody else's
    text = dsq_stdout("log", run)
    assert "incomplete: aborted: " in text
    assert f"damaged: {NAMES[0]}: " in text
    assert "notes" not in text
    assert dsq_json("log", run)["incomplete"] == ["aborted"]


def test_log_notes(tmp_path):
    bad = torch.randn(80, 80)
    bad[3, 4] = float("nan")
    with pytest.warns(UserWarning, match="NaN or Inf"):
        dsq_ckpt.save({"weight": bad, "other.weight": torch.randn(80, 80)}, tmp_path / "only", pinned=True)
    assert "pinned, 1 NaN/Inf" in dsq_stdout("log", tmp_path)
    entry = dsq_json("log", tmp_path)["checkpoints"][0]
    assert entry["pinned"] and entry["nonfinite"] == ["weight"]
    text = dsq_stdout("inspect", tmp_path / "only")
    assert "not quantized, for NaN, Inf or values that cannot be: weight" in text


def searched(path, chosen, bits=0, fallback="conservative", resumes=0, **quality):
    """Make a manifest look as if a search had chosen its configuration."""
    manifest = Manifest.read(path)
    config = DSQConfig.create(manifest.config).with_values(
        **{"quantize.weights.refinement_bits": bits, "search.fallback": fallback}
    )
    record = {
        "system": "dsq", "bound": "progress", "metric": 2.5, "search": "neighbourhood", "chosen": chosen,
        "satisfied": True, **quality,
    }
    manifest.model_copy(update={
        "quality": record, "config": config.model_dump(mode="json"), "lossy_resumes": resumes,
    }).write(path, exclusive=False, fsync=False)


@pytest.mark.parametrize("columns", [80, 100, None])
def test_log_of_searches(run, columns):
    assert "chosen" not in dsq_stdout("log", run, columns=columns) and "evaluations" not in dsq_stdout("log", run)
    first = {"degradation": 0.034, "predicted_degradation": 0.03, "evaluations": 5, "seconds": 1.25}
    searched(run / NAMES[1], {"variant": "default", "step": 2.8}, 3, **first)
    searched(
        run / NAMES[2], {"variant": "sensitivity", "bins": 16, "prune": 0.2}, degradation=-0.0041, evaluations=12,
        seconds=75.0, resumes=2,
    )
    text = dsq_stdout("log", run, columns=columns)
    assert max(map(len, text.splitlines())) <= (columns or 240) and "…" not in text
    table = text.split("\n\n")[1].splitlines()
    assert re.split(r"  +| (?=base|eval|search)", table[0].strip()) == [
        "checkpoint", "chosen", "base loses", "evaluations", "searched",
    ]
    assert re.fullmatch(rf"{NAMES[0]} +- +- +- +-", table[1].rstrip())
    assert re.fullmatch(rf"{NAMES[1]} +step 2\.8, 3 bits +3\.4 % +5 +1\.25 s", table[2].rstrip())
    assert re.fullmatch(
        rf"{NAMES[2]} +sensitivity, bins 16, prune 0\.2 +-0\.41 % +12 +1 min 15 s", table[3].rstrip()
    )
    assert "1 min 16 s of searching with 17 evaluations, lossy resumes: 2" in " ".join(text.split())
    checkpoints = dsq_json("log", run)["checkpoints"]
    assert [entry["lossy_resumes"] for entry in checkpoints] == [0, 0, 2]
    assert checkpoints[0]["quality"] is None and checkpoints[1]["quality"]["predicted_degradation"] == 0.03


def test_log_of_searches_that_found_nothing(run):
    chosen = {"variant": "default", "step": 0.5}
    searched(run / NAMES[0], chosen, 4, restore_loses=0.005, degradation=0.0, evaluations=3)
    searched(run / NAMES[1], None, 8, satisfied=False, reason="`evaluate` raised", evaluations=1, seconds=0.5)
    searched(run / NAMES[2], None, fallback="exact", satisfied=False, metric=None)
    table = dsq_stdout("log", run, columns=100).split("\n\n")[1].splitlines()
    assert re.fullmatch(rf"{NAMES[0]} +step 0\.5, 4 bits +0 % +0\.2 % +3 +- +kept", table[1].rstrip())
    assert re.fullmatch(rf"{NAMES[1]} +none: conservative +- +- +1 +0\.50 s +missed", table[2].rstrip())
    assert re.fullmatch(rf"{NAMES[2]} +none: exact +- +- +- +- +missed", table[3].rstrip())


def test_inspect_shows_all_that_a_search_measured(run):
    assert "neighbourhood" not in dsq_stdout("inspect", run / NAMES[2])
    searched(
        run / NAMES[2], {"variant": "default", "step": 2.8}, 3, degradation=0.0345678, evaluations=5, seconds=1.25,
        resumes=3, noise=1e-9,
    )
    text = dsq_stdout("inspect", run / NAMES[2], columns=80)
    assert re.search(r"lossy resumes +3 *\n", text)
    for name, value in (
        ("search", "neighbourhood"), ("chosen", "variant default, step 2.8"), ("degradation", "0.0345678"),
        ("satisfied", "yes"), ("evaluations", "5"), ("noise", "1e-09"), ("metric", "2.5"), ("bound", "progress"),
    ):
        assert re.search(rf"^{name} +{re.escape(value)}( .*)?$", text, re.M), name
    report = dsq_json("inspect", run / NAMES[2])
    assert report["quality"] == Manifest.read(run / NAMES[2]).quality and report["lossy_resumes"] == 3


def test_log_errors(trained, tmp_path):
    run, _ = trained
    assert "is a checkpoint; name its run directory" in dsq_error("log", run / NAMES[0])
    assert "is not a directory" in dsq_error("log", tmp_path / "nowhere")
    assert "holds no complete checkpoint" in dsq_error("log", tmp_path)


def test_a_directory_of_runs_names_one(trained, tmp_path):
    run, _ = trained
    for name in ("b", "a"):
        (tmp_path / name).symlink_to(run)
    (tmp_path / "0").mkdir()
    assert "directories in it do, such as 'a'" in dsq_error("log", tmp_path)
    text = dsq_stdout("gc", tmp_path)
    assert "nothing to delete" in text and "directories in it do, such as 'a': name one" in text
    for path in (run, tmp_path / "0"):
        assert "directories in it" not in dsq_stdout("gc", path)


def test_log_says_which_columns_are_ratios(trained):
    text = dsq_stdout("log", trained[0], columns=80)
    assert "weights, moments, all: ratios of uncompressed bytes to those kept" in text
