"""Damage to what a chain of checkpoints shares: found within a few saves, never built upon, repaired from copies."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dsq_ckpt
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.engine import parent_integrity
from dsq_ckpt.engine.history import default_history
from dsq_ckpt.engine.parent_integrity import CHECK_PERIOD, _is_due, _restore_or_describe
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.manifest import Manifest
from tests.engine.chains import data_file, directly, flip, in_background, readable, saves, weights
from tests.helpers.parent_checks import finish_checks
from tests.helpers.states import find_differences, load_copy


@pytest.fixture(autouse=True)
def nothing_under_way():
    parent_integrity._pending_checks.clear()


@pytest.mark.parametrize("save", [dsq_ckpt.save, in_background, directly])
def test_a_damaged_keyframe_is_found_and_not_built_upon(tmp_path, save):
    assert saves(tmp_path, 3, save) == []
    damaged = data_file(tmp_path / "00")
    flip(damaged)
    messages = saves(tmp_path, CHECK_PERIOD + 1, save, first=3)
    assert len(messages) == 1
    assert damaged.name in messages[0] and "writing a keyframe" in messages[0] and "no intact copy" in messages[0]
    last = 3 + CHECK_PERIOD
    depths = [Manifest.read(tmp_path / f"{number:02d}").depth for number in range(3, last + 1)]
    keyframe = depths.index(0)
    assert depths[keyframe:] == list(range(len(depths) - keyframe))
    named = [name for name in ("'00'", "'01'", "'02'") if name in messages[0]]
    assert named == ["'00'", "'01'", "'02'"]
    assert readable(tmp_path) == [f"{number:02d}" for number in range(3 + keyframe, last + 1)]


@pytest.mark.parametrize("save", [dsq_ckpt.save, in_background, directly])
def test_a_save_does_not_wait_for_the_check(tmp_path, monkeypatch, save):
    """Files are read beside it: one that begins while the device does not answer ends before they are read."""
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: False)  # or the next save has a check, too
    saves(tmp_path, 2, save)
    finish_checks()  # one that is late would wait too, and the next save for it
    answered = threading.Event()
    check_file = parent_integrity.check_file

    def slow(path, expected):
        answered.wait()
        return check_file(path, expected)

    monkeypatch.setattr(parent_integrity, "check_file", slow)
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: True)
    flip(data_file(tmp_path / "00"))
    assert saves(tmp_path, 1, save, first=2) == []
    answered.set()
    [message] = saves(tmp_path, 1, save, first=3)
    assert "'00', '01', '02' cannot be read any more" in message
    assert [Manifest.read(tmp_path / f"{number:02d}").depth for number in range(4)] == [0, 1, 2, 0]


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_damaged(tmp_path, monkeypatch):
    """A run that keeps its newest checkpoint alone."""
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: False)  # or the next save has a check, too
    saves(tmp_path, 2)
    finish_checks()  # one that is late would wait too, and the next save for it
    deleted = threading.Event()
    check_file = parent_integrity.check_file

    def late(path, expected):
        deleted.wait()
        return check_file(path, expected)

    monkeypatch.setattr(parent_integrity, "check_file", late)
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: True)
    saves(tmp_path, 1, first=2)
    for name in ("00", "01"):
        shutil.rmtree(tmp_path / name)
    deleted.set()
    assert saves(tmp_path, 1, first=3) == []
    assert Manifest.read(tmp_path / "03").depth == 3


@pytest.mark.parametrize("options", [{"config": {"delta": {"max_chain": 1}}}, {"parent": None}])
def test_damage_is_reported_by_a_save_that_is_a_keyframe_anyway(tmp_path, monkeypatch, options):
    """The last delta of a chain has a check too."""
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: True)
    saves(tmp_path, 1)
    damaged = data_file(tmp_path / "00")
    flip(damaged)
    assert saves(tmp_path, 1, first=1) == []
    [message] = saves(tmp_path, 1, first=2, **options)
    assert damaged.name in message and "this save does not need them" in message
    assert "'00', '01' cannot be read any more" in message
    assert saves(tmp_path, 2, first=3) == []
    assert [Manifest.read(tmp_path / f"{number:02d}").depth for number in range(5)] == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("name", ["01", "02"])
@pytest.mark.parametrize("load", [
    dsq_ckpt.load, lambda state, path: dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(path), no_dist=True),
])
def test_a_checkpoint_that_a_load_found_damaged_is_not_built_upon(tmp_path, monkeypatch, load, name):
    """A rollback that failed; the next save does not wait until the file is due to be checked."""
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: False)
    saves(tmp_path, 3)
    damaged = data_file(tmp_path / "00")
    flip(damaged)
    with pytest.raises((dsq_ckpt.DSQError, CheckpointException), match=damaged.name):
        load(weights(), tmp_path / name)
    [message] = saves(tmp_path, 1, first=3)
    assert damaged.name in message and "writing a keyframe" in message
    assert saves(tmp_path, 1, first=4) == []
    assert [Manifest.read(tmp_path / f"{number:02d}").depth for number in range(5)] == [0, 1, 2, 0, 1]


def test_a_copy_is_restored_before_a_keyframe_too(tmp_path, monkeypatch):
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: True)
    config = {"storage": {"replicate_keyframes": True}, "delta": {"max_chain": 2}}
    saves(tmp_path, 2, config=config)
    flip(tmp_path / "01" / data_file(tmp_path / "00").name)
    assert saves(tmp_path, 1, first=2, config=config) == []
    [message] = saves(tmp_path, 1, first=3, config=config)
    assert "restored in '01' from the intact copy in '00'" in message
    assert readable(tmp_path) == ["00", "01", "02", "03"]


def test_a_damaged_copy_that_the_parent_does_not_share_costs_no_keyframe(tmp_path, monkeypatch):
    """The checkpoint that has it is named, and restored; its child has the other copy."""
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: True)
    config = {"storage": {"replicate_keyframes": True}}
    saves(tmp_path, 2, config=config)
    damaged = tmp_path / "01" / data_file(tmp_path / "00").name
    flip(damaged)
    assert saves(tmp_path, 1, first=2, config=config) == []
    [message] = saves(tmp_path, 1, first=3, config=config)
    assert f"'{damaged}' has checksum" in message and "the parent" not in message
    assert f"'{tmp_path / '02'}" not in message
    assert "restored in '01' from the intact copy in '00'" in message
    assert saves(tmp_path, 1, first=4, config=config) == []
    assert [Manifest.read(tmp_path / f"{number:02d}").depth for number in range(5)] == [0, 1, 2, 3, 4]


def test_a_damaged_copy_whose_checkpoint_was_deleted_since(tmp_path, monkeypatch):
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: True)
    config = {"storage": {"replicate_keyframes": True}}
    saves(tmp_path, 2, config=config)
    flip(tmp_path / "01" / data_file(tmp_path / "00").name)
    saves(tmp_path, 1, first=2, config=config)
    [check] = parent_integrity._pending_checks
    assert check.wait()
    shutil.rmtree(tmp_path / "01")
    [message] = saves(tmp_path, 1, first=3, config=config)
    assert "no checkpoint that is left has this copy" in message
    assert Manifest.read(tmp_path / "03").depth == 3


@pytest.mark.parametrize("error", [MemoryError("out of memory"), OSError(5, "Input/output error")])
def test_a_check_that_fails_does_not_pass_for_a_sound_file(tmp_path, monkeypatch, error):
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: True)
    saves(tmp_path, 2)
    finish_checks()
    stat = Path.stat

    def fails(*_, **__):
        raise error

    def broken(path, **options):
        return fails() if threading.current_thread().name == "dsq-parent-check" else stat(path, **options)

    if isinstance(error, MemoryError):
        monkeypatch.setattr(parent_integrity, "check_file", fails)
    else:  # the directory of a file that is damaged cannot be looked into any more
        flip(data_file(tmp_path / "00"))
        monkeypatch.setattr(Path, "stat", broken)
    assert saves(tmp_path, 1, first=2) == []
    [check] = parent_integrity._pending_checks
    check.wait()
    monkeypatch.undo()
    [message] = saves(tmp_path, 1, first=3)
    assert "writing a keyframe" in message
    assert ("could not be checked" in message and "out of memory" in message) or "has checksum" in message
    assert Manifest.read(tmp_path / "03").depth == 0


def test_a_signal_does_not_wait_for_the_check(tmp_path, monkeypatch):
    """Nor is what the check then finds lost with the save that was stopped."""
    monkeypatch.setattr(parent_integrity, "_is_due", lambda name, depth: True)
    saves(tmp_path, 2)
    flip(data_file(tmp_path / "00"))
    answered = threading.Event()
    check_file, result = parent_integrity.check_file, parent_integrity._FileCheck.wait

    def slow(path, expected):
        answered.wait(600)
        return check_file(path, expected)

    def interrupted(check):
        if not answered.is_set():
            signal.raise_signal(signal.SIGINT)
        return result(check)

    monkeypatch.setattr(parent_integrity, "check_file", slow)
    saves(tmp_path, 1, first=2)
    monkeypatch.setattr(parent_integrity._FileCheck, "wait", interrupted)
    [check] = parent_integrity._pending_checks
    with pytest.raises(KeyboardInterrupt):
        saves(tmp_path, 1, first=3)
    assert check._thread.is_alive()
    answered.set()
    [message] = saves(tmp_path, 1, first=3)
    assert "'00', '01', '02' cannot be read any more" in message


def test_every_file_is_due_once_in_so_many_saves():
    names = [f"{number:016x}-00000.dsq" for number in range(200)]
    for first in (0, 5, 31):
        due = [sum(_is_due(name, first + depth) for depth in range(CHECK_PERIOD)) for name in names]
        assert due == [1] * len(names)
    at_once = [sum(_is_due(name, depth) for name in names) for depth in range(CHECK_PERIOD)]
    assert max(at_once) < 2 * len(names) / CHECK_PERIOD


def test_a_missing_ancestor_is_damage_too(tmp_path):
    saves(tmp_path, 2)
    data_file(tmp_path / "01", "ancestor").unlink()
    assert "lacks" in saves(tmp_path, 1, first=2)[0]
    assert Manifest.read(tmp_path / "02").depth == 0


def test_all_files_are_checked_before_they_are_decoded(tmp_path):
    """Where the codes of the parent are not in memory, and by their own parent's name the wrong file may be due."""
    saves(tmp_path, 4)
    flip(data_file(tmp_path / "02"))
    messages = saves(tmp_path, 1, first=4, parent=tmp_path / "03", history=dsq_ckpt.SaveHistory())
    assert len(messages) == 1 and data_file(tmp_path / "02").name in messages[0]
    assert Manifest.read(tmp_path / "04").depth == 0


