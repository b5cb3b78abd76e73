"""Paths that hold something else than a checkpoint of ours: errors say what it is, and what reads it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dsq_ckpt
from dsq_ckpt import CheckpointNotFound
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from tests.helpers.commands import dsq_error

MODEL_STATES, ZERO_STATES = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
FILE = r"is a file, and .* is a directory; torch\.load .* safetensors\.torch\.load_file .* `dsq compress`"
OTHERS = {
    "model.pt": FILE,
    "model.safetensors": FILE,
    "dcp": r"plain DCP checkpoint; load it with torch\.distributed\.checkpoint\.FileSystemReader, or .*`dsq compress`",
    "cut": r"has \.distcp files .* no \.metadata: it is not complete",
    "zero": r"is a tag that DeepSpeed wrote; .*load_checkpoint, or compress the file that zero_to_fp32\.py makes of it",
    "tag": rf"is a tag that DeepSpeed wrote; .*load_checkpoint, or compress its '{MODEL_STATES}' by `dsq compress`",
    "hub": r"holds safetensors; .*safetensors\.torch\.load_file, or compress them by `dsq compress`",
    "empty": r"holds no manifest\.json",
}
RUN = "is a run directory, not a checkpoint; the newest checkpoint in it is 'step-1'"


@pytest.fixture
def others(tmp_path):
    """Directory with one path of each kind."""
    tensor = {"w": torch.ones(3)}
    for name in ("zero", "tag", "hub", "empty"):
        (tmp_path / name).mkdir()
    for file in ("model.pt", f"tag/{MODEL_STATES}", f"zero/{MODEL_STATES}", f"zero/{ZERO_STATES}"):
        torch.save(tensor, tmp_path / file)
    for file in ("model.safetensors", "hub/model.safetensors"):
        (tmp_path / file).write_bytes(b"")
    for name in ("dcp", "cut"):
        dcp.save(tensor, checkpoint_id=tmp_path / name, no_dist=True)
    (tmp_path / "cut" / ".metadata").unlink()
    return tmp_path


@pytest.mark.parametrize("name", OTHERS)
def test_a_load_says_what_lies_at_the_path(others, name):
    with pytest.raises(CheckpointNotFound, match=OTHERS[name]):
        dsq_ckpt.load({"w": torch.ones(3)}, others / name)


def test_commands_say_the_same(others):
    for command in ("inspect", "verify"):
        assert "is a file, and a dsq_ckpt checkpoint is a directory" in dsq_error(command, others / "model.pt")
    assert "is a tag that DeepSpeed wrote" in dsq_error("inspect", others / "zero")


@pytest.mark.parametrize("name", ["cut", "zero", "tag"])
def test_compress_says_what_it_does_not_read(others, name):
    """The error lists no files of an optimizer as sources, and names the file of a tag that can be read."""
    with pytest.raises(CheckpointNotFound, match=OTHERS[name]):
        dsq_ckpt.compress(others / name, others / "out")
    if name == "tag":
        dsq_ckpt.compress(others / name / MODEL_STATES, others / "out")


def test_our_own_checkpoints_are_taken_for_nothing_else(others):
    """Neither a run that also has the model in safetensors, nor a tag of ours that lost its manifest."""
    run = others / "hub"
    dsq_ckpt.save({"w": torch.ones(3)}, run / "step-1")
    with pytest.raises(CheckpointNotFound, match=RUN):
        dsq_ckpt.load({"w": torch.ones(3)}, run)
    (run / "step-1" / "manifest.json").unlink()
    torch.save({}, run / "step-1" / MODEL_STATES)
    with pytest.raises(CheckpointNotFound, match=r"holds no manifest\.json"):
        dsq_ckpt.load({"w": torch.ones(3)}, run / "step-1")


def test_object_stores_say_it_too(store):
    for name in ("model.pt", "zero/" + MODEL_STATES, "zero/" + ZERO_STATES, "dcp/.metadata"):
        path = resolve_checkpoint_path(f"{store}/{name}")
        with get_storage(path).create(path, fsync=False) as file:
            file.stream.write(b"x")
            file.publish()
    for name, says in {**OTHERS, "dcp": r"load it with torch\.distributed\.checkpoint$"}.items():
        if name in ("model.pt", "zero", "dcp"):
            with pytest.raises(CheckpointNotFound, match=says):
                dsq_ckpt.load({"w": torch.ones(3)}, f"{store}/{name}")
