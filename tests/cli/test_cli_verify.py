"""`dsq verify` finds what is wrong, names it, and says which checkpoints it harms."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from dsq_ckpt.cli.verify_command import CheckpointReport, Problem, Verification
from dsq_ckpt.report.history import Leftovers
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, find_file, flip_bit, run_dsq
from tests.helpers.remote_runs import chain
from tests.helpers.small_run import NAMES


def test_verify_a_run(trained):
    run, _ = trained
    text = dsq_stdout("verify", run)
    assert all(re.search(rf"{name} .* ok ", text) for name in NAMES)
    report = dsq_json("verify", run)
    assert report["ok"]
    assert [entry["decoded_by"] for entry in report["checkpoints"]] == [NAMES[2], NAMES[2], None]
    assert report["checkpoints"][2]["tensors_decoded"] > 30
    quick = dsq_json("verify", run, "--no-deep")
    assert [entry["tensors_decoded"] for entry in quick["checkpoints"]] == [None, None, None]
    assert dsq_json("verify", run / NAMES[0])["checkpoints"][0]["tensors_decoded"] > 30


@pytest.mark.parametrize("role", ["own", "refinement", "index"])
def test_verify_names_an_altered_file(run, role):
    file = find_file(run / NAMES[2], role)
    flip_bit(file)
    for path in (run, run / NAMES[2]):
        result = run_dsq("verify", path)
        assert result.exit_code == 1
        assert file.name in result.stdout
        assert result.stderr == (
            f"error: 1 of {3 if path == run else 1} checkpoint(s) damaged: {NAMES[2]}\n"
        )
        assert not dsq_json("verify", path, code=1)["ok"]
    assert run_dsq("verify", run / NAMES[0]).exit_code == 0


def test_verify_tells_every_checkpoint_that_a_file_harms(trained, tmp_path):
    run = tmp_path / "run"
    for name in NAMES:  # copies that stay linked, as saves make them
        (run / name).mkdir(parents=True)
        for file in (trained[0] / name).iterdir():
            first = next((run / other / file.name for other in NAMES if (run / other / file.name).exists()), None)
            if first is not None and file.name != "manifest.json":
                os.link(first, run / name / file.name)
            else:
                shutil.copy(file, run / name / file.name)
    flip_bit(find_file(run / NAMES[1]))
    report = dsq_json("verify", run, code=1)
    assert [entry["ok"] for entry in report["checkpoints"]] == [True, False, False]
    tensors = {problem["where"] for problem in report["checkpoints"][2]["problems"]}
    assert find_file(run / NAMES[1]).name in tensors and len(tensors) > 1
    assert len(run_dsq("verify", run).stdout.splitlines()) < 40


@pytest.mark.parametrize(("length", "names"), [
    (3, "step-1, step-2, step-3:"), (5, "step-1 to step-5 (5 checkpoints):"),
])
def test_verify_tells_once_what_checkpoints_have_in_common(tmp_path, length, names):
    keyframe, *_ = chain(str(tmp_path), length)
    [file] = keyframe.glob("*.dsq")
    flip_bit(file)
    report = dsq_json("verify", tmp_path, "--no-deep", code=1)
    assert all(entry["problems"] for entry in report["checkpoints"])
    text = run_dsq("verify", tmp_path, "--no-deep").stdout
    assert text.count(f"{file.name}: has checksum") == 1 and f"\n{names}\n" in text


def test_names_of_checkpoints_are_no_part_of_sizes_and_checksums(capsys):
    """As `5` would be in a run of steps that is the working directory."""
    def shown(texts: list[str]) -> str:
        reports = [CheckpointReport(Path(str(n)), problems=[Problem("file", text)]) for n, text in enumerate(texts, 1)]
        Verification(Path("."), reports, Leftovers([], [], [])).print()
        return capsys.readouterr().out

    assert "\n1, 2:\n" in shown(["has checksum a12, expected b12"] * 2)
    assert "\n1, 2:\n" in shown(["'1/file' was altered", "'2/file' was altered"])
    assert "\n2:\n" in shown(["has 1 bytes, expected 3", "has 2 bytes, expected 3"])


def test_checkpoints_with_a_sound_one_between_are_named_apart(capsys):
    problems = [[Problem("file", "has 1 bytes, expected 3")] if number != 2 else [] for number in range(1, 6)]
    reports = [CheckpointReport(Path(str(number)), problems=found) for number, found in enumerate(problems, 1)]
    Verification(Path("."), reports, Leftovers([], [], [])).print()
    text = capsys.readouterr().out
    assert "\n1:\n" in text and "\n3, 4, 5:\n" in text and text.count("expected 3") == 2


def test_verify_missing_truncated_and_unreadable(run):
    find_file(run / NAMES[0]).unlink()
    file = find_file(run / NAMES[1], "index")
    os.truncate(file, file.stat().st_size - 1)
    (run / NAMES[2] / "manifest.json").write_text("{}")
    problems = {
        entry["path"]: [problem["problem"] for problem in entry["problems"]]
        for entry in dsq_json("verify", run, code=1)["checkpoints"]
    }
    assert "cannot be read: No such file or directory" in problems[str(run / NAMES[0])]
    assert any("expected" in problem for problem in problems[str(run / NAMES[1])])
    assert "is not a dsq_ckpt manifest" in problems[str(run / NAMES[2])][0]
    assert "3 of 3 checkpoint(s) damaged" in dsq_error("verify", run)


def test_verify_errors(tmp_path):
    assert "holds no manifest.json" in dsq_error("verify", tmp_path)
    assert "does not exist" in dsq_error("verify", tmp_path / "nowhere")
