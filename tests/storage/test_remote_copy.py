"""`dsq cp` between a disk and object stores: the same values, nothing twice, complete checkpoints or none."""

from __future__ import annotations

import os

import pytest
import torch
from typer.testing import CliRunner

import dsq_ckpt
from dsq_ckpt.cli import app
from dsq_ckpt.errors import CheckpointExists, CheckpointNotFound, CorruptCheckpoint, SaveFailed
from dsq_ckpt.storage import checkpoint_copy, remote_copy
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.checkpoint_copy import compute_copy_size, copy_checkpoints
from dsq_ckpt.storage.description import list_linked_refinement
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, iter_checkpoints
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.removal import remove_checkpoint
from tests.helpers.remote_runs import chain, loaded, names_in, put, state_of, stored_chain


@pytest.fixture
def place(tmp_path, store):
    """Gives a new place of a kind."""
    return lambda kind, name: resolve_checkpoint_path(str(tmp_path / name) if kind == "disk" else f"{store}/{name}")


def _size(run) -> int:
    """Bytes of all files, hard links once."""
    if isinstance(run, type(resolve_checkpoint_path("memory://a"))):
        return sum(
            entry.size for path in [entry.name for entry in get_storage(run).list_entries(run)]
            for entry in get_storage(run).list_entries(run / path) if entry.name != MANIFEST
        )
    sizes = {
        file.stat().st_ino: file.stat().st_size for file in run.rglob("*") if file.is_file() and file.name != MANIFEST
    }
    return sum(sizes.values())


@pytest.mark.parametrize("kinds", [("disk", "store"), ("store", "disk"), ("store", "store")])
def test_a_run_is_copied_as_it_is(place, kinds):
    source, target = place(kinds[0], "run"), place(kinds[1], "copied")
    paths = stored_chain(str(source), 4)  # the refinement of the first is dropped, and another one is its difference
    done = copy_checkpoints(source, target)
    assert done.checkpoints == 4
    manifests = [Manifest.read(path) for path in paths]
    older = [file.size for manifest in manifests for file in manifest.files if file.role == "older_refinement"]
    assert bool(older) == (kinds[0] == "disk") and done.links == 1 + 2 + 3
    assert [manifest.refinement for manifest in manifests] == ["dropped", *["kept"] * 3]
    # A store has no links, and a manifest there refers to base files of others alone.
    copies = sum(older) - sum(file.size for file in list_linked_refinement(manifests))
    assert _size(source) + copies == _size(target) == done.bytes
    for path in paths:
        manifest, other = Manifest.read(target / path.name), Manifest.read(path)
        assert torch.equal(loaded(target / path.name)["w"], loaded(path)["w"])
        assert manifest.model_dump(exclude={"files", "checksum"}) == other.model_dump(exclude={"files", "checksum"})
    assert [path.name for path, _ in iter_checkpoints(target)] == [path.name for path in paths]
    result = CliRunner().invoke(app, ["verify", str(target)])
    assert result.exit_code == 0, result.output
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.load({}, target / "step-4", history=history)
    assert dsq_ckpt.save(state_of(5), target / "step-5", history=history).depth == 4


@pytest.mark.parametrize("kinds", [("disk", "store"), ("store", "disk"), ("store", "store")])
def test_a_checkpoint_is_copied_with_all_that_it_needs(place, kinds):
    source, target = place(kinds[0], "run"), place(kinds[1], "kept/one")
    paths = stored_chain(str(source), 3)
    value = loaded(paths[2])["w"]
    copy_checkpoints(paths[2], target)
    for path in paths:
        remove_checkpoint(path)
    assert torch.equal(loaded(target)["w"], value)
    assert {file.held_by for file in Manifest.read(target).files} == {None}


def test_files_of_a_removed_checkpoint_are_held_by_the_first_that_needs_them(place):
    source, target = place("store", "run"), place("store", "copied")
    paths = stored_chain(str(source), 3)
    value = loaded(paths[2])["w"]
    remove_checkpoint(paths[0])
    copy_checkpoints(source, target)
    remove_checkpoint(paths[1])
    remove_checkpoint(paths[2])
    assert torch.equal(loaded(target / "step-3")["w"], value)
    assert not names_in(target / "step-1")


def test_a_synchronized_run_becomes_one_with_links(place, tmp_path, store):
    import fsspec

    paths = stored_chain(f"{store}/run", 3)
    system, root = fsspec.core.url_to_fs(f"{store}/run", skip_instance_cache=True)
    system.get(root, str(tmp_path / "run"), recursive=True)
    result = CliRunner().invoke(app, ["cp", str(tmp_path / "run"), str(tmp_path / "linked")])
    assert result.exit_code == 0, result.output
    for path in paths:
        assert torch.equal(loaded(tmp_path / "linked" / path.name)["w"], loaded(path)["w"])
        assert {file.held_by for file in Manifest.read(tmp_path / "linked" / path.name).files} == {None}


