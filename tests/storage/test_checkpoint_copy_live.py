"""`dsq cp` of a run in which training goes on: what is removed meanwhile is left out, and told."""

from __future__ import annotations

import os
import shutil

import pytest

from dsq_ckpt.errors import CheckpointNotFound
from dsq_ckpt.storage import checkpoint_copy, remote_copy
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, iter_checkpoints
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.removal import remove_checkpoint
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, find_file, flip_bit
from tests.helpers.remote_runs import chain
from tests.helpers.small_run import NAMES


@pytest.fixture
def at_file(monkeypatch):
    """Let something happen at a file, before it is copied."""
    def arrange(happens, when):
        real, done = checkpoint_copy._LocalCopy._copy_file, []

        def changed(self, source, target, expected):
            if not done and when(source):
                done.append(source)
                happens()
            return real(self, source, target, expected)

        monkeypatch.setattr(checkpoint_copy._LocalCopy, "_copy_file", changed)
        return done

    return arrange


def _without_manifest(path):
    (path / MANIFEST).unlink()


def _removed(path):
    shutil.rmtree(path)


@pytest.mark.parametrize("how", [_removed, _without_manifest])
@pytest.mark.parametrize("role", ["own", "index"])
@pytest.mark.parametrize("number", range(3))
def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(run, tmp_path, at_file, how, role, number):
    """Whichever it is, when it is copied itself."""
    path = run / NAMES[number]
    file = find_file(path, role)

    def happens():
        how(path)
        file.unlink(missing_ok=True)

    done = at_file(happens, lambda source: source == file)
    report = dsq_json("cp", run, tmp_path / "copy")
    assert done and report["removed"] == [str(path)] and report["checkpoints"] == 2
    assert sorted(os.listdir(tmp_path / "copy")) == [name for name in NAMES if name != path.name]
    result = dsq_json("verify", tmp_path / "copy")
    assert result["ok"] and len(result["checkpoints"]) == 2
    files = {file.stat().st_ino: file.stat().st_size for file in (tmp_path / "copy").rglob("*") if file.is_file()}
    assert (report["files"], report["bytes"]) == (len(files), sum(files.values()))


@pytest.mark.parametrize("number", [1, 2])
def test_one_that_goes_before_its_turn(run, tmp_path, at_file, number):
    path = run / NAMES[number]
    at_file(lambda: shutil.rmtree(path), lambda source: True)
    text = dsq_stdout("cp", run, tmp_path / "copy")
    assert f"left out: {path}: it was removed while the others were copied" in text
    assert dsq_json("verify", tmp_path / "copy")["ok"]


def test_files_that_are_lost_are_damage(run, tmp_path, at_file):
    """As long as the manifest that names them is there."""
    file = find_file(run / NAMES[1])
    at_file(file.unlink, lambda source: source == file)
    assert file.name in dsq_error("cp", run, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_damage_that_is_seen_while_another_goes(run, tmp_path, at_file):
    flip_bit(find_file(run / NAMES[2]))
    at_file(lambda: shutil.rmtree(run / NAMES[0]), lambda source: source.parent.name == NAMES[0])
    assert "it was altered" in dsq_error("cp", run, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_the_only_one_that_was_named(run, tmp_path, at_file):
    path = run / NAMES[2]
    at_file(lambda: shutil.rmtree(path), lambda source: True)
    assert "No such file" in dsq_error("cp", path, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["run"]


@pytest.mark.parametrize("kinds", [("disk", "store"), ("store", "disk"), ("store", "store")])
def test_object_stores(kinds, store, tmp_path, monkeypatch):
    source, target = (
        resolve_checkpoint_path(f"{tmp_path if kind == 'disk' else store}/{name}")
        for kind, name in zip(kinds, ("run", "copy"), strict=True)
    )
    paths = chain(str(source), 3)
    real, done = remote_copy.copy_between_storages, []

    def changed(place, *arguments, **options):
        if not done and place.parent == paths[1]:
            done.append(place)
            real(place, *arguments, **options)  # so that something is there of it
            remove_checkpoint(paths[1])
            raise FileNotFoundError(2, "No such file or directory", str(place))
        return real(place, *arguments, **options)

    monkeypatch.setattr(remote_copy, "copy_between_storages", changed)
    result = checkpoint_copy.copy_checkpoints(source, target)
    assert done and result.removed == [paths[1]] and result.checkpoints == 2
    assert [path.name for path, _ in iter_checkpoints(target)] == ["step-1", "step-3"]
    assert not get_storage(target).list_entries(target / "step-2")
    assert dsq_json("verify", target)["ok"]


def test_all_go_from_an_object_store(store, tmp_path, monkeypatch):
    paths = chain(f"{store}/run", 2)
    real = remote_copy.RemoteCopy._copy_checkpoint

    def changed(self, *arguments):
        for path in paths:
            if get_storage(path).list_entries(path):
                remove_checkpoint(path)
        return real(self, *arguments)

    monkeypatch.setattr(remote_copy.RemoteCopy, "_copy_checkpoint", changed)
    with pytest.raises(CheckpointNotFound, match="removed while it was copied"):
        checkpoint_copy.copy_checkpoints(f"{store}/run", tmp_path / "copy")
    assert os.listdir(tmp_path) == []


def test_a_manifest_that_does_not_parse_is_damage(run, tmp_path):
    (run / NAMES[1] / MANIFEST).write_text("{}")
    assert NAMES[1] in dsq_error("cp", run, tmp_path / "copy")
    assert Manifest.read(run / NAMES[0])
