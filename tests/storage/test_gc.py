"""`gc` removes exactly what no manifest needs, and only what a save of ours can have written."""

from __future__ import annotations

import os
import shutil
import time

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.convert.export import export_dcp, export_torch
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.errors import CheckpointNotFound
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage import attachment_files
from dsq_ckpt.storage.atomic_io import hidden_name, shorten_name
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.checkpoint_copy import copy_checkpoints
from dsq_ckpt.storage.gc import collect_garbage, find_garbage, find_skipped, is_dsq_file
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from tests.helpers.saving import save_parts
from tests.helpers.small_run import NAMES, small_run
from tests.helpers.states import find_differences, load_copy

SAVE = "0123456789abcdef"
TEMPORARY = (
    f".{SAVE}-00000.dsq.89abcdef.tmp",
    f".{SAVE}-00012.refinement.89abcdef.tmp",
    f".{SAVE}.index.tmp",
    f".{SAVE}.index.89abcdef.tmp",
    f".{MANIFEST}.89abcdef.tmp",
    f".{SAVE}-00000.dsq.dsq-89abcdef.tmp",
    ".mp_rank_00_model_states.pt.dsq-89abcdef.tmp",
)
DATA = (f"{SAVE}-00000.dsq", f"{SAVE}-123456.dsq", f"{SAVE}-00000.refinement", f"{SAVE}.index")
FOREIGN = (
    "notes.txt", "model.dsq", ".notes.tmp", f"{SAVE}.txt", f"{SAVE}-0000.dsq", f"{SAVE}-00000.dsq.bak",
    f"{SAVE.upper()}-00000.dsq", f"{SAVE[:-1]}g-00000.dsq", ".metadata", "__0_0.distcp", f".{SAVE}-00000.dsq.tmpx",
    "manifest.json.tmp", f"{SAVE}0-00000.dsq", ".model.pt.20250630.tmp", ".model.pt.tmp",
)


def listing(path):
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def plant(directory, *names):
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_bytes(b"x" * 10)


@pytest.fixture
def later(monkeypatch):
    """Two hours pass: the change time of a file cannot be set back."""
    now = time.time()
    monkeypatch.setattr("dsq_ckpt.storage.gc.time.time", lambda: now + 7200)


def test_names():
    assert all(is_dsq_file(name) for name in (*TEMPORARY, *DATA))
    assert not any(is_dsq_file(name) for name in (*FOREIGN, MANIFEST))


def test_a_healthy_run_has_no_garbage(run, later):
    before = listing(run)
    assert find_garbage(run) == collect_garbage(run, 0) == []
    assert listing(run) == before


def test_exactly_the_orphans_go(trained, run, later):
    before = listing(run)
    plant(run / NAMES[1], *TEMPORARY, *DATA, *FOREIGN)
    plant(run / "aborted", *TEMPORARY, *DATA)
    plant(run / "mixed", *TEMPORARY, *DATA, *FOREIGN)
    plant(run / "foreign", *FOREIGN)
    plant(run, *TEMPORARY)
    expected = sorted(
        [run / NAMES[1] / name for name in (*TEMPORARY, *DATA)]
        + [run / "aborted" / name for name in (*TEMPORARY, *DATA)]
        + [run / "mixed" / name for name in TEMPORARY]  # somebody else's directory: its data may be wanted
        + [run / name for name in TEMPORARY]
    )
    orphans = find_garbage(run)
    assert sorted(orphan.path for orphan in orphans) == expected
    assert {orphan.bytes for orphan in orphans} == {10}
    assert collect_garbage(run) == orphans
    remaining = [f"{NAMES[1]}/{name}" for name in FOREIGN] + [f"foreign/{name}" for name in FOREIGN]
    remaining += ["foreign", "mixed", *(f"mixed/{name}" for name in (*DATA, *FOREIGN))]
    assert listing(run) == sorted(before + remaining)
    assert find_differences(
        load_copy(run / NAMES[-1], trained[1]), load_copy(trained[0] / NAMES[-1], trained[1])
    ) == []