@pytest.mark.parametrize("kinds", [("disk", "store"), ("store", "disk"), ("store", "store")])
def test_a_run_with_two_checkpoints_of_one_save(place, kinds):
    """One is a copy of the other, within the run."""
    source, target = place(kinds[0], "run"), place(kinds[1], "copied")
    paths = stored_chain(str(source), 2)
    copy_checkpoints(paths[1], source / "step-2b")
    copy_checkpoints(source, target)
    for name in ("step-1", "step-2", "step-2b"):
        assert torch.equal(loaded(target / name)["w"], loaded(source / name)["w"])


@pytest.mark.parametrize("kinds", [("disk", "store"), ("store", "disk")])
def test_a_damaged_file_is_not_copied(place, kinds):
    source, target = place(kinds[0], "run"), place(kinds[1], "copied")
    paths = stored_chain(str(source), 3)
    file = next(file for file in Manifest.read(paths[2]).files if file.role == "own")
    put(paths[2] / file.name, bytes(file.size))
    with pytest.raises(CorruptCheckpoint, match=file.name):
        copy_checkpoints(source, target)
    assert get_storage(target).list_entries(target) == []
    assert get_storage(target).list_entries(target / "step-1") == []


def test_skipped_files_are_reported(place):
    source, target = place("disk", "run"), place("store", "copied")
    stored_chain(str(source), 1)
    (source / "notes.txt").write_text("mine")
    (source / "killed").mkdir()
    (source / "killed" / "0123456789abcdef-00000.dsq").write_text("x")
    os.mkfifo(source / "pipe")
    (source / "latest").write_text("killed")
    assert {path.name: why for path, why in copy_checkpoints(source, target).left_out.items()} == {
        "killed": "a directory that is no complete checkpoint", "pipe": "neither a file nor a directory",
        "latest": "it names 'killed', which is not in the copy",
    }
    assert get_storage(target).read(target / "notes.txt", 99) == b"mine"
    (source / "latest").unlink()
    (source / "pipe").unlink()
    with pytest.raises(CheckpointExists, match="exists"):
        copy_checkpoints(source, target)
    with pytest.raises(CheckpointNotFound):
        copy_checkpoints(source / "killed", place("store", "other"))
    with pytest.raises(SaveFailed, match="lies in"):
        copy_checkpoints(target, target / "below")


@pytest.mark.parametrize("kinds", [("disk", "store"), ("store", "disk"), ("store", "store")])
def test_files_beside_checkpoints_go_along(place, kinds, monkeypatch):
    """Files of the run and of each checkpoint, as on a disk; a name of the newest one appears after all else."""
    source, target = place(kinds[0], "run"), place(kinds[1], "copied")
    stored_chain(str(source), 2)
    files = {"latest": b"step-2", "zero_to_fp32.py": b"import torch", "step-1/trainer_state.json": b"{}"}
    for name, data in files.items():
        put(source / name, data)
    pointer, there = remote_copy.RemoteCopy._copy_pointer, []

    def after_all(work, origin, goal, data):
        there.extend(entry.name for entry in get_storage(goal).list_entries(goal.parent))
        return pointer(work, origin, goal, data)

    monkeypatch.setattr(remote_copy.RemoteCopy, "_copy_pointer", after_all)
    done, expected = copy_checkpoints(source, target), compute_copy_size(source)
    older = [file for file in Manifest.read(source / "step-2").files if file.role == "older_refinement"]
    assert {name: get_storage(target).read(target / name, 99) for name in files} == files
    assert sorted(there) == ["step-1", "step-2", "zero_to_fp32.py"]
    assert (done.left_out, done.removed) == ({}, [])
    assert done.files == 2 * 4 + len(older) + len(files)
    if kinds[0] == "store":
        assert done.bytes == expected


@pytest.mark.parametrize("kinds", [("disk", "store"), ("store", "disk"), ("disk", "disk")])
def test_latest_names_what_is_in_the_copy(place, kinds, monkeypatch):
    """Training goes on while its run is copied."""
    source, target = place(kinds[0], "run"), place(kinds[1], "copied")
    chain(str(source), 2)
    put(source / "latest", b"step-2")
    owner, name = remote_copy.RemoteCopy, "_copy_run_checkpoint"
    if kinds == ("disk", "disk"):
        owner, name = checkpoint_copy._LocalCopy, "_copy_subdirectory"
    do, met = getattr(owner, name), []

    def after_the_next(*arguments):
        if not met:
            dsq_ckpt.save(state_of(3), source / "step-3")
            put(source / "latest", b"step-3")
        met.append(name)
        return do(*arguments)

    monkeypatch.setattr(owner, name, after_the_next)
    copy_checkpoints(source, target)
    assert met and not get_storage(target).list_entries(target / "step-3")
    assert get_storage(target).read(target / "latest", 99) == b"step-2"


