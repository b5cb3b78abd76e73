"""`dsq cp`: copies that keep hard links, complete or not there."""

from __future__ import annotations

import os
import shutil

import pytest

import dsq_ckpt
from dsq_ckpt.errors import CheckpointExists, SaveFailed
from dsq_ckpt.storage import checkpoint_copy
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, find_file, flip_bit
from tests.helpers.small_run import NAMES
from tests.helpers.states import find_differences, load_copy

ORPHAN = "0123456789abcdef-00000.dsq"


def on_disk(path):
    sizes = {}
    for place, _, names in os.walk(path):
        for name in names:
            status = os.lstat(os.path.join(place, name))
            sizes[status.st_dev, status.st_ino] = status.st_size
    return len(sizes), sum(sizes.values())


def test_a_run_takes_as_much_room_as_before(trained, run, tmp_path):
    shutil.rmtree(run)  # `copytree` of the fixture has multiplied its files
    shutil.copytree(trained[0], run, copy_function=_linked_copy({}))
    (run / "log").mkdir()
    (run / "log" / "train.txt").write_text("a line")
    (run / "latest").symlink_to(NAMES[2])
    (run / NAMES[2] / "config.json").write_text("{}")
    (run / "aborted").mkdir()
    (run / "aborted" / ORPHAN).write_text("x")
    (run / NAMES[1] / ORPHAN).write_text("x")
    os.mkfifo(run / "pipe")
    copy = tmp_path / "elsewhere" / "copy"
    report = dsq_json("cp", run, copy)
    assert report["checkpoints"] == 3 and report["links"] == 3
    assert sorted(report["left_out"]) == [str(run / "aborted"), str(run / "pipe")]
    expected = on_disk(run)
    assert on_disk(copy) == (expected[0] - 3, expected[1] - 2)  # two leftovers and the pipe
    assert os.readlink(copy / "latest") == NAMES[2] and (copy / "log" / "train.txt").read_text() == "a line"
    assert (copy / NAMES[2] / "config.json").exists()
    assert dsq_json("verify", copy)["ok"]
    assert find_differences(load_copy(copy / NAMES[2], trained[1]), load_copy(run / NAMES[2], trained[1])) == []
    assert os.stat(copy / NAMES[0] / "manifest.json").st_mtime == os.stat(run / NAMES[0] / "manifest.json").st_mtime
    assert os.listdir(tmp_path / "elsewhere") == ["copy"]


def _linked_copy(written):
    def copy(source, target):
        inode = os.stat(source).st_ino
        if inode in written:
            os.link(written[inode], target)
        else:
            written[inode] = shutil.copy2(source, target)
    return copy


def test_a_checkpoint_alone(run, tmp_path):
    assert "1 checkpoint(s)" in dsq_stdout("cp", run / NAMES[2], tmp_path / "one")
    assert dsq_json("verify", tmp_path / "one")["ok"]
    assert dsq_ckpt.latest(tmp_path) == str(tmp_path / "one")


def test_an_altered_file_leaves_no_copy(run, tmp_path):
    flip_bit(find_file(run / NAMES[1]))
    for source in (run, run / NAMES[1]):
        message = dsq_error("cp", source, tmp_path / "copy")
        assert find_file(run / NAMES[1]).name in message and "it was altered" in message
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_nothing_is_overwritten(run, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointExists):
        checkpoint_copy.copy_checkpoints(run, tmp_path / "there")
    with pytest.raises(SaveFailed, match="lies in"):
        checkpoint_copy.copy_checkpoints(run, run / "copy")
    assert os.listdir(tmp_path / "there") == []
    assert "is not a directory" in dsq_error("cp", tmp_path / "nowhere", tmp_path / "copy")


def test_a_refinement_that_training_drops_meanwhile(run, tmp_path, monkeypatch):
    """The checkpoint is copied as it is afterwards."""
    path = run / NAMES[2]
    real, dropped = checkpoint_copy._LocalCopy._copy_file, []

    def after_the_drop(self, source, target, expected):
        if not dropped and expected is not None and expected.role == "refinement":
            dropped.append(source)
            manifest = Manifest.read(path)
            files = [file for file in manifest.files if file.role != "refinement"]
            changed = manifest.model_copy(update={"refinement": "dropped", "files": files})
            changed.write(path, exclusive=False, fsync=False)
            source.unlink()
        return real(self, source, target, expected)

    monkeypatch.setattr(checkpoint_copy._LocalCopy, "_copy_file", after_the_drop)
    checkpoint_copy.copy_checkpoints(path, tmp_path / "copy")
    assert dropped and dsq_json("verify", tmp_path / "copy")["ok"]
    assert dsq_ckpt.describe(tmp_path / "copy")["refinement"] == "dropped"