def test_a_single_checkpoint(run, later):
    plant(run / NAMES[0], DATA[0])
    plant(run / NAMES[1], DATA[0])
    assert [orphan.path for orphan in collect_garbage(run / NAMES[0])] == [run / NAMES[0] / DATA[0]]
    assert (run / NAMES[1] / DATA[0]).exists()


def test_an_aborted_checkpoint_named_itself(run, later):
    plant(run / "aborted", *DATA)
    assert len(collect_garbage(run / "aborted")) == len(DATA)
    assert os.listdir(run / "aborted") == []


def test_a_save_under_way_is_left_alone(run, monkeypatch):
    plant(run / "under-way", TEMPORARY[0], DATA[0])
    assert collect_garbage(run) == []
    now = time.time()
    monkeypatch.setattr("dsq_ckpt.storage.gc.time.time", lambda: now + 7200)
    young = run / "under-way" / DATA[3]
    plant(run / "under-way", young.name)
    os.utime(young, (now + 7190, now + 7190))
    assert find_garbage(run) == []  # one young file says that the old ones are still needed
    os.utime(young, (now, now))
    assert len(find_garbage(run)) == 3


def test_a_file_linked_just_now_is_young(run, monkeypatch):
    """Ancestors are linked into a new checkpoint: their mtime is old, their link is not."""
    old = run / NAMES[0] / DATA[0]
    plant(run / NAMES[0], old.name)
    os.utime(old, (1, 1))
    assert find_garbage(run, 600) == []


def test_a_manifest_that_cannot_be_read_protects_its_data(run, later):
    plant(run / NAMES[0], DATA[0], TEMPORARY[0])
    (run / NAMES[0] / MANIFEST).write_text("{")
    assert [orphan.path.name for orphan in collect_garbage(run)] == [TEMPORARY[0]]


def test_links_are_not_followed(run, tmp_path, later):
    plant(tmp_path / "other", *DATA)
    (run / "link").symlink_to(tmp_path / "other")
    (run / NAMES[0] / DATA[1]).symlink_to(tmp_path / "other" / DATA[1])
    assert find_garbage(run) == []


def test_a_dropped_refinement_whose_unlink_was_lost(trained, run, later):
    """What a crash between the two steps of dropping leaves."""
    manifest = Manifest.read(run / NAMES[-1])
    names = [file.name for file in manifest.files if file.role == "refinement"]
    files = [file for file in manifest.files if file.role != "refinement"]
    manifest.model_copy(update={"refinement": "dropped", "files": files}).write(
        run / NAMES[-1], exclusive=False, fsync=False
    )
    assert [orphan.path.name for orphan in collect_garbage(run)] == names
    load_copy(run / NAMES[-1], trained[1])


def test_a_save_that_was_killed(tmp_path, monkeypatch, later):
    """Everything but the manifest is there."""
    def die(*args, **kwargs):
        raise OSError("killed")

    state = small_run(tmp_path / "run")
    monkeypatch.setattr(Manifest, "write", die)
    monkeypatch.setattr("dsq_ckpt.storage.target_directory.TargetDirectory.discard", lambda self: None)
    with pytest.raises(BaseException, match="killed"):
        dsq_ckpt.save(state, tmp_path / "run" / "next")
    left = sorted((tmp_path / "run" / "next").iterdir())
    assert left
    assert sorted(orphan.path for orphan in collect_garbage(tmp_path / "run")) == left
    assert sorted(os.listdir(tmp_path / "run")) == sorted(NAMES)


def test_gc_without_a_directory_raises(tmp_path):
    with pytest.raises(CheckpointNotFound, match="is not a directory"):
        find_garbage(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFound, match="is not a directory"):
        collect_garbage(tmp_path / "nowhere")


def tag_without_manifest(path, monkeypatch):
    """A tag whose save was killed after its files had been given their names."""
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    def write(stream, save_id):
        stream.write(save_id.encode() * 10)

    weights = torch.randn(64, 96)
    part = LocalShard(ChunkKey("w", (0, 0), (64, 96)), (64, 96), torch.float32, lambda: weights)
    contribution = LocalState([part], attachments={"mp_rank_00_model_states.pt": write})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("dsq_ckpt.engine.pipeline.commit", killed)
        patched.setattr("dsq_ckpt.storage.target_directory.TargetDirectory.discard", lambda self: None)
        save_parts(path, lambda: contribution, DSQConfig(), SingleProcess(), overwrite=True)
    return contribution


