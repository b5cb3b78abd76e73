"""Files that Trainer and Accelerate write beside a checkpoint: removed, copied, merged and verified with it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from dsq_ckpt.cli import verify_command
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.engine import merging
from dsq_ckpt.errors import CorruptCheckpoint, SaveFailed
from dsq_ckpt.integrations.staged_checkpoint import StagedCheckpoint
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.manifest_text import insert_checksum
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, run_dsq

LIBRARY = ["chat/long.jinja", "config.json", "scheduler.pt", "tokenizer.json", "trainer_state.json"]
CONFIG = DSQConfig.model_validate({"storage": {"fsync": False}})


def save(goal: Path, step: int = 0, files: list[str] = LIBRARY, asynchronous: bool = False) -> Path:
    """Save as the integrations do."""
    values = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) + 0.01 * step

    def write(directory: Path) -> None:
        for name in files:
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(f"{name} of {step}")

    with StagedCheckpoint(goal, CONFIG, asynchronous=asynchronous) as staged:
        staged.save(lambda: {"w": values, "step": step})
        staged.write(write)
        if asynchronous:
            staged.publish_in_background(lambda: None).result()
        else:
            staged.publish()
    return goal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, the last two deltas."""
    for step in range(3):
        save(tmp_path / "run" / f"checkpoint-{step}", step)
    return tmp_path / "run"


def below(directory: Path) -> list[str]:
    return sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manifest_names_the_files_of_the_library(tmp_path, asynchronous):
    assert Manifest.read(save(tmp_path / "a", asynchronous=asynchronous)).beside == LIBRARY
    assert dsq_json("verify", tmp_path / "a")["ok"]


def test_rm_leaves_no_directory(run):
    """Trainer resumed from what was left of a removed checkpoint, and counted it among those that it keeps."""
    tried = dsq_json("rm", "--dry-run", run / "checkpoint-1", run / "checkpoint-2")
    done = dsq_json("rm", run / "checkpoint-1", run / "checkpoint-2")
    assert [{**entry, "dry_run": False} for entry in tried] == done
    assert {str(run / "checkpoint-1" / name) for name in LIBRARY} <= set(done[0]["files"])
    assert os.listdir(run) == ["checkpoint-0"]
    dsq_stdout("verify", run)


def test_rm_leaves_files_of_others_and_says_so(run):
    """Also a file that a link to a directory gives a name of the library; the status tells scripts, which go on."""
    directory, elsewhere = run / "checkpoint-1", run.parent / "elsewhere"
    (directory / "mine").mkdir()
    (directory / "mine" / "notes.txt").write_text("of the user")
    shutil.move(directory / "chat", elsewhere)
    (directory / "chat").symlink_to(elsewhere)
    for dry, word in (("--dry-run",), "would stay"), ((), "stay"):
        text = dsq_error("rm", *dry, directory)
        assert f"2 other file(s) {word} in '{directory}', such as 'chat': delete them by hand" in text
    assert below(directory) == ["mine/notes.txt"] and (elsewhere / "long.jinja").exists()


def test_a_removal_that_is_cut_short_leaves_what_gc_removes(run, monkeypatch):
    """All but our own files are gone when the first of these goes."""
    removed = []

    def remove(self, file):
        if file.suffix == ".dsq":
            raise OSError(5, "cut short")
        removed.append(file.name)
        file.unlink(missing_ok=True)

    monkeypatch.setattr(type(get_storage(run)), "remove", remove)
    assert run_dsq("rm", run / "checkpoint-1").exit_code == 1
    monkeypatch.undo()
    assert removed[0] == "manifest.json"
    dsq_stdout("gc", run, "--older-than", "0s")
    assert not (run / "checkpoint-1").exists()


def test_rm_on_an_object_store(run, tmp_path):
    """Files of the library go along with a copy, but for those in directories, and go with it."""
    url = f"memory://{tmp_path.name}/run"
    dsq_stdout("cp", run, url)
    assert dsq_json("verify", url)["ok"]
    path = resolve_checkpoint_path(f"{url}/checkpoint-2")
    assert {"config.json", "scheduler.pt"} <= {entry.name for entry in get_storage(path).list_entries(path)}
    dsq_stdout("rm", path)
    assert not get_storage(path).list_entries(path)


@pytest.mark.parametrize("changed", [{"beside": ["../x"]}, {"beside": ["/etc/passwd"]}, {"beside": ["a//b"]}])
def test_a_manifest_that_names_files_elsewhere_is_refused(run, changed):
    file = run / "checkpoint-0" / "manifest.json"
    tree = json.loads(file.read_text()) | changed | {"checksum": "0" * 16}
    file.write_bytes(insert_checksum(json.dumps(tree).encode()))
    with pytest.raises(CorruptCheckpoint, match="may not point there"):
        Manifest.read(run / "checkpoint-0")


