"""Which directories take a checkpoint, and which paths name a run."""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt
from dsq_ckpt.convert import export
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.engine.local_state import LocalState
from dsq_ckpt.errors import CheckpointExists, CheckpointNotFound, SaveFailed
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from tests.helpers.commands import dsq_error, dsq_stdout
from tests.helpers.saving import save_parts
from tests.helpers.small_run import NAMES

STATE = {"weight": torch.randn(80, 80), "step": 3}


def write(way, path, overwrite):
    """Write a checkpoint directory, in every way that there is."""
    if way == "save":
        dsq_ckpt.save(dict(STATE), path, overwrite=overwrite)
    elif way == "async_save":
        dsq_ckpt.async_save(dict(STATE), path, overwrite=overwrite).result()
    elif way == "dcp":
        writer = dsq_ckpt.DSQStorageWriter(path, overwrite=overwrite)
        dcp.save(dict(STATE), storage_writer=writer, no_dist=True)
    else:
        dsq_ckpt.compress(dict(STATE), path, overwrite=overwrite)


@pytest.mark.parametrize("way", ["save", "async_save", "dcp", "compress"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_with_other_files_is_left_as_it_is(tmp_path, way, overwrite):
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(BaseException) as caught:  # DCP's is no Exception
        write(way, project, overwrite)
    assert "holds other files ('manifest.json', 'src')" in str(caught.value)
    assert str(project / "run" / "step-000001") in str(caught.value)
    assert sorted(os.listdir(project)) == ["manifest.json", "src"]
    assert (project / "manifest.json").read_text() == '{"name": "a web page"}'


def test_a_run_directory_is_named_as_such(run):
    with pytest.raises(SaveFailed, match=f"'{run}' is a run directory, which holds checkpoints such as '{NAMES[2]}'"):
        dsq_ckpt.save(dict(STATE), run)
    with pytest.raises(SaveFailed, match="is a run directory"):
        dsq_ckpt.merge(run / NAMES[2], run)
    assert sorted(os.listdir(run)) == sorted(NAMES)


def test_the_root_and_the_working_directory(monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for path in (".", "/"):
        with pytest.raises(SaveFailed, match="needs a directory of its own"):
            dsq_ckpt.save(dict(STATE), path)
    assert os.listdir(tmp_path) == ["train.py"] and not Path("/manifest.json").exists()


def test_own_and_empty_directories_are_written_to(trained, tmp_path):
    """New, empty, left by interrupted saves, with what file systems leave; complete ones where that is asked for."""
    path = tmp_path / "c"
    path.mkdir()
    for name in (
        "0123456789abcdef-00000.dsq", "0123456789abcdef-00000.refinement", "0123456789abcdef.index",
        ".0123456789abcdef-00000.dsq.0123abcd.tmp", f".{MANIFEST}.0123abcd.tmp", ".nfs000000000001", ".DS_Store",
    ):
        (path / name).write_text("x")
    dsq_ckpt.save(dict(STATE), path)
    (path / "config.json").write_text("{}")  # beside a checkpoint of ours: put there knowingly
    with pytest.raises(CheckpointExists):
        dsq_ckpt.save(dict(STATE), path)
    dsq_ckpt.save(dict(STATE), path, overwrite=True)
    damaged = tmp_path / "damaged"
    shutil.copytree(trained[0] / NAMES[2], damaged)
    (damaged / MANIFEST).write_text("{}")
    dsq_ckpt.save(dict(STATE), damaged, overwrite=True)
    newer = tmp_path / "newer"
    shutil.copytree(path, newer)
    Manifest.read(newer).model_copy(update={"version": 99}).write(newer, exclusive=False, fsync=False)
    with pytest.raises(CheckpointExists):
        dsq_ckpt.save(dict(STATE), newer)


def test_files_of_deepspeed_lie_beside_ours(tmp_path):
    names = [
        "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        ".mp_rank_00_model_states.pt.0123456789abcdef.old", ".mp_rank_00_model_states.pt.0123abcd.tmp",
    ]
    for directory in ("global_step5", "ours"):
        (tmp_path / directory).mkdir()
        for name in names:
            (tmp_path / directory / name).write_text("x")
    attached = {names[0]: lambda stream, save_id: stream.write(b"new") and None}
    tag = tmp_path / "global_step5"
    save_parts(
        tag, lambda: LocalState([], attachments=attached), dsq_ckpt.DSQConfig(), SingleProcess(), overwrite=True
    )
    assert (tag / names[0]).read_bytes() == b"new"
    with pytest.raises(SaveFailed, match="holds other files"):
        dsq_ckpt.save(dict(STATE), tmp_path / "ours")


def test_home_is_expanded_wherever_a_path_comes_from_a_user(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    (home / "c.yaml").write_text("delta: {max_chain: 5}")
    dsq_ckpt.save(dict(STATE), "~/run/s-1", config="~/c.yaml")
    dsq_ckpt.save(dict(STATE), "~/run/s-2", parent="~/run/s-1")
    assert dsq_ckpt.latest("~/run") == str(home / "run" / "s-2")
    state = {"weight": torch.zeros(80, 80), "step": 0}
    dsq_ckpt.load(state, "~/run/s-2")
    assert state["step"] == 3
    assert dsq_ckpt.describe("~/run/s-2")["depth"] == 1
    export.export_torch("~/run/s-2", "~/out.pt")
    dsq_ckpt.compress("~/out.pt", "~/small")
    for command in (["log", "~/run"], ["inspect", "~/run/s-1"], ["verify", "~/run"], ["gc", "~/run"],
                    ["export", "~/run/s-1", "~/a.pt"], ["compress", "~/out.pt", "~/b", "--config", "~/c.yaml"]):
        dsq_stdout(*command)
    assert sorted(os.listdir(home)) == ["a.pt", "b", "c.yaml", "out.pt", "run", "small"]
    assert os.listdir(work) == []


def test_an_export_to_an_unknown_suffix(run, tmp_path):
    for name in ("o.xyz", "o.safetensor"):
        message = dsq_error("export", run / NAMES[2], tmp_path / name)
        assert ".safetensors, .pt, .pth, .bin, .ckpt" in message and "--format dcp" in message
    assert not any(entry.name.startswith("o.") for entry in tmp_path.iterdir())
    dsq_stdout("export", run / NAMES[2], tmp_path / "v1.5", "--format", "dcp")
    dsq_stdout("export", run / NAMES[2], tmp_path / "O.PT")
    assert (tmp_path / "v1.5" / ".metadata").exists() and (tmp_path / "O.PT").is_file()


@pytest.mark.parametrize("way", ["save", "async_save", "dcp", "compress"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_to_a_checkpoint_does_not_replace_it(tmp_path, way, overwrite):
    """Links to other directories, as on a larger disk, and to those above are followed."""
    for path in ("run/2", "disk/last"):
        (tmp_path / path).mkdir(parents=True)
    for link, target in (("run/best", "1"), ("run/empty", "2"), ("linked", "run"), ("run/last", "../disk/last")):
        (tmp_path / link).symlink_to(target)
    first = dsq_ckpt.save(dict(STATE), tmp_path / "linked" / "1")
    with pytest.raises(BaseException) as caught:  # DCP's is no Exception
        write(way, tmp_path / "run" / "best", overwrite)
    assert "run/best' is a link to '1', another checkpoint of the directory" in str(caught.value)
    assert "remove the link, or name another path" in str(caught.value)
    assert Manifest.read(tmp_path / "run" / "1").save_id == first.save_id
    for path in ("run/empty", "run/last", *(["run/last", "linked/1"] if overwrite else [])):
        write(way, tmp_path / path, overwrite)
    assert (tmp_path / "run" / "2" / MANIFEST).exists() and (tmp_path / "disk" / "last" / MANIFEST).exists()
    assert (Manifest.read(tmp_path / "run" / "1").save_id == first.save_id) == (not overwrite)


def test_a_checkpoint_in_a_checkpoint(run, tmp_path):
    inside, before = run / NAMES[2], sorted(os.listdir(run / NAMES[2]))
    for path in (inside / "new", inside / "a" / "new", run / ".." / run.name / NAMES[2] / "new"):
        with pytest.raises(SaveFailed, match=f"lies in '{inside}', which is a checkpoint itself.*'{run / 'new'}'"):
            dsq_ckpt.save(dict(STATE), path)
        with pytest.raises(SaveFailed, match="is a checkpoint itself"):
            dsq_ckpt.async_save(dict(STATE), path).result()
        with pytest.raises(SaveFailed, match="is a checkpoint itself"):
            dsq_ckpt.compress(dict(STATE), path)
    assert sorted(os.listdir(inside)) == before
    (tmp_path / MANIFEST).write_text('{"name": "somebody else\'s"}')
    dsq_ckpt.save(dict(STATE), inside / ".." / "new")
    assert os.listdir(run).count("new") == 1


@pytest.mark.parametrize("way", ["save", "async_save", "dcp", "compress"])
def test_a_path_through_a_file(tmp_path, way):
    (tmp_path / "file.txt").write_text("kept")
    for path in (tmp_path / "file.txt" / "step-1", tmp_path / "file.txt" / "run" / "step-1"):
        with pytest.raises(BaseException, match=f"leads through '{tmp_path / 'file.txt'}', which is no directory"):
            write(way, path, True)
        with pytest.raises(CheckpointNotFound, match=f"leads through '{tmp_path / 'file.txt'}', which is no directory"):
            dsq_ckpt.load(dict(STATE), path)
    assert (tmp_path / "file.txt").read_text() == "kept"


def test_latest_of_what_is_no_run(run, tmp_path):
    (tmp_path / "file.py").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    (tmp_path / "code").mkdir()
    for name in ("train.py", "data.bin", "README.md"):
        (tmp_path / "code" / name).write_text("")
    dcp.save({"x": torch.zeros(2)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    for path, says in (
        (tmp_path / "file.py", "is a file"), (tmp_path / "file.py" / "x", "leads through a file"),
        (run / NAMES[2], f"is a checkpoint, not a run; name the directory it lies in, '{run}'"),
        (tmp_path / "plain", "is a plain DCP checkpoint"), (tmp_path / "link", "is it mounted?"),
    ):
        with pytest.raises(CheckpointNotFound, match=says):
            dsq_ckpt.latest(path)
    with pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG)):
        dsq_ckpt.latest("x" * 300)
    for path, says in (
        (tmp_path / "code", r"a new run begins; other files are there \('data.bin', 'train.py'\)"),
        (run.parent, f"a new run begins; directories in it do, such as '{run.name}'"),
    ):
        with pytest.warns(UserWarning, match=says):
            assert dsq_ckpt.latest(path) is None


def test_latest_of_a_run_that_has_not_begun(run, tmp_path):
    """None, with a warning only where another spelling leads to checkpoints."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").write_text("")
    (tmp_path / "exp-16").mkdir()
    run.rename(tmp_path / "exp-16" / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (tmp_path / "exp-18" / "samples").mkdir(parents=True)
        for name in ("config.yaml", "events.out.tfevents.123", ".hydra", "slurm-12.out", "samples/1.bin"):
            (tmp_path / "exp-18" / name).write_text("")
        for name in ("logs", "exp-17/run", "exp-18", "elsewhere", "exp-16/run/step", "a/b/c"):
            assert dsq_ckpt.latest(tmp_path / name) is None
    target = tmp_path / "exp-16" / "run"
    with pytest.warns(UserWarning, match=f"'{target}' holds checkpoints: was that meant") as caught:
        assert dsq_ckpt.latest(tmp_path / "epx-16" / "run") is None
    assert caught[0].filename == __file__


@pytest.mark.parametrize("names", [
    "fold_a fold_b", "expA expB", "adamw adam", "bert-cased bert-uncased", "ckpt_fp16 ckpt_bf16", "trainA trainB",
    "train-clean train-clean2", "baseline baseline_v2", "student students", "gpt-small gpt-smol", "run_fold run_folds",
    "model_ema model_sma", "float16 bfloat16", "large xlarge", "run1 run2", "lr0.1 lr01", "lr_0.1 lr_0.01", "a run",
    "seed-1-1 seed-11", "encoder decoder", "tied untied", "first second", "linear linear_large", "ab ba", "en-de de-en",
])
def test_latest_is_silent_beside_runs_that_belong_together(trained, tmp_path, names):
    for there, missing in (names.split(), names.split()[::-1]):
        shutil.copytree(trained[0] / NAMES[0], tmp_path / there / NAMES[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert dsq_ckpt.latest(tmp_path / missing) is None
        shutil.rmtree(tmp_path / there)


@pytest.mark.parametrize("there, missing", [
    ("checkpoints", "checkponts"), ("checkpoints", "chekpoints"), ("checkpoints", "checkpionts"),
    ("checkpoints", "Checkpoints"), ("checkpoints", "checkppoints"), ("checkpoints", "checkpaints"),
    ("run_llama", "run_lama"), ("my_run", "my-run"), ("my_run", "myrun"), ("my run", "my.run"),
    ("My_Run-2", "my-run-2"),
    ("run_2024-01-02", "run-2024_01_02"), ("llama-7b-v2", "llmaa_7b-v2"), ("process", "proces"),
])
def test_latest_tells_of_a_typing_error(trained, tmp_path, monkeypatch, there, missing):
    """On rank 0 alone, as far as the launcher says which that is."""
    for first, second in ((there, missing), (missing, there)):
        shutil.copytree(trained[0] / NAMES[0], tmp_path / first / NAMES[0])
        with pytest.warns(UserWarning, match=re.escape(f"'{tmp_path / first}' holds checkpoints: was that meant?")):
            assert dsq_ckpt.latest(tmp_path / second) is None
        with monkeypatch.context() as launched, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            launched.setenv("RANK", "1")
            assert dsq_ckpt.latest(tmp_path / second) is None
        assert not caught
        shutil.rmtree(tmp_path / first)