@pytest.mark.parametrize("kind", ["index", "manifest.json"])
def test_a_parent_whose_tables_are_damaged(tmp_path, kind):
    saves(tmp_path, 2)
    [path] = (tmp_path / "01").glob(f"*{kind}")
    flip(path)
    messages = saves(tmp_path, 2, first=2)
    assert len(messages) == 1 and path.name in messages[0] and "writing a keyframe" in messages[0]
    assert [Manifest.read(tmp_path / name).depth for name in ("02", "03")] == [0, 1]


def test_the_cause_of_a_failed_save_is_looked_for_before_the_next(tmp_path):
    """Damage that only shows when the parent is used fails that save, and the next one checks every file."""
    saves(tmp_path, 3)
    parent = data_file(tmp_path / "02")
    with CheckpointFiles(tmp_path / "02") as files:
        contents = files.open_reader(parent.name).size - 40  # in its table of contents
    flip(parent, contents / parent.stat().st_size)
    number = 3
    while True:
        try:
            messages = saves(tmp_path, 1, first=number)
            break
        except dsq_ckpt.DSQError as error:
            assert parent.name in str(error)
            number += 1
    assert number <= 4 and parent.name in messages[0]
    assert Manifest.read(tmp_path / f"{number:02d}").depth == 0


@pytest.mark.parametrize("copies", [2, 3])
def test_keyframes_in_several_copies(tmp_path, copies):
    config = {"storage": {"replicate_keyframes": True if copies == 2 else copies}, "delta": {"max_chain": 6}}
    saves(tmp_path, 7, config=config)
    keyframe = data_file(tmp_path / "00").name
    inodes = [os.stat(tmp_path / f"{number:02d}" / keyframe).st_ino for number in range(7)]
    assert len(set(inodes)) == copies
    for first in range(7 - copies + 1):
        assert len(set(inodes[first : first + copies])) == copies
    flip(tmp_path / "04" / keyframe)
    hit = {f"{number:02d}" for number in range(7) if inodes[number] == inodes[4]}
    assert set(readable(tmp_path)) == {f"{number:02d}" for number in range(7)} - hit


