"""Disks that fill up, and directories that cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import dsq_ckpt
from dsq_ckpt.engine import retention
from dsq_ckpt.storage.atomic_io import sync_directory
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.container import ContainerWriter, write_index
from dsq_ckpt.storage.links import copy_file
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import processes
from tests.helpers.states import DecodedCheckpoints, load_copy, mixed_state, perturb, relative_error


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("parent", ["auto", None])
def test_disk_full_at_any_byte(tmp_path, monkeypatch, parent, count):
    state = mixed_state()
    config = {"storage": {"fsync": False, "block_elements": 1 << 12}}
    dsq_ckpt.save(state, tmp_path / "0", config=config, pinned=True)
    dsq_ckpt.save(perturb(state, 1), tmp_path / "1", config=config, pinned=True)
    checkpoints = DecodedCheckpoints(state, tmp_path / "0", tmp_path / "1")
    dsq_ckpt.save(perturb(state, 2), tmp_path / "whole", config=config, parent=parent)
    sizes = [file.size for file in Manifest.read(tmp_path / "whole").files if file.role in ("own", "refinement")]
    shutil.rmtree(tmp_path / "whole")
    append = ContainerWriter._append
    left = 0

    def limited(self, data):
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, data)

    monkeypatch.setattr(ContainerWriter, "_append", limited)
    total = sum(sizes)
    for space in [16, 17, *range(100, total, total // count), total - 33, total - 1, total + 10_000]:
        left, path = space, tmp_path / f"with-{space}"
        load_copy(tmp_path / "1", state)  # the parent
        if space < total - 100:
            with pytest.raises(dsq_ckpt.DSQError, match="No space left"):
                dsq_ckpt.save(perturb(state, 2), path, config=config, parent=parent)
            assert not path.exists(), "nothing of this save remains"
        elif space > total:
            dsq_ckpt.save(perturb(state, 2), path, config=config, parent=parent)
            assert relative_error(perturb(state, 2)["lossy"]["linear.weight"], load_copy(path, state)["lossy"][
                "linear.weight"]) < 0.015
    checkpoints.check()


@pytest.mark.slow
def test_file_size_limit_of_the_kernel(tmp_path):
    limits = [0, 1, 100, 1000, 2000, 5000, 10_000, 50_000, 80_000, 10_000_000]
    arguments = [str(processes.WORKERS / "limited.py"), str(tmp_path), *map(str, limits)]
    status, output = processes.run(arguments, forked=True)
    assert status == 0, output
    outcomes = output.split("outcomes")[1].split()
    assert outcomes[0] == "refused" and outcomes[-2:] == ["saved", "saved"], outcomes


def test_unwritable_places(tmp_path, monkeypatch):
    state = mixed_state()
    dsq_ckpt.save(state, tmp_path / "0")
    checkpoints = DecodedCheckpoints(state, tmp_path / "0")
    (tmp_path / "file").write_text("not a directory")
    for path, says in (
        (tmp_path / "file", "exists|Not a directory"), (tmp_path / "file" / "x", "which is no directory"),
        ("/proc/dsq/x", "No such file"), (tmp_path / ("n" * 300), "too long"),
    ):
        with pytest.raises(dsq_ckpt.DSQError, match=says):
            dsq_ckpt.save(state, path)
    checkpoints.check()
    if os.geteuid():  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(dsq_ckpt.DSQError, match="Permission denied"):
            dsq_ckpt.save(state, tmp_path / "closed" / "x")
    dsq_ckpt.save(state, tmp_path / "1")
    assert Manifest.read(tmp_path / "1").depth == 1


@pytest.mark.parametrize("name", ["fsync", "replace", "link"])
def test_a_system_call_fails(tmp_path, monkeypatch, name):
    """The first, second, ... call of a kind fails: an error, no manifest, the earlier checkpoints intact."""
    state = mixed_state()
    dsq_ckpt.save(state, tmp_path / "0", pinned=True)
    checkpoints = DecodedCheckpoints(state, tmp_path / "0")
    real = getattr(os, name)
    for fails in range(20):
        calls = 0

        def call(*args, fails=fails, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fails + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **kwargs)

        path = tmp_path / f"{name}{fails}"
        load_copy(tmp_path / "0", state)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            try:
                dsq_ckpt.save(perturb(state, 1), path, pinned=True)
            except BaseException as error:
                assert "Input/output error" in str(error), error
        checkpoints.check()
        if (path / "manifest.json").exists():  # then it is whole, whatever was reported
            check_whole(path)
        if calls <= fails:
            break
    assert fails >= 2


def saved_by_dcp(state, path, config=None):
    dcp.save(state, storage_writer=dsq_ckpt.DSQStorageWriter(path, config))


def saved_in_background(state, path, config=None):
    dsq_ckpt.async_save(state, path, config=config).result()


@pytest.mark.parametrize("save", [dsq_ckpt.save, saved_by_dcp, saved_in_background])
@pytest.mark.parametrize("fails", [
    "engine.pipeline.write_rank", "storage.shard.ShardWriter.finish", "engine.pipeline.commit",
])
def test_a_save_that_fails_leaves_no_directory(tmp_path, monkeypatch, save, fails):
    """But what was there before; a directory without anything in it, too."""
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = mixed_state()
    dsq_ckpt.save(state, tmp_path / "run" / "0")
    (tmp_path / "run" / "there").mkdir()
    (tmp_path / "run" / "harmless").mkdir()
    (tmp_path / "run" / "harmless" / ".DS_Store").write_bytes(b"of a file manager")
    before = sorted(tmp_path.rglob("*"))
    places = ["run/new", "other/run/new", "run/there", "run/harmless"]
    with monkeypatch.context() as patched:
        patched.setattr(f"dsq_ckpt.{fails}", full)
        for place in places:
            with pytest.raises(BaseException, match="No space left"):
                save(perturb(state, 1), tmp_path / place)
            assert sorted(tmp_path.rglob("*")) == before
    for place in places if fails.endswith("commit") else places[:1]:
        save(perturb(state, 1), tmp_path / place)
        check_whole(tmp_path / place)


def test_a_failed_overwrite_leaves_what_was_there(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = mixed_state()
    dsq_ckpt.save(state, tmp_path / "0")
    (tmp_path / "0" / "notes.txt").write_text("the best so far")
    checkpoints, before = DecodedCheckpoints(state, tmp_path / "0"), sorted((tmp_path / "0").iterdir())
    monkeypatch.setattr("dsq_ckpt.engine.pipeline.commit", full)
    with pytest.raises(dsq_ckpt.SaveFailed, match="No space left"):
        dsq_ckpt.save(perturb(state, 1), tmp_path / "0", overwrite=True)
    assert sorted((tmp_path / "0").iterdir()) == before
    checkpoints.check()


def check_whole(path):
    """Every file that the manifest names is there and as it was written."""
    with Checkpoint(path) as checkpoint:
        assert [problem for _, _, problem in checkpoint.verify() if problem] == []


def test_errors_of_flushes_name_the_file(tmp_path, monkeypatch):
    """The system does not say which file an fsync was for."""
    def fails(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = mixed_state()
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(dsq_ckpt.DSQError, match=f"No space left.*{tmp_path}"):
        dsq_ckpt.save(state, tmp_path / "run" / "0")
    for write in (
        lambda: sync_directory(tmp_path), lambda: write_index(tmp_path, "0" * 16, {}, True),
        lambda: copy_file(Path(__file__), tmp_path / "copy", True),
    ):
        with pytest.raises(OSError, match=f"No space left.*{tmp_path}"):
            write()


def test_a_save_that_was_committed_has_not_failed(tmp_path, monkeypatch):
    """Retention, which comes after the commit, warns where it cannot read a checkpoint."""
    def fails(newest, keep_last, fsync):
        raise dsq_ckpt.LoadFailed(f"'{newest}' cannot be read: Input/output error")

    monkeypatch.setattr(retention, "drop_refinements", fails)
    with pytest.warns(UserWarning, match="old refinement layers .* were not dropped: .*Input/output error"):
        dsq_ckpt.save(mixed_state(), tmp_path / "0")
    check_whole(tmp_path / "0")
