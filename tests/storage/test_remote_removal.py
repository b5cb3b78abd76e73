"""Removal and garbage on object stores: nothing goes that a complete checkpoint needs."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from typer.testing import CliRunner

import dsq_ckpt
from dsq_ckpt.cli import app
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, SaveFailed
from dsq_ckpt.report.history import History
from dsq_ckpt.report.page import render
from dsq_ckpt.storage import references, remote_gc
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.removal import remove_checkpoint
from tests.helpers.commands import dsq_json, dsq_stdout
from tests.helpers.remote_runs import chain, loaded, names_in, put, state_of, stored_chain


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_checkpoints_are_removed_in_any_order(order, tmp_path):
    paths = stored_chain(f"memory://{tmp_path.name}/run", 3)
    values = [loaded(path) for path in paths]
    left = dict(zip(paths, values, strict=True))
    for number in order:
        remove_checkpoint(paths[number])
        del left[paths[number]]
        for path, value in left.items():
            assert torch.equal(loaded(path)["w"], value["w"])
        with pytest.raises(CheckpointNotFound):
            loaded(paths[number])
    assert not any(names_in(path) for path in paths)


def test_a_removal_says_what_stays(store):
    paths = chain(f"{store}/run", 3)
    tried = remove_checkpoint(paths[0], dry_run=True)
    assert loaded(paths[0])
    done = remove_checkpoint(paths[0])
    assert tried == done
    assert [file.name for file in done.kept] == [
        file.name for file in Manifest.read(paths[2]).files if file.held_by == "step-1"
    ]
    assert names_in(paths[0]) == {file.name for file in done.kept}
    assert dsq_ckpt.latest(f"{store}/run") == str(paths[2])
    # the run goes on, and the last one that needs the files of the first takes them along
    history = dsq_ckpt.SaveHistory()
    dsq_ckpt.load({}, paths[2], history=history)
    chained = dsq_ckpt.save(state_of(4), f"{store}/run/step-4", history=history)
    assert chained.depth == 3
    for path in (*paths[1:], chained.path):
        remove_checkpoint(path)
    assert get_storage(paths[0]).list_entries(paths[0].parent) == []


def test_the_command(store):
    paths = stored_chain(f"{store}/run", 3)
    result = CliRunner().invoke(app, ["rm", "--json", str(paths[0]), str(paths[2])])
    assert result.exit_code == 0, result.output
    first, last = json.loads(result.stdout)
    assert (len(first["kept"]), len(last["kept"])) == (1, 2)
    assert loaded(paths[1])["step"] == 2
    result = CliRunner().invoke(app, ["rm", str(paths[1])])
    assert result.exit_code == 0, result.output
    assert "4 file(s)" in result.output or "3 file(s)" in result.output
    assert CliRunner().invoke(app, ["rm", str(paths[1])]).exit_code == 1


def _said_of_what_stays(run: str) -> None:
    """Check what the commands say of a run from whose first checkpoint one file stays."""
    for command in ("log", "verify"):
        assert "removed: step-1: 1 file(s) stay, which other checkpoints need" in dsq_stdout(command, run)
        told = dsq_json(command, run)
        assert (told["removed"], told["incomplete"]) == ([{"name": "step-1", "files": 1}], [])
    assert "1 file(s) stay, which other checkpoints need" in render(History.read(resolve_checkpoint_path(run)))
    told = dsq_json("gc", "--older-than", "0s", "--dry-run", run)
    assert told["files"] == told["left"] == []


def test_the_rest_of_a_removed_checkpoint_is_no_save_that_failed(store):
    paths = stored_chain(f"{store}/run", 3)
    remove_checkpoint(paths[0])
    _said_of_what_stays(f"{store}/run")
    with pytest.raises(CheckpointNotFound, match="or was removed"):
        loaded(paths[0])
    put(paths[0] / f"{'0' * 16}-00000.dsq")  # a save under way
    told = dsq_json("verify", f"{store}/run")
    assert (told["removed"], told["incomplete"]) == ([], ["step-1"])


def test_nothing_is_removed_while_a_manifest_cannot_be_read(store):
    paths = stored_chain(f"{store}/run", 3)
    put(paths[1] / MANIFEST, b"{}")
    with pytest.raises(CorruptCheckpoint, match="step-2"):
        remove_checkpoint(paths[0])
    assert loaded(paths[2])["step"] == 3
    assert not remote_gc.collect_garbage(paths[0].parent, 0)
    (left,) = remote_gc.find_skipped(paths[0].parent, 0)
    assert "any object may be needed" in left.reason


def test_local_checkpoints_are_removed_too(tmp_path):
    paths = chain(str(tmp_path / "run"), 3)
    values = loaded(paths[2])
    done = remove_checkpoint(paths[0])
    assert not done.kept
    assert not paths[0].exists()
    (paths[1] / "notes.txt").write_text("mine")
    remove_checkpoint(paths[1])
    assert [entry.name for entry in paths[1].iterdir()] == ["notes.txt"]
    assert torch.equal(loaded(paths[2])["w"], values["w"])


def test_links_and_the_tag_that_deepspeed_loads_are_refused(tmp_path):
    (path,) = chain(str(tmp_path / "run"), 1)
    (tmp_path / "run" / "linked").symlink_to("step-1")
    with pytest.raises(ConfigError, match="is a link"):
        remove_checkpoint(tmp_path / "run" / "linked")
    (tmp_path / "run" / "latest").write_text("step-1\n")
    with pytest.raises(ConfigError, match="change it first"):
        remove_checkpoint(path)
    assert loaded(path)


def test_garbage_is_what_no_manifest_names(store):
    paths = stored_chain(f"{store}/run", 3)
    storage = get_storage(paths[0])
    storage.remove(paths[0] / MANIFEST)  # as by other means than `dsq rm`: two checkpoints need its base file
    put(paths[2] / "0123456789abcdef-00000.dsq")
    put(paths[2] / "mine.txt")
    put(resolve_checkpoint_path(f"{store}/run/killed/0123456789abcdef-00001.dsq"))
    put(resolve_checkpoint_path(f"{store}/run/else/0123456789abcdef-00001.dsq"))
    put(resolve_checkpoint_path(f"{store}/run/else/photo.jpg"))
    run = paths[0].parent
    assert remote_gc.find_garbage(run) == []  # too young
    assert {left.path.name for left in remote_gc.find_skipped(run) if left.is_young} == {"step-1", "step-3", "killed"}
    result = CliRunner().invoke(app, ["gc", "--older-than", "0s", str(run)])
    assert result.exit_code == 0, result.output
    assert "photo.jpg" in result.output
    assert "killed/0123456789abcdef-00001.dsq" in result.output
    assert len(names_in(paths[0])) == 1
    assert "mine.txt" in names_in(paths[2])
    assert not names_in(run / "killed")
    assert len(names_in(run / "else")) == 2
    for path in paths[1:]:
        assert loaded(path)["w"].shape == (256, 256)
    assert not remote_gc.find_garbage(run, 0)


def test_garbage_of_one_checkpoint(store):
    paths = stored_chain(f"{store}/run", 2)
    get_storage(paths[0]).remove(paths[0] / MANIFEST)
    removed = remote_gc.collect_garbage(paths[0], 0)
    assert {orphan.path.name.rpartition(".")[2] for orphan in removed} == {"index", "refinement"}
    assert loaded(paths[1])["step"] == 2
    with pytest.raises(CheckpointNotFound, match="nothing is at"):
        remote_gc.find_garbage(resolve_checkpoint_path(f"{store}/nowhere"))


def test_garbage_of_a_checkpoint_with_other_keys_below_it(store):
    paths = stored_chain(f"{store}/run", 2)
    for path in paths:
        put(path / "logs" / "events.txt")
    get_storage(paths[0]).remove(paths[0] / MANIFEST)
    remote_gc.collect_garbage(paths[1], 0)
    remote_gc.collect_garbage(paths[0], 0)
    assert len(names_in(paths[0])) == 2  # the base file, and logs
    assert loaded(paths[1])["step"] == 2


def test_a_bucket_is_no_checkpoint(store):
    bucket = resolve_checkpoint_path(store)
    with pytest.raises(SaveFailed, match="whole bucket"):
        dsq_ckpt.save(state_of(1), bucket)
    stored_chain(f"{store}/run", 1)
    for entry in get_storage(bucket).list_entries(bucket / "run" / "step-1"):  # as others may put one there
        put(bucket / entry.name, get_storage(bucket).read(bucket / "run" / "step-1" / entry.name, 1 << 28))
    assert remote_gc.find_garbage(bucket, 0) == []


def test_a_replaced_checkpoint_takes_files_of_removed_ones_along(store):
    """Once only it needed them, as one that is removed does."""
    paths = stored_chain(f"{store}/run", 3)
    value = loaded(paths[1])["w"]
    remove_checkpoint(paths[0])
    dsq_ckpt.save(state_of(9), paths[2], overwrite=True, parent=None)
    assert len(names_in(paths[0])) == 1 and torch.equal(loaded(paths[1])["w"], value)
    dsq_ckpt.save(state_of(10), paths[1], overwrite=True, parent=None)
    assert names_in(paths[0]) == set() and [loaded(path)["step"] for path in paths[1:]] == [10, 9]
    assert remote_gc.find_garbage(paths[0].parent, 0) == []


def test_a_removal_of_what_a_save_is_replacing(store, monkeypatch):
    """The removal deletes nothing that the new checkpoint needs, which took over files of the one that it replaces."""
    (path,) = chain(f"{store}/run", 1)
    select_needed_files = references.select_needed_files

    def saved_first(*arguments, **options):
        monkeypatch.setattr(references, "select_needed_files", select_needed_files)
        get_storage(path).remove(path / MANIFEST)
        before.write(path, exclusive=True, fsync=False)
        return select_needed_files(*arguments, **options)

    dsq_ckpt.save(state_of(2), path, overwrite=True)
    before = Manifest.read(path)
    assert [file.role for file in before.files].count("ancestor") == 1
    get_storage(path).remove(path / MANIFEST)
    older = before.model_copy(update={"save_id": "0" * 16})  # of the same files, replaced while it is removed
    older.write(path, exclusive=True, fsync=False)
    monkeypatch.setattr(references, "select_needed_files", saved_first)
    assert remove_checkpoint(path).files == []
    assert loaded(path)["step"] == 2


def test_two_saves_that_replace_one_checkpoint(store, monkeypatch):
    """One that was coded against what the other removed is not committed."""
    (path,) = chain(f"{store}/run", 1)
    published = references.commit_manifest

    def other_first(*arguments, **options):
        monkeypatch.setattr(references, "commit_manifest", published)
        dsq_ckpt.save(state_of(5), path, overwrite=True, parent=None)
        return published(*arguments, **options)

    monkeypatch.setattr(references, "commit_manifest", other_first)
    with pytest.raises(SaveFailed, match="replaced meanwhile"):
        dsq_ckpt.save(state_of(2), path, overwrite=True)
    assert loaded(path)["step"] == 5


@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
def test_a_removal_beside_a_save(store, monkeypatch, when):
    """Whichever comes first: the save fails, or its checkpoint has all that it needs."""
    paths = chain(f"{store}/run", 2)
    written = Manifest.write

    def write(self, directory, **options):
        monkeypatch.setattr(Manifest, "write", written)
        if when == "before the commit":
            remove_checkpoint(paths[1])
        written(self, directory, **options)

    monkeypatch.setattr(Manifest, "write", write)

    def save():
        return dsq_ckpt.save(state_of(3), f"{store}/run/step-3")

    if when == "before the commit":
        with pytest.raises(SaveFailed, match="save again"):
            save()
        assert dsq_ckpt.latest(f"{store}/run") == str(paths[0])
    else:
        result = save()
        remove_checkpoint(paths[1])
        assert loaded(result.path)["step"] == 3


def test_a_run_synchronized_to_a_disk_keeps_what_it_refers_to(store, tmp_path):
    import fsspec

    stored_chain(f"{store}/run", 3)
    system, root = fsspec.core.url_to_fs(f"{store}/run", skip_instance_cache=True)
    system.get(root, str(tmp_path / "run"), recursive=True)
    paths = [tmp_path / "run" / f"step-{step}" for step in (1, 2, 3)]
    value = loaded(paths[2])["w"]
    done = remove_checkpoint(paths[0])
    assert len(done.kept) == 1
    (paths[0] / "notes.txt").write_text("mine")
    _said_of_what_stays(str(tmp_path / "run"))
    (paths[0] / "notes.txt").unlink()
    result = CliRunner().invoke(app, ["gc", "--older-than", "0s", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    dsq_ckpt.save(state_of(9), paths[1], overwrite=True, parent=None)
    assert torch.equal(loaded(paths[2])["w"], value)
    remove_checkpoint(paths[2])
    assert loaded(paths[1])["step"] == 9


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 1)])
def test_a_dry_run_of_several_says_what_a_removal_does(store, order):
    """A file that one of them keeps for another one goes with that."""
    _check_dry_run(stored_chain(f"{store}/run", 3), order)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 1)])
def test_a_dry_run_of_several_says_what_a_removal_from_a_disk_does(order, tmp_path):
    _check_dry_run(chain(str(tmp_path / "run"), 3), order)


def _check_dry_run(paths: list, order: tuple[int, ...]) -> None:
    chosen = [str(paths[number]) for number in order]
    tried, done = (
        json.loads(CliRunner().invoke(app, ["rm", "--json", *more, *chosen]).stdout) for more in (["--dry-run"], [])
    )
    assert [{**entry, "dry_run": False} for entry in tried] == done
    assert sum(entry["bytes"] for entry in done) > 0
