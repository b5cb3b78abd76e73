"""Which checkpoint of a run is the newest, and which names in a manifest are believed."""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.engine import other_jobs
from dsq_ckpt.errors import CorruptCheckpoint, DSQError
from dsq_ckpt.storage import gc, predecessors
from dsq_ckpt.storage.links import link_files
from dsq_ckpt.storage.manifest import MANIFEST, MAX_CREATED, Manifest, iter_checkpoints
from tests.helpers.edited_checkpoints import edit_contents
from tests.helpers.states import KEEP_ONE

NOTHING_DROPPED = {"refinement": {"keep_last": 9}}


def weights(number: int = 0) -> dict:
    g = torch.Generator().manual_seed(1)
    return {"weight": torch.randn(80, 90, generator=g) + 0.001 * number}


@pytest.fixture
def run(tmp_path):
    for name in ("a", "b", "c"):
        dsq_ckpt.save(weights(), tmp_path / "run" / name, config=NOTHING_DROPPED)
    return tmp_path / "run"


def rewrite(directory, **changes):
    """Change a manifest, with a right checksum."""
    manifest = Manifest.read(directory)
    manifest.model_copy(update=changes).write(directory, exclusive=False, fsync=False)


def names(run):
    return [path.name for path, _ in iter_checkpoints(run)]


def test_the_clock_may_go_back(run):
    for age, name in enumerate("abc"):
        rewrite(run / name, created=time.time() - 1000 * age)
    assert names(run) == ["a", "b", "c"] and dsq_ckpt.latest(run) == str(run / "c")
    shutil.rmtree(run / "b")  # files of "a" in "c" tell that it came later
    assert names(run) == ["a", "c"]


def test_the_clock_orders_what_is_not_related(run):
    dsq_ckpt.save(weights(), run / "other", config=NOTHING_DROPPED, history=dsq_ckpt.SaveHistory())
    rewrite(run / "other", created=1.0)
    assert names(run) == ["other", "a", "b", "c"]
    shutil.copytree(run / "b", run / "copy of b")
    rewrite(run / "c", created=2.0)
    assert names(run)[-1] == "c"


@pytest.mark.parametrize("loaded", [None, "a", "c"])
def test_a_process_whose_clock_is_behind(run, monkeypatch, loaded):
    """Its checkpoints are the newest: it begins anew, goes on from an older checkpoint, or from the newest."""
    (run / "unreadable").mkdir()
    (run / "unreadable" / MANIFEST).write_text("nothing")
    newest, now = Manifest.read(run / "c").created, time.time
    history = dsq_ckpt.SaveHistory()
    monkeypatch.setattr(other_jobs, "_own_save_ids", set())  # as in another process
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    if loaded is not None:
        dsq_ckpt.load(weights(), run / loaded, history=history)
    for name in ("d", "e"):
        dsq_ckpt.save(weights(), run / name, config=NOTHING_DROPPED, history=history)
    shutil.rmtree(run / "unreadable")
    assert names(run) == ["a", "b", "c", "d", "e"] and dsq_ckpt.latest(run) == str(run / "e")
    assert newest < Manifest.read(run / "d").created < Manifest.read(run / "e").created < newest + 1


def test_a_branch_that_is_left_is_older_whatever_the_clock_says(run, monkeypatch):
    """Saves go on from an earlier checkpoint of the same process, whose clock is behind that of another one."""
    history = dsq_ckpt.SaveHistory()
    monkeypatch.setattr(other_jobs, "_own_save_ids", set())  # as in another process
    rewrite(run / "c", created=time.time() + 3600)
    dsq_ckpt.load(weights(), run / "c", history=history)
    for name in ("s1", "s2", "s3"):
        dsq_ckpt.save(weights(), run / name, config=NOTHING_DROPPED, history=history)
    dsq_ckpt.load(weights(), run / "s1", history=history)
    for name in ("r1", "r2"):
        dsq_ckpt.save(weights(), run / name, config=NOTHING_DROPPED, history=history)
        assert dsq_ckpt.latest(run) == str(run / name)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    dsq_ckpt.load(weights(), run / "s1", history=history)
    dsq_ckpt.save(weights(), run / "q1", config=NOTHING_DROPPED, history=history)
    assert dsq_ckpt.latest(run) == str(run / "q1")


def test_the_latest_time_of_a_manifest(run):
    rewrite(run / "c", created=MAX_CREATED)
    dsq_ckpt.save(weights(), run / "d", config=NOTHING_DROPPED, history=dsq_ckpt.SaveHistory())
    assert Manifest.read(run / "d").created == MAX_CREATED


def test_a_run_that_cannot_be_listed_is_saved_to(run, monkeypatch):
    def fail(*_):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(predecessors, "iter_checkpoints", fail)
    dsq_ckpt.save(weights(), run / "d", config=NOTHING_DROPPED, history=dsq_ckpt.SaveHistory())
    assert Manifest.read(run / "d").created > Manifest.read(run / "c").created


def test_manifests_that_name_each_other(run):
    rewrite(run / "a", previous=Manifest.read(run / "c").save_id)
    assert sorted(names(run)) == ["a", "b", "c"]


