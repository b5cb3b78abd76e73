"""What is not committed, what lost a race to its directory, and what is said where a disk fails around the commit."""

from __future__ import annotations

import errno
import os

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage import local_commit
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.removal import remove_checkpoint
from tests.helpers.states import find_differences, load_copy

CONFIG = {"quantize": {"min_elements": 100}, "storage": {"fsync": False, "block_elements": 1 << 10}}


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(40, 60, generator=generator), "list": [torch.ones(3)], "n": 5}


def test_the_loser_of_a_race_is_told_that_the_checkpoint_exists(tmp_path, monkeypatch):
    from dsq_ckpt.engine import commit as committing

    original = committing.write_index

    def late(directory, *args):
        monkeypatch.setattr(committing, "write_index", original)
        dsq_ckpt.save(state(1), directory, config=CONFIG, history=dsq_ckpt.SaveHistory())
        return original(directory, *args)

    monkeypatch.setattr(committing, "write_index", late)
    with pytest.raises(dsq_ckpt.CheckpointExists, match="another save completed"):
        dsq_ckpt.save(state(), tmp_path / "a", config=CONFIG)
    assert find_differences(load_copy(tmp_path / "a", state()), load_copy(tmp_path / "a", state())) == []


def test_a_flush_that_fails_after_the_commit_is_a_warning(tmp_path, monkeypatch):
    """The checkpoint is there for everybody, but may not survive: what is older keeps its refinement."""
    from dsq_ckpt.storage import backend

    dsq_ckpt.save(state(), tmp_path / "1", config=CONFIG)
    flushing = {**CONFIG, "storage": {"fsync": True}}

    def fail(directory):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(backend, "sync_directory", fail)
    with pytest.warns(UserWarning, match="flushing its directory failed"):
        dsq_ckpt.save(state(1), tmp_path / "2", config=flushing)
    monkeypatch.undo()
    assert Manifest.read(tmp_path / "1").refinement == "kept"
    assert find_differences(load_copy(tmp_path / "2", state()), load_copy(tmp_path / "2", state())) == []


def test_new_directories_are_flushed_in_their_parents(tmp_path, monkeypatch):
    from dsq_ckpt.storage import atomic_io

    flushed = []
    monkeypatch.setattr(atomic_io, "sync_directory", lambda path: flushed.append(path))
    atomic_io.make_directory(tmp_path / "a" / "b" / "c", fsync=True)
    assert flushed == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    atomic_io.make_directory(tmp_path / "a" / "b" / "c", fsync=True)
    assert flushed[3:] == [tmp_path / "a" / "b"]


def test_a_manifest_that_cannot_be_read_back_says_why(tmp_path, monkeypatch):
    from dsq_ckpt.api import saving as api

    read = Manifest.read.__func__

    def failing(cls, directory):
        raise dsq_ckpt.CorruptCheckpoint(f"'{directory}/manifest.json' cannot be read (Input/output error)")

    class Unreadable(Manifest):
        read = classmethod(failing)

    monkeypatch.setattr(api, "Manifest", Unreadable)
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"committed, but cannot be read back.*Input/output error"):
        dsq_ckpt.save(state(), tmp_path / "a", config=CONFIG)
    assert read(Manifest, tmp_path / "a").refinement == "kept"


