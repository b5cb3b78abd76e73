"""One writer for several saves: each is committed to the directory that it was given, with its own files."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt
from dsq_ckpt.dcp.call_stack import AsyncCall
from dsq_ckpt.engine import pipeline
from dsq_ckpt.storage.checkpoint import Checkpoint


def state(number):
    return {"w": torch.randn(80, 80, generator=torch.Generator().manual_seed(number))}


def test_a_save_that_is_staged_while_another_one_is_committed(tmp_path, monkeypatch):
    """The second one is staged between the files and the manifest of the first one."""
    writer = dsq_ckpt.DSQStorageWriter(tmp_path / "a", overwrite=True)
    original, writing, staged = pipeline.write_rank, threading.Event(), threading.Event()

    def held(*args):
        result = original(*args)
        writing.set()
        assert staged.wait(60)
        return result

    monkeypatch.setattr(pipeline, "write_rank", held)
    first = dcp.async_save(state(1), storage_writer=writer, no_dist=True)
    assert writing.wait(60)
    monkeypatch.setattr(pipeline, "write_rank", original)
    second = writer.stage(state(2))
    staged.set()
    first.result()
    with Checkpoint(tmp_path / "a") as checkpoint:
        assert not [problem for _, _, problem in checkpoint.verify() if problem]
        assert {file.name[:16] for file in checkpoint.manifest.files} == {checkpoint.manifest.save_id}
    dcp.save(second, storage_writer=writer, no_dist=True)
    loaded = {"w": torch.zeros(80, 80)}
    dsq_ckpt.load(loaded, tmp_path / "a")
    assert (loaded["w"] - state(2)["w"]).norm() < 0.1 * loaded["w"].norm()


@pytest.mark.filterwarnings("ignore")
def test_the_directory_may_be_named_after_staging(tmp_path, monkeypatch):
    """As where a stager of somebody else's calls ours in a thread of its own, whose stack tells nothing."""
    writer = dsq_ckpt.DSQStorageWriter(tmp_path / "a", overwrite=True)
    dcp.save(state(1), storage_writer=writer, no_dist=True)
    before = (tmp_path / "a" / "manifest.json").read_bytes()
    writer.async_call = AsyncCall(default_planner=True, no_dist=True)
    staged = writer.stage(state(2))
    dcp.save(staged, checkpoint_id=tmp_path / "b", storage_writer=writer, no_dist=True)
    assert (tmp_path / "a" / "manifest.json").read_bytes() == before
    loaded = {"w": torch.zeros(80, 80)}
    dsq_ckpt.load(loaded, tmp_path / "b")
    assert (loaded["w"] - state(2)["w"]).norm() < 0.1 * loaded["w"].norm()