def make_loop(path):
    path.unlink()
    os.symlink(path.name, path)


def make_garbage(path):
    path.write_bytes(path.read_bytes().replace(b"weights", b"weighty"))


def make_newer(path):
    text = path.read_bytes()
    newer, times = re.subn(rb'"version": ?\d+', b'"version":99', text)
    assert times == 1
    path.write_bytes(newer)


@pytest.mark.parametrize("spoil", [make_loop, make_garbage, make_newer])
def test_a_newest_checkpoint_that_cannot_be_read_is_an_error(run, spoil):
    spoil(run / "c" / MANIFEST)
    with pytest.raises(DSQError, match="may be the newest") as caught:
        dsq_ckpt.latest(run)
    assert str(run / "c" / MANIFEST) in str(caught.value)


@pytest.mark.parametrize("spoil", [make_loop, make_garbage])
def test_one_that_newer_ones_came_after_does_not_stop_a_resume(run, spoil):
    spoil(run / "a" / MANIFEST)
    spoil(run / "b" / MANIFEST)
    assert dsq_ckpt.latest(run) == str(run / "c")


def test_checkpoints_that_do_not_exist_are_absent(run, tmp_path):
    (run / "c" / MANIFEST).unlink()
    (run / "empty").mkdir()
    (run / "file").write_text("hello")
    assert dsq_ckpt.latest(run) == str(run / "b")
    assert dsq_ckpt.latest(tmp_path / "nowhere") is None


def test_a_manifest_that_cannot_be_looked_at_may_be_there(run, monkeypatch):
    real, blocked = os.lstat, str(run / "a" / MANIFEST)

    def lstat(path, *args, **kwargs):
        if os.fspath(path) == blocked:
            raise OSError(5, "Input/output error")
        return real(path, *args, **kwargs)

    (run / "a" / MANIFEST).unlink()
    monkeypatch.setattr(os, "lstat", lstat)
    assert gc.find_garbage(run, 0) == []


FORGED = ["../victim/step-5", "/victim/step-5", "..", ".", "", "a/b", "a\\b", "a\0b"]


@pytest.mark.parametrize("key", ["previous_name", "parent_name"])
@pytest.mark.parametrize("name", FORGED)
def test_names_that_lead_elsewhere_are_refused(run, key, name):
    rewrite(run / "c", **{key: name})
    with pytest.raises(CorruptCheckpoint, match=key):
        Manifest.read(run / "c")


@pytest.mark.parametrize("key", ["save_id", "parent", "previous"])
@pytest.mark.parametrize("save_id", ["../../../../etc/a", "", "0123456789ABCDEF", "0123456789abcdef0"])
def test_save_ids_that_are_none_are_refused(run, key, save_id):
    rewrite(run / "c", **{key: save_id})
    with pytest.raises(CorruptCheckpoint, match=key):
        Manifest.read(run / "c")


@pytest.mark.parametrize("name", ["../victim/step-5", "link"])
def test_a_forged_predecessor_does_not_cost_another_run_its_refinement(run, tmp_path, name):
    dsq_ckpt.save(weights(), tmp_path / "victim" / "step-5")
    os.symlink(tmp_path / "victim" / "step-5", run / "link")
    rewrite(run / "c", previous=Manifest.read(tmp_path / "victim" / "step-5").save_id, previous_name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cannot be read is no parent, and that is said
        dsq_ckpt.save(weights(), run / "d", config=KEEP_ONE)
    assert Manifest.read(tmp_path / "victim" / "step-5").refinement == "kept"


def test_directories_with_odd_names_are_read_back(tmp_path):
    for name in (".hidden", "back\\slash", "new\nline", "next"):
        dsq_ckpt.save(weights(), tmp_path / name)
    previous_names = {path.name: manifest.previous_name for path, manifest in iter_checkpoints(tmp_path)}
    assert previous_names == {".hidden": None, "back\\slash": ".hidden", "new\nline": None, "next": "new\nline"}


@pytest.mark.parametrize("name", ["../outside.dsq", "/outside.dsq", ""])
def test_files_that_a_data_file_requires_lie_beside_it(run, tmp_path, name):
    (tmp_path / "outside.dsq").write_text("secret")
    (run / "target").mkdir()
    with pytest.raises(CorruptCheckpoint, match="not a plain file name"):
        link_files(run / "a", run / "target", frozenset([name]), fsync=False)
    assert list((run / "target").iterdir()) == []


@pytest.mark.parametrize("names", [[2], ["a", 2], "a.dsq", {"a.dsq": 1}, None])
def test_requirements_of_a_data_file_are_names(tmp_path, names):
    dsq_ckpt.save(weights(), tmp_path / "a", config=KEEP_ONE)
    edit_contents(tmp_path / "a", lambda tree: tree.update(requires=names))
    with pytest.raises(CorruptCheckpoint, match=rf"'{re.escape(str(tmp_path / 'a'))}.*expected a list of file names"):
        dsq_ckpt.save(weights(), tmp_path / "b", config=KEEP_ONE, parent=tmp_path / "a")
    assert dsq_ckpt.latest(tmp_path) == str(tmp_path / "a")