def test_a_tag_of_deepspeed_that_did_not_complete(tmp_path, monkeypatch, later):
    """Its files of DeepSpeed's names go with the rest, as long as they are those that the save wrote."""
    tag_without_manifest(tmp_path / "tag", monkeypatch)
    assert (tmp_path / "tag" / "mp_rank_00_model_states.pt").exists()
    collect_garbage(tmp_path)
    assert not (tmp_path / "tag").exists()


def test_files_that_deepspeed_wrote_itself_stay(tmp_path, monkeypatch, later):
    tag_without_manifest(tmp_path / "tag", monkeypatch)
    before = listing(tmp_path / "tag")
    (tmp_path / "tag" / "mp_rank_00_model_states.pt").write_bytes(b"a plain tag")
    collect_garbage(tmp_path)
    assert listing(tmp_path / "tag") == before
    plant(tmp_path / "plain", "mp_rank_00_model_states.pt", f"{SAVE}-00000.dsq")
    collect_garbage(tmp_path)
    assert listing(tmp_path / "plain") == sorted(["mp_rank_00_model_states.pt", f"{SAVE}-00000.dsq"])


def test_backups(tmp_path, monkeypatch, later):
    """They stay as long as the checkpoint that they belong to needs them."""
    path = tmp_path / "tag"
    contribution = tag_without_manifest(path, monkeypatch)
    save_parts(path, lambda: contribution, DSQConfig(), SingleProcess(), overwrite=True)
    assert not [name for name in listing(path) if name.endswith((".old", ".attachments"))]
    # As if it were killed.
    monkeypatch.setattr("dsq_ckpt.engine.collective.attachment_files.restore_backups", lambda *_: None)
    tag_without_manifest(path, monkeypatch)
    monkeypatch.undo()
    now = time.time()
    monkeypatch.setattr("dsq_ckpt.storage.gc.time.time", lambda: now + 7200)
    (backup,) = [name for name in listing(path) if name.endswith(".old")]
    collect_garbage(tmp_path)
    assert backup in listing(path)
    attachment_files.restore_backups(path)
    plant(path, backup, f".mp_rank_00_model_states.pt.{SAVE}.old")
    collect_garbage(tmp_path)
    assert not [name for name in listing(path) if name.startswith(".")]
    with Checkpoint(path) as checkpoint:
        assert not [problem for *_, problem in checkpoint.verify() if problem]


@pytest.fixture
def killed(tmp_path, run, monkeypatch):
    """Copies and exports whose process is killed in between, and their hidden names."""
    def die(*args, **kwargs):
        raise KeyboardInterrupt

    last, io = run / NAMES[-1], "dsq_ckpt.storage.atomic_io"
    with monkeypatch.context() as patched:
        patched.setattr(f"{io}.hidden_name", lambda goal, mark=None: goal.with_name(f".{goal.name}.dsq-89abcdef.tmp"))
        patched.setattr(f"{io}.shutil.rmtree", lambda *args, **kwargs: None)
        patched.setattr(f"{io}.AtomicFile.discard", lambda self: None)
        patched.setattr(f"{io}.AtomicFile.publish", die)
        patched.setattr("dsq_ckpt.storage.checkpoint_copy._LocalCopy._copy_file", die)
        patched.setattr("dsq_ckpt.convert.export.sync_directory", die)
        with pytest.raises(KeyboardInterrupt):
            copy_checkpoints(last, run / "zz-copied")
        for export, target in ((export_dcp, "plain"), (export_torch, "model.v1.pt")):
            with pytest.raises(KeyboardInterrupt):
                export(last, run / target)
    return [f".{name}.dsq-89abcdef.tmp" for name in ("model.v1.pt", "plain", "zz-copied")]