@pytest.mark.parametrize(
    "number, says", [(errno.EIO, "but cannot be read back: .*Input/output error"), (errno.ENOENT, "but is gone")]
)
@pytest.mark.parametrize("background", [False, True])
def test_a_committed_manifest_that_cannot_be_looked_at_says_why(tmp_path, monkeypatch, number, says, background):
    def fail(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("dsq_ckpt.engine.result.get_storage", fail)
    save = dsq_ckpt.async_save if background else dsq_ckpt.save
    with pytest.raises(dsq_ckpt.SaveFailed, match=f"^the checkpoint was committed, {says}.*{tmp_path / 'a'}"):
        save(state(), tmp_path / "a", config=CONFIG).result()
    assert Manifest.read(tmp_path / "a").refinement == "kept"


def test_chunks_that_do_not_cover_are_not_committed(tmp_path, monkeypatch):
    from dsq_ckpt.dcp import writer

    original = writer.make_contents

    def larger(*args):
        contents = original(*args)
        contents.tensors["w"]["shape"] = [41, 60]
        return contents

    monkeypatch.setattr(writer, "make_contents", larger)
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"'w' of shape .* 60 of 2460 elements are missing"):
        dsq_ckpt.save(state(), tmp_path / "a", config=CONFIG)
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_manifest_that_was_read_before_is_read_again(tmp_path):
    """Parsed manifests are kept by their bytes, so that a replaced or damaged one is never taken for the one before."""
    path = tmp_path / "c"
    first = dsq_ckpt.save(state(), path, config=CONFIG)
    assert Manifest.read(path).save_id == Manifest.read(path).save_id == first.save_id
    second = dsq_ckpt.save(state(1), path, config=CONFIG, overwrite=True)
    assert Manifest.read(path).save_id == second.save_id != first.save_id
    text = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(text.replace(b'"ranks": 1', b'"ranks": 2'))
    for _ in range(2):
        with pytest.raises(dsq_ckpt.CorruptCheckpoint):
            Manifest.read(path)


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Return a function that saves into `tmp_path/last` and calls another function at its commit."""
    def save(value, intervene, **options):
        original = local_commit.Manifest.write

        def write(manifest, *args, **kwargs):
            monkeypatch.setattr(local_commit.Manifest, "write", original)
            intervene()
            return original(manifest, *args, **kwargs)

        monkeypatch.setattr(local_commit.Manifest, "write", write)
        return dsq_ckpt.save(value, tmp_path / "last", config=CONFIG, overwrite=True, **options)

    return save


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def check_names(directory):
    """Check that a directory has the files of its manifest alone."""
    assert names(directory) == sorted([*(file.name for file in Manifest.read(directory).files), "manifest.json"])


def check_whole(directory):
    check_names(directory)
    load_copy(directory, state())


def test_a_save_does_not_commit_without_files_that_another_one_removed(tmp_path, interrupted):
    """Both replace the checkpoint that the first is coded against: what the second has saved is there afterwards."""
    last, mine, other = tmp_path / "last", dsq_ckpt.SaveHistory(), dsq_ckpt.SaveHistory()
    dsq_ckpt.save(state(), last, config=CONFIG, history=mine)
    results = []

    def replace():
        results.append(dsq_ckpt.save(state(1), last, config=CONFIG, overwrite=True, history=other))

    changed = {**state(), "w": state()["w"] * 1.001}
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"replaced meanwhile by another save.* each job a directory"):
        interrupted(changed, replace, history=mine)
    assert Manifest.read(last).save_id == results[0].save_id
    check_whole(last)
    with pytest.warns(UserWarning, match="is gone or was replaced; writing a keyframe"):
        dsq_ckpt.save(changed, last, config=CONFIG, overwrite=True, history=mine)
    assert Manifest.read(last).save_id != results[0].save_id
    check_whole(last)


def test_a_save_whose_parent_was_removed_at_its_commit_leaves_nothing(tmp_path, interrupted):
    dsq_ckpt.save(state(), tmp_path / "last", config=CONFIG)
    with pytest.raises(dsq_ckpt.SaveFailed, match="replaced meanwhile by another save, or removed"):
        interrupted({**state(), "w": state()["w"] * 1.001}, lambda: remove_checkpoint(tmp_path / "last"))
    assert not (tmp_path / "last").exists() or names(tmp_path / "last") == []


def test_files_that_the_manifest_of_another_save_names_are_not_removed(tmp_path, monkeypatch):
    """The other one commits when this one has replaced the manifest, and is about to remove what it replaced."""
    last, mine, other = tmp_path / "last", dsq_ckpt.SaveHistory(), dsq_ckpt.SaveHistory()
    dsq_ckpt.save(state(), last, config=CONFIG, history=mine)
    old = Manifest.read(last)
    original = local_commit._remove_replaced

    def late(path, replaced):
        monkeypatch.setattr(local_commit, "_remove_replaced", original)
        (entry,) = (file for file in old.files if file.role == "own")
        assert entry.name in replaced
        named = Manifest.read(path)
        entry = entry.model_copy(update={"role": "ancestor"})
        named.model_copy(update={"save_id": "0" * 16, "files": [*named.files, entry]}).write(
            path, exclusive=False, fsync=False
        )
        original(path, replaced)

    monkeypatch.setattr(local_commit, "_remove_replaced", late)
    with pytest.raises(dsq_ckpt.SaveFailed, match="another save, 0000000000000000, has replaced it since"):
        dsq_ckpt.save(state(1), last, config=CONFIG, overwrite=True, history=other)
    check_names(last)