def test_a_damaged_copy_is_restored_from_an_intact_one(tmp_path):
    config = {"storage": {"replicate_keyframes": True}}
    saves(tmp_path, 4, config=config)
    keyframe = data_file(tmp_path / "00").name
    whole = [load_copy(tmp_path / f"{number:02d}", weights(), refinement=False) for number in range(4)]
    flip(tmp_path / "03" / keyframe)
    history = dsq_ckpt.SaveHistory()
    messages = saves(tmp_path, 1, first=4, config=config, parent=tmp_path / "03", history=history)
    assert len(messages) == 1 and "restored in '01', '03' from the intact copy in '00'" in messages[0]
    assert len({os.stat(tmp_path / name / keyframe).st_ino for name in ("00", "01", "02", "03")}) == 2
    for number in range(4):
        again = load_copy(tmp_path / f"{number:02d}", weights(), refinement=False)
        assert find_differences(again, whole[number]) == []


def test_copies_outlive_the_checkpoints_they_came_from(tmp_path):
    """A run that keeps its last two checkpoints has two copies at any time."""
    config = {"storage": {"replicate_keyframes": True}}
    saves(tmp_path, 1, config=config)
    keyframe = data_file(tmp_path / "00").name
    for number in range(1, 6):
        saves(tmp_path, 1, first=number, config=config)
        if number > 1:
            shutil.rmtree(tmp_path / f"{number - 2:02d}")
        paths = sorted(tmp_path.iterdir())
        assert len({os.stat(path / keyframe).st_ino for path in paths}) == len(paths) == 2