def test_copies_and_exports_that_were_killed(run, killed, later):
    assert Manifest.read(run / killed[2]).save_id, "a copy begins with the manifest"
    assert [name for name in os.listdir(run) if name.startswith(".")] and dsq_ckpt.latest(run).endswith(NAMES[-1])
    orphans = find_garbage(run)
    assert [orphan.path.name for orphan in orphans] == killed and all(orphan.bytes for orphan in orphans)
    assert [orphan.path.name for orphan in collect_garbage(run)] == killed
    assert sorted(os.listdir(run)) == sorted(NAMES)


def test_copies_and_exports_under_way_are_left_alone(run, killed, monkeypatch, tmp_path):
    assert find_garbage(run) == collect_garbage(run) == []
    assert [entry.path.name for entry in find_skipped(run) if entry.is_young and entry.path != run] == killed
    assert [path.name for path in copy_checkpoints(run, tmp_path / "copied").left_out] == killed
    now = time.time()
    monkeypatch.setattr("dsq_ckpt.storage.gc.time.time", lambda: now + 7200)
    (run / killed[1] / "young").write_text("")
    os.utime(run / killed[1] / "young", (now + 7000, now + 7000))
    assert sorted(orphan.path.name for orphan in collect_garbage(run)) == [killed[0], killed[2]]


def test_a_target_that_an_export_was_to_replace(run, later):
    """It is garbage once something is in its place, and not before."""
    replaced = run / ".plain.dsq-89abcdef.old"
    plant(replaced, ".metadata")
    assert collect_garbage(run) == []
    assert [entry.path for entry in find_skipped(run)] == [replaced]
    plant(run / "plain", ".metadata")
    assert [orphan.path for orphan in collect_garbage(run)] == [replaced] and find_skipped(run) == []


def test_long_names_of_what_was_to_replace_or_be_replaced(run, later):
    """They are shortened where they are hidden."""
    goal = run / ("plain" * 51)
    replaced = run / f".{shorten_name(goal.name)}.dsq-89abcdef.old"
    plant(replaced, ".metadata")
    assert collect_garbage(run) == [] and [entry.path for entry in find_skipped(run)] == [replaced]
    plant(goal, ".metadata")
    plant(hidden_name(goal), "a")
    assert {orphan.path for orphan in find_garbage(run)} >= {replaced} and find_skipped(run) == []
    assert len(collect_garbage(run)) == 2 and sorted(os.listdir(run)) == sorted([*NAMES, goal.name])


def test_hidden_names_with_a_date_are_the_users(run, later):
    plant(run / "backup", "a")
    plant(run / ".backup.20240101.old", "b")
    plant(run / ".notes.20250630.tmp", "c")
    (run / ".model.pt.20250630.tmp").write_text("d")
    before = listing(run)
    assert find_garbage(run) == collect_garbage(run) == [] and listing(run) == before
    assert [entry.path.name for entry in find_skipped(run)] == [
        ".backup.20240101.old", ".model.pt.20250630.tmp", ".notes.20250630.tmp",
    ]


@pytest.mark.parametrize("target", ["model.pt", "plain"])
def test_files_of_a_killed_export_have_names_of_ours(run, later, tmp_path, target):
    """By the names that exports really give."""
    goal = run / target
    plant(run / "kept", "a")
    hidden = hidden_name(goal)
    hidden.write_bytes(b"x") if goal.suffix else plant(hidden, "a")
    before = dsq_ckpt.latest(run)
    assert [orphan.path for orphan in collect_garbage(run)] == [hidden] and not hidden.exists()
    assert dsq_ckpt.latest(run) == before


def test_an_export_that_completes_while_it_is_collected(run, later, monkeypatch):
    plant(run / ".a.dsq-89abcdef.tmp", "a")
    plant(run / ".b.dsq-89abcdef.tmp", "b")
    remove = shutil.rmtree

    def completed(path):
        if path.name.startswith(".a"):
            path.rename(run / "a")
        remove(path)

    monkeypatch.setattr("dsq_ckpt.storage.gc.shutil.rmtree", completed)
    assert [orphan.path.name for orphan in collect_garbage(run)] == [".b.dsq-89abcdef.tmp"]
    assert listing(run / "a") == ["a"]
