"""Two jobs in one run directory are told of each other; a job that is alone, however it saves, is told nothing."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.engine import chain, writing
from dsq_ckpt.storage import links
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.processes import run

CONFIG = {"storage": {"fsync": False}, "refinement": {"keep_last": 1}}
OTHER = """
import sys, torch, dsq_ckpt
torch.manual_seed(1)
weights = torch.randn(80, 80)
for path in sys.argv[2:]:
    if sys.argv[1]:
        dsq_ckpt.load({"w": torch.zeros(80, 80)}, sys.argv[1])
    weights += 0.1 * torch.randn(80, 80)
    dsq_ckpt.save({"w": weights}, path, config={"refinement": {"keep_last": 1}}, overwrite=True)
"""
EXPORTS = """
import sys, torch, dsq_ckpt
for path in sys.argv[2:]:
    dsq_ckpt.compress(torch.nn.Linear(80, 80), path)
"""
WEIGHTS = torch.randn(80, 80, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def other_job(*paths, loaded="", text=OTHER) -> None:
    status, output = run(["-c", text, str(loaded), *map(str, paths)], forked=True)
    assert status == 0, output


def record_save(path, save=dsq_ckpt.save, **options) -> list[str]:
    """Save, and return what was said of other jobs."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        result = save({"w": WEIGHTS + 0.1 * torch.randn(80, 80)}, path, config=CONFIG, **options)
        if save is dsq_ckpt.async_save:
            result.result()
    return [text for warning in recorded if "another job" in (text := str(warning.message)) or "two jobs" in text]


@pytest.mark.parametrize("save", [dsq_ckpt.save, dsq_ckpt.async_save])
def test_a_job_that_saves_into_the_same_directory_is_reported_once(tmp_path, save):
    assert not record_save(tmp_path / "a-1", save)
    other_job(tmp_path / "b-1", tmp_path / "b-2")
    (text,) = record_save(tmp_path / "a-2", save)
    assert f"'{tmp_path}'" in text and "'b-2'" in text and "a directory of its own" in text
    other_job(tmp_path / "b-3")
    assert not record_save(tmp_path / "a-3", save)


def test_refinement_layers_of_another_job_are_left_alone(tmp_path):
    """Whatever either keeps."""
    other_job(tmp_path / "b-1")
    for number in range(3):
        record_save(tmp_path / f"a-{number}")
    other_job(tmp_path / "b-2")
    refinements = {path.name: Manifest.read(path).refinement for path in tmp_path.iterdir()}
    assert refinements == {"b-1": "kept", "a-0": "dropped", "a-1": "dropped", "a-2": "kept", "b-2": "kept"}


def test_a_checkpoint_that_another_job_replaced_is_reported(tmp_path):
    record_save(tmp_path / "step-1")
    other_job(tmp_path / "step-1")
    (text,) = record_save(tmp_path / "step-2")
    assert "step-1' was replaced by another process" in text


@pytest.mark.parametrize(("place", "step"), [
    (chain.ParentCheckpoint, "__init__"), (chain.ParentCheckpoint, "read_codes"), (writing, "link_parent_files"),
])
def test_a_checkpoint_that_another_job_replaces_during_a_save_is_reported(tmp_path, monkeypatch, place, step):
    """In place of damage, which nobody did; whoever saves again gets a keyframe."""
    record_save(tmp_path / "step-1")
    other_job(tmp_path / "other" / "step-1")
    history = dsq_ckpt.SaveHistory()
    # so that its codes are read of its files
    dsq_ckpt.load({"w": torch.zeros(80, 80)}, tmp_path / "step-1", history=history)
    do, met = getattr(place, step), []

    def after_replacement(*arguments):
        if not met:
            shutil.rmtree(tmp_path / "step-1")
            shutil.copytree(tmp_path / "other" / "step-1", tmp_path / "step-1")
        met.append(step)
        return do(*arguments)

    monkeypatch.setattr(place, step, after_replacement)
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"step-1' was replaced .* save again"):
        dsq_ckpt.save({"w": WEIGHTS}, tmp_path / "step-2", config=CONFIG, history=history)
    assert met and not (tmp_path / "step-2").exists()
    (text,) = record_save(tmp_path / "step-2", history=history)
    assert "step-1' was replaced by another process" in text and Manifest.read(tmp_path / "step-2").depth == 0


def test_a_parent_that_was_replaced_is_not_taken_for_another(tmp_path):
    """The names of files that a checkpoint needs are looked up in the manifest of the save that it is coded against."""
    record_save(tmp_path / "step-1")
    before = Manifest.read(tmp_path / "step-1").save_id
    other_job(tmp_path / "step-1")
    with pytest.raises(dsq_ckpt.SaveFailed, match=r"step-1' was replaced by another save .* a directory of its own"):
        links.read_parent_manifest(tmp_path / "step-1", before)


def test_checkpoints_that_were_there_or_loaded_are_of_the_same_job(tmp_path):
    """As after a restart, or where a program that starts others goes on from what they saved."""
    other_job(tmp_path / "1", tmp_path / "2")
    assert not record_save(tmp_path / "3")
    other_job(tmp_path / "4", tmp_path / "5", loaded=tmp_path / "3")
    dsq_ckpt.load({"w": torch.zeros(80, 80)}, tmp_path / "5")
    assert not record_save(tmp_path / "6") + record_save(tmp_path / "7")


def test_a_job_by_itself_is_told_nothing(tmp_path):
    """With several states and histories, in the background, renamed, copied, deleted and saved again."""
    history = dsq_ckpt.SaveHistory()
    for number in range(4):
        assert not record_save(tmp_path / f"a-{number}") + record_save(tmp_path / f"b-{number}", history=history)
        assert not record_save(tmp_path / f"c-{number}", dsq_ckpt.async_save, history=dsq_ckpt.SaveHistory())
        assert not record_save(tmp_path / "last", overwrite=True)
        (tmp_path / f"a-{number}").rename(tmp_path / f"renamed-{number}")
        shutil.copytree(tmp_path / f"b-{number}", tmp_path / f"best-{number}")
        shutil.rmtree(tmp_path / f"c-{number}")
        (tmp_path / f"logs-{number}").mkdir()
    assert not record_save(tmp_path / "c-0")


def test_somebodys_exports_are_no_job(tmp_path):
    record_save(tmp_path / "1")
    other_job(tmp_path / "best", loaded=tmp_path / "1")
    other_job(tmp_path / "a", tmp_path / "b", text=EXPORTS)
    assert not record_save(tmp_path / "2") + record_save(tmp_path / "3")


@pytest.mark.usefixtures("forked_logs")
def test_the_checkpointing_process_of_a_log_is_no_job(tmp_path):
    record_save(tmp_path / "1")
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    log = dsq_ckpt.lowdiff.GradientLog(tmp_path, model, optimizer, compressor="none", snapshot_every=1, keep=9)
    for _ in range(3):
        model(torch.ones(16)).sum().backward()
        optimizer.step()
        log.step()
    log.close()
    assert len([*tmp_path.glob("step-*")]) > 1, "else this test shows nothing"
    assert not record_save(tmp_path / "2")


def test_a_part_of_a_job_is_told_nothing(tmp_path, monkeypatch):
    """Its other processes may save by themselves."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    record_save(tmp_path / "rank-0-1")
    other_job(tmp_path / "rank-1-1", tmp_path / "rank-1-2")
    assert not record_save(tmp_path / "rank-0-2")