@pytest.mark.parametrize("given, copies", [(False, 1), (True, 2), (1, 1), (2, 2), (8, 8)])
def test_replicate_keyframes_sets_the_number_of_copies(given, copies):
    assert DSQConfig(storage={"replicate_keyframes": given}).storage.keyframe_copies == copies


@pytest.mark.parametrize("wrong", [0, 9, -1, "yes please", 2.5])
def test_wrong_numbers_of_copies(wrong):
    with pytest.raises(dsq_ckpt.ConfigError, match="replicate_keyframes"):
        DSQConfig(storage={"replicate_keyframes": wrong})


def test_memory_of_a_damaged_chain_is_not_used(tmp_path):
    saves(tmp_path, 2)
    flip(data_file(tmp_path / "00"))
    [checkpoint] = default_history().checkpoints()
    checkpoint.suspect = True
    assert len(saves(tmp_path, 1, first=2)) == 1
    flip(data_file(tmp_path / "01"))  # it is no longer needed
    assert saves(tmp_path, CHECK_PERIOD + 1, first=3) == []
    assert readable(tmp_path)[-1] == f"{3 + CHECK_PERIOD:02d}"


def untouched(file):
    """Return the inode, size and modification time of a file, which stay as long as nobody writes it."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def test_a_file_that_is_sound_when_it_is_read_again_is_left_alone(tmp_path):
    """An error of a disk may be gone at the second look."""
    path = tmp_path / "run" / "0"
    dsq_ckpt.save(weights(), path)
    before = untouched(data_file(path))
    told = _restore_or_describe(path, data_file(path).name, "cannot be read: Input/output error")
    assert "cannot be read: Input/output error" in told and "sound when it is read again" in told
    assert untouched(data_file(path)) == before
