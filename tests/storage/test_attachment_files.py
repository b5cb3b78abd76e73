"""Files of DeepSpeed's names, and saves that fail or are killed beside them: what others wrote is never lost."""

from __future__ import annotations

import errno
import io
import os
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.convert.export import export_torch
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage import attachment_files
from dsq_ckpt.storage.attachment_files import find_plain_backups
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.checkpoint_copy import copy_checkpoints
from dsq_ckpt.storage.container import FileInfo, checksum_file
from dsq_ckpt.storage.gc import collect_garbage
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from tests.helpers.saving import save_parts
from tests.helpers.small_run import NAMES
from tests.storage.test_gc import SAVE, listing, plant, tag_without_manifest

STATES = "mp_rank_00_model_states.pt"


@pytest.fixture
def plain_tag(tmp_path):
    """A tag that DeepSpeed wrote itself, and a save that is to replace it, with one file more."""
    path = tmp_path / "tag"
    path.mkdir()
    (path / STATES).write_bytes(b"all there is of step 5")

    def write(stream, save_id):
        stream.write(save_id.encode() * 10)

    weights = torch.randn(64, 96)
    part = LocalShard(ChunkKey("w", (0, 0), (64, 96)), (64, 96), torch.float32, lambda: weights)
    contribution = LocalState([part], attachments={STATES: write, "more_states.pt": write})
    return path, lambda: save_parts(path, lambda: contribution, DSQConfig(), SingleProcess(), overwrite=True)


def no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fails", [
    "pipeline.commit", "pipeline.write_rank", "collective.attachment_files.publish_attachments",
    "collective.attachment_files.write_attachment",
])
def test_a_plain_tag_outlives_a_failed_save_over_it(plain_tag, monkeypatch, fails):
    path, save = plain_tag
    with monkeypatch.context() as patched, pytest.raises(dsq_ckpt.SaveFailed, match="No space left"):
        patched.setattr(f"dsq_ckpt.engine.{fails}", no_space)
        save()
    assert {name: (path / name).read_bytes() for name in listing(path)} == {STATES: b"all there is of step 5"}
    save()
    assert not [name for name in listing(path) if name.startswith(".")]
    assert (path / STATES).read_bytes() == Manifest.read(path).save_id.encode() * 10