def test_a_file_that_goes_meanwhile_is_reported(place, monkeypatch):
    source, target = place("disk", "run"), place("store", "copied")
    stored_chain(str(source), 1)
    put(source / "notes.txt", b"mine")
    sent = remote_copy.copy_between_storages

    def transfer(origin, *arguments, **options):
        if origin.name == "notes.txt":
            origin.unlink()
        return sent(origin, *arguments, **options)

    monkeypatch.setattr(remote_copy, "copy_between_storages", transfer)
    assert copy_checkpoints(source, target).removed == [source / "notes.txt"]
    assert {entry.name for entry in get_storage(target).list_entries(target)} == {"step-1"}


def test_a_refinement_that_is_dropped_meanwhile(place, monkeypatch):
    source, target = place("store", "run"), place("store", "copied")
    paths = stored_chain(str(source), 2)
    sent = remote_copy.copy_between_storages

    def transfer(origin, *arguments, **options):
        if origin.name.endswith(".refinement"):
            monkeypatch.setattr(remote_copy, "copy_between_storages", sent)
            from dsq_ckpt.engine.retention import drop_refinements

            assert drop_refinements(paths[1], 1, False) == [paths[0]]
        return sent(origin, *arguments, **options)

    monkeypatch.setattr(remote_copy, "copy_between_storages", transfer)
    copy_checkpoints(source, target)
    assert Manifest.read(target / "step-1").refinement == "dropped"
    assert loaded(target / "step-1")["step"] == 1
    assert not any(name.endswith(".refinement") for name in names_in(target / "step-1"))


def test_a_layer_that_is_dropped_meanwhile_and_needed_by_another(place, monkeypatch):
    """Copied before it was dropped, and then removed again: the next checkpoint, a difference to it, gets its own."""
    local, source, target = place("disk", "run"), place("store", "run"), place("disk", "copied")
    chain(str(local), 2)
    copy_checkpoints(local, source)
    sent = remote_copy.copy_between_storages

    def transfer(origin, *arguments, **options):
        if origin.name.endswith(".index"):
            monkeypatch.setattr(remote_copy, "copy_between_storages", sent)
            from dsq_ckpt.engine.retention import drop_refinements

            assert drop_refinements(source / "step-2", 1, False) == [source / "step-1"]
            raise FileNotFoundError(origin)  # of another rank's layer
        return sent(origin, *arguments, **options)

    monkeypatch.setattr(remote_copy, "copy_between_storages", transfer)
    copy_checkpoints(source, target)
    assert [Manifest.read(target / name).refinement for name in ("step-1", "step-2")] == ["dropped", "kept"]
    values: list[dict] = [{}, {}]
    for value, run in zip(values, (local, target), strict=True):
        dsq_ckpt.load(value, run / "step-2", refinement=True)
    assert torch.equal(values[0]["w"], values[1]["w"])
    assert not any(name.endswith(".refinement") for name in names_in(target / "step-1"))


def test_two_copies_to_one_place(place, monkeypatch):
    """The second one fails, and leaves the first one whole."""
    stored_chain(str(place("store", "run")), 3)
    source, target = place("store", "run"), place("store", "copied")
    transfer = remote_copy.copy_between_storages

    def other_first(*arguments, **options):
        monkeypatch.setattr(remote_copy, "copy_between_storages", transfer)
        copy_checkpoints(source, target)
        return transfer(*arguments, **options)

    monkeypatch.setattr(remote_copy, "copy_between_storages", other_first)
    with pytest.raises(CheckpointExists, match="another copy"):
        copy_checkpoints(source, target)
    for step in (1, 2, 3):
        assert torch.equal(loaded(target / f"step-{step}")["w"], loaded(source / f"step-{step}")["w"])


def test_the_command(place, store, tmp_path):
    chain(str(tmp_path / "run"), 2)
    result = CliRunner().invoke(app, ["cp", str(tmp_path / "run"), f"{store}/copied"])
    assert result.exit_code == 0, result.output
    assert "2 checkpoint(s)" in result.output
    result = CliRunner().invoke(app, ["cp", f"{store}/copied/step-2", str(tmp_path / "back")])
    assert result.exit_code == 0, result.output
    assert loaded(tmp_path / "back")["step"] == 2