def test_a_checkpoint_that_is_replaced_leaves_none_of_its_files(run):
    """Files of the library go though it writes them no more; those of others stay."""
    (run / "checkpoint-0" / "notes.txt").write_text("of the user")
    save(run / "checkpoint-0", 3, ["config.json"])
    left = [name for name in os.listdir(run / "checkpoint-0") if not name[:16].isalnum() or len(name) < 16]
    assert sorted(left) == ["config.json", "manifest.json", "notes.txt"]
    assert Manifest.read(run / "checkpoint-0").beside == ["config.json"]


@pytest.mark.parametrize("again", [True, False])
def test_files_of_others_in_directories_of_the_library_stay(run, again):
    """Whether the library writes into that directory again or not; those that it wrote itself go."""
    goal = run / "checkpoint-0"
    save(goal, 3, ["trainer_state.json", "chat/long.jinja", "chat/short.jinja"])
    (goal / "chat" / "mine.txt").write_text("of the user")
    (goal / "chat" / "more").mkdir()
    (goal / "chat" / "link").symlink_to("nowhere")
    save(goal, 4, ["trainer_state.json", *["chat/long.jinja"][: int(again)]])
    left = {file.name for file in (goal / "chat").iterdir()}
    assert left == {"mine.txt", "more", "link"} | ({"long.jinja"} if again else set())
    assert (goal / "chat" / "mine.txt").read_text() == "of the user"
    assert os.readlink(goal / "chat" / "link") == "nowhere"


@pytest.mark.parametrize("options", [(), ("--keyframe",)])
def test_merge_keeps_all_files(run, options):
    """As `dsq cp` does; Trainer could not resume from a merged checkpoint. It removes the oldest by their times."""
    source = run / "checkpoint-2"
    (source / "notes.txt").write_text("of the user")
    os.utime(source, (1e9, 1e9))
    dsq_stdout("merge", source, run / "merged", *options)
    assert [name for name in below(run / "merged") if name in LIBRARY] == LIBRARY
    assert (run / "merged" / "notes.txt").exists() and (run / "merged").stat().st_mtime == 1e9
    assert Manifest.read(run / "merged").beside == LIBRARY
    assert dsq_json("verify", run)["ok"]
    dsq_stdout("verify", run / "merged")


def test_a_merge_that_fails_leaves_no_files(run, monkeypatch):
    def fail(*_):
        raise SaveFailed("full")

    monkeypatch.setattr(merging, "_commit", fail)
    assert "full" in dsq_error("merge", run / "checkpoint-2", run / "merged")
    assert not (run / "merged").exists()


def test_verify_and_log_name_a_file_that_is_missing(run):
    for number, name in enumerate(("scheduler.pt", "chat/long.jinja")):
        (run / f"checkpoint-{number}" / name).unlink()
        assert f"checkpoint-{number}: lacks {name}" in dsq_stdout("log", run)
        (problem,) = dsq_json("verify", run / f"checkpoint-{number}", code=1)["checkpoints"][0]["problems"]
        assert problem["where"] == name and "is missing" in problem["problem"]
    assert "2 of 3 checkpoint(s) damaged" in dsq_error("verify", run)


def test_a_checkpoint_without_its_manifest_is_damaged(run, monkeypatch):
    """Such a directory got its name when it was complete: no save is under way, and `dsq gc` leaves it alone."""
    monkeypatch.setattr(verify_command, "REMOVAL_TIMEOUT", 0.0)
    (run / "checkpoint-2" / "manifest.json").unlink()
    report = dsq_json("verify", run, code=1)
    assert [entry["ok"] for entry in report["checkpoints"]] == [True, True, False] and not report["incomplete"]
    assert "there is no manifest.json, beside files of Trainer or Accelerate" in dsq_stdout("log", run)
    assert "gc" not in dsq_stdout("log", run)
    assert (run / "checkpoint-2" / "config.json").exists()


def test_a_save_under_way_is_none_that_lost_its_manifest(run):
    """Neither one of ours alone, nor a hidden one with files of the library."""
    (run / "checkpoint-2" / "manifest.json").unlink()
    (run / "checkpoint-2").rename(run / ".checkpoint-2.dsq-01234567.tmp")
    (run / "other").mkdir()
    (run / "other" / "0123456789abcdef-00000.dsq").write_bytes(b"x")
    report = dsq_json("verify", run)
    assert report["ok"] and report["incomplete"] == [".checkpoint-2.dsq-01234567.tmp", "other"]


def test_a_checkpoint_within_another_is_refused_by_its_own_name(run):
    """As where Trainer's output_dir is a checkpoint; the error recommended a hidden name."""
    goal = run / "checkpoint-0" / "checkpoint-3"
    with pytest.raises(SaveFailed) as caught:
        save(goal, 3)
    assert f"'{goal}' lies in" in str(caught.value) and f"to '{run / 'checkpoint-3'}' for example" in str(caught.value)
    assert ".tmp" not in str(caught.value) and not goal.exists()