@pytest.mark.parametrize("how", ["load", "gc", "save", "copy"])
@pytest.mark.parametrize(
    "at", ["dsq_ckpt.engine.pipeline.commit", "dsq_ckpt.engine.collective.attachment_files.write_journal"]
)
def test_a_plain_tag_outlives_a_killed_save_over_it(plain_tag, monkeypatch, tmp_path, at, how):
    path, save = plain_tag
    with monkeypatch.context() as patched, pytest.raises(dsq_ckpt.SaveFailed):
        patched.setattr(at, no_space)
        patched.setattr("dsq_ckpt.storage.target_directory.TargetDirectory.discard", lambda self: None)
        patched.setattr("dsq_ckpt.engine.collective.attachment_files.restore_backups", lambda *_: None)
        save()
    assert [name for name in listing(path) if name.endswith(".dsq")]
    if how == "load":
        attachment_files.restore_backups(path)
    elif how == "copy":
        copy_checkpoints(path, tmp_path / "copied")
        assert (tmp_path / "copied" / STATES).read_bytes() == b"all there is of step 5"
        return
    elif how == "save":
        with monkeypatch.context() as patched, pytest.raises(dsq_ckpt.SaveFailed):
            patched.setattr("dsq_ckpt.engine.pipeline.commit", no_space)
            save()
        assert listing(path) == [STATES]
    else:
        collect_garbage(tmp_path)
        assert STATES in listing(path) and f".{STATES}.plain.old" in listing(path), "a save may be under way"
        now = time.time()
        monkeypatch.setattr("dsq_ckpt.storage.gc.time.time", lambda: now + 7200)
        collect_garbage(tmp_path)
        assert listing(path) == [STATES]
    assert (path / STATES).read_bytes() == b"all there is of step 5"
    monkeypatch.undo()
    save()
    assert not [name for name in listing(path) if name.startswith(".")]
    with Checkpoint(path) as checkpoint:
        assert not [problem for *_, problem in checkpoint.verify() if problem]


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("how", ["load", "gc", "save", "copy"])
def test_files_that_deepspeed_wrote_since_a_killed_save_stay(plain_tag, monkeypatch, tmp_path, how, linked):
    """Also where a save over it fails then: the backups of the killed one are not the tag any more."""
    path, save = plain_tag
    if not linked:
        monkeypatch.setattr("dsq_ckpt.storage.links.os.link", no_links)
    with monkeypatch.context() as patched, pytest.raises(dsq_ckpt.SaveFailed):
        patched.setattr("dsq_ckpt.engine.pipeline.commit", no_space)
        patched.setattr("dsq_ckpt.storage.target_directory.TargetDirectory.discard", lambda self: None)
        patched.setattr("dsq_ckpt.engine.collective.attachment_files.restore_backups", lambda *_: None)
        save()
    (path / STATES).write_bytes(b"step 9, newer than the backup")
    if how == "load":
        with pytest.warns(UserWarning, match=f"written again after a save over it was killed.*'{STATES}'"):
            attachment_files.restore_backups(path)
        assert find_plain_backups(path), "it is a tag of DeepSpeed's still"
    elif how == "copy":
        copy_checkpoints(path, tmp_path / "copied")
        path = tmp_path / "copied"
    elif how == "save":
        with monkeypatch.context() as patched, pytest.raises(dsq_ckpt.SaveFailed), pytest.warns(UserWarning):
            patched.setattr("dsq_ckpt.engine.pipeline.commit", no_space)
            save()
        assert listing(path) == [STATES]
    else:
        now = time.time()
        monkeypatch.setattr("dsq_ckpt.storage.gc.time.time", lambda: now + 7200)
        with pytest.warns(UserWarning, match="written again"):
            collect_garbage(tmp_path)
        assert listing(path) == [STATES]
    assert (path / STATES).read_bytes() == b"step 9, newer than the backup"


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("other", [STATES, "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_files_that_deepspeed_wrote_over_a_checkpoint_outlive_a_failed_save(plain_tag, monkeypatch, other, killed):
    """Its manifest is of other files; also where an earlier save over it was killed before DeepSpeed wrote."""
    path, save = plain_tag
    save()
    if killed:
        with monkeypatch.context() as patched, pytest.raises(dsq_ckpt.SaveFailed):
            patched.setattr("dsq_ckpt.engine.pipeline.commit", no_space)
            patched.setattr("dsq_ckpt.storage.target_directory.TargetDirectory.discard", lambda self: None)
            patched.setattr("dsq_ckpt.engine.collective.attachment_files.restore_backups", lambda *_: None)
            save()
    (path / STATES).write_bytes(b"step 9, of DeepSpeed")
    (path / other).write_bytes(b"step 9, of DeepSpeed")
    with monkeypatch.context() as patched, pytest.raises(dsq_ckpt.SaveFailed):
        patched.setattr("dsq_ckpt.engine.pipeline.commit", no_space)
        save()
    assert {(path / name).read_bytes() for name in (STATES, other)} == {b"step 9, of DeepSpeed"}


def no_links(*args, **kwargs):
    raise OSError(errno.EPERM, "Operation not permitted")


def test_an_unchanged_plain_tag_is_told_from_a_newer_one_without_links(plain_tag, monkeypatch):
    """Where a backup is a copy, a save that was killed before it published leaves the same bytes twice."""
    path, _ = plain_tag
    monkeypatch.setattr("dsq_ckpt.storage.links.os.link", no_links)
    attachment_files.back_up_plain_tag(path, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attachment_files.restore_backups(path)
    assert (path / STATES).read_bytes() == find_plain_backups(path)[STATES].read_bytes() == b"all there is of step 5"


def test_a_file_whose_writer_is_unknown_keeps_its_backup(plain_tag, monkeypatch):
    path, save = plain_tag
    with monkeypatch.context() as patched, pytest.raises(dsq_ckpt.SaveFailed):
        patched.setattr("dsq_ckpt.engine.pipeline.commit", no_space)
        patched.setattr("dsq_ckpt.storage.target_directory.TargetDirectory.discard", lambda self: None)
        patched.setattr("dsq_ckpt.engine.collective.attachment_files.restore_backups", lambda *_: None)
        save()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr("dsq_ckpt.storage.attachment_files.checksum_file", no_space)
        attachment_files.restore_backups(path)
    assert find_plain_backups(path)[STATES].read_bytes() == b"all there is of step 5"


def test_files_that_were_written_over_a_checkpoint_since_a_killed_save_stay(tmp_path, monkeypatch):
    path = tmp_path / "tag"
    contribution = tag_without_manifest(path, monkeypatch)
    save_parts(path, lambda: contribution, DSQConfig(), SingleProcess(), overwrite=True)
    with monkeypatch.context() as patched:
        patched.setattr("dsq_ckpt.engine.collective.attachment_files.restore_backups", lambda *_: None)
        tag_without_manifest(path, monkeypatch)
    (path / STATES).write_bytes(b"newer, of DeepSpeed")
    attachment_files.restore_backups(path)
    assert (path / STATES).read_bytes() == b"newer, of DeepSpeed"
    with Checkpoint(path) as checkpoint:  # which is told, as by any load of it
        assert [name for name, _, problem in checkpoint.verify() if problem] == [STATES]


@pytest.mark.parametrize("way", ["save_parts", "save"])
@pytest.mark.parametrize("twin", [True, False])
def test_a_save_that_fails_leaves_the_files_of_another_one_under_way(run, monkeypatch, way, twin):
    """As a job that is ended in the directory that its successor writes to; ancestors may be links of either."""
    path = run / "twice"
    files = [f"{SAVE}-00000.dsq", f".{SAVE}-00001.dsq.89abcdef.tmp", f".{SAVE}-00000.attachments"] if twin else []
    inherited = []

    def fails(*args, **kwargs):
        plant(path, *files)
        inherited.extend(name for name in listing(path) if (run / NAMES[-1] / name).exists())
        no_space()

    state = torch.load(io.BytesIO(exported(run)))
    part = LocalShard(ChunkKey("w", (0, 0), (64, 96)), (64, 96), torch.float32, lambda: torch.randn(64, 96))
    plant(path, f"{SAVE[::-1]}-00000.dsq")  # of one that was killed before
    with pytest.raises(dsq_ckpt.SaveFailed, match="No space left"):
        if way == "save":
            monkeypatch.setattr("dsq_ckpt.engine.pipeline.commit", fails)
            dsq_ckpt.save(state, path, parent=run / NAMES[-1])
        else:
            monkeypatch.setattr("dsq_ckpt.engine.pipeline.commit", fails)
            save_parts(path, lambda: LocalState([part], attachments={STATES: written_id}), DSQConfig(),
                       SingleProcess())
    assert inherited or way == "save_parts"
    assert (listing(path) if path.exists() else []) == sorted(
        [*files, *inherited, f"{SAVE[::-1]}-00000.dsq"] if twin else []
    )


def written_id(stream, save_id):
    stream.write(save_id.encode() * 10)


def exported(run):
    export_torch(run / NAMES[-1], run / "state.pt")
    data = (run / "state.pt").read_bytes()
    (run / "state.pt").unlink()
    return data


def test_a_save_that_fails_leaves_what_another_one_published_over_a_plain_tag(plain_tag):
    path, _ = plain_tag
    attachment_files.back_up_plain_tag(path, False)
    plant(path, "twin")
    attachment_files.write_journal(path, SAVE, 0, [FileInfo(STATES, *checksum_file(path / "twin"))], False)
    os.replace(path / "twin", path / STATES)
    attachment_files.restore_backups(path, SAVE[::-1])
    assert (path / STATES).read_bytes() == b"x" * 10
    assert find_plain_backups(path)[STATES].read_bytes() == b"all there is of step 5"
    attachment_files.restore_backups(path, SAVE)
    assert (path / STATES).read_bytes() == b"all there is of step 5"


def test_a_plain_tag_that_could_not_be_backed_up_is_left_as_it_was(plain_tag, monkeypatch):
    path, save = plain_tag
    (path / "other_states.pt").write_bytes(b"too")
    before = listing(path)

    def second_fails(source, target, fsync):
        if find_plain_backups(path):
            no_space()
        os.link(source, target)

    with monkeypatch.context() as patched, pytest.raises(dsq_ckpt.SaveFailed, match="No space left"):
        patched.setattr("dsq_ckpt.storage.attachment_files.link_or_copy", second_fails)
        save()
    assert listing(path) == before


def test_a_save_of_part_of_a_tensor_replaces_no_attachment(plain_tag, monkeypatch):
    path, _ = plain_tag
    part = LocalShard(ChunkKey("w", (0, 0), (32, 96)), (64, 96), torch.float32, lambda: torch.randn(32, 96))
    published = []
    monkeypatch.setattr(
        "dsq_ckpt.engine.collective.attachment_files.publish_attachments", lambda *args: published.append(args)
    )
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"'w' of shape .* was given so that"):
        save_parts(path, lambda: LocalState([part], attachments={STATES: written_id}), DSQConfig(), SingleProcess(),
                   overwrite=True)
    assert published == [] and listing(path) == [STATES]


def test_a_writer_whose_save_completed_has_nothing_to_discard(tmp_path):
    """Whatever fails in its next save before that is planned: the checkpoint of the last one is not its to touch."""
    writer = dsq_ckpt.DSQStorageWriter(tmp_path / "c")
    dcp.save({"weight": torch.randn(8, 8)}, storage_writer=writer, no_dist=True)
    (tmp_path / "c" / MANIFEST).rename(tmp_path / MANIFEST)
    before = listing(tmp_path)
    writer.discard()
    assert listing(tmp_path) == before
