"""A save without DCP: what ranks bring, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.errors import CheckpointExists, SaveFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.saving import save_parts

WEIGHT = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
CONFIG = DSQConfig(refinement={"keep_last": 1}, storage={"fsync": False})


def part(fqn="model.weight", tensor=WEIGHT, offsets=(0, 0), size=(64, 96)):
    return LocalShard(ChunkKey(fqn, offsets, tuple(tensor.shape)), size, tensor.dtype, lambda: tensor)


def halves():
    return [part(tensor=WEIGHT[:40], offsets=(0, 0)), part(tensor=WEIGHT[40:], offsets=(40, 0))]


def save(path, parts, **options):
    nesting = {"model.weight": ("model", "weight")}
    overwrite = options.pop("overwrite", False)
    contribution = LocalState(parts, nesting=nesting, **options)
    return save_parts(path, lambda: contribution, CONFIG, SingleProcess(), overwrite=overwrite)


def write(stream, save_id, data=b"hello"):
    stream.write(data + save_id.encode())


def test_parts_are_a_checkpoint_like_any_other(tmp_path):
    save(tmp_path / "1", halves())
    save(tmp_path / "2", halves())
    dsq_ckpt.save({"model": {"weight": WEIGHT}}, tmp_path / "other" / "1", config=CONFIG)
    loaded, dcp = ({"model": {"weight": torch.empty_like(WEIGHT)}} for _ in range(2))
    dsq_ckpt.load(loaded, tmp_path / "2")
    dsq_ckpt.load(dcp, tmp_path / "other" / "1")
    assert torch.equal(loaded["model"]["weight"], dcp["model"]["weight"])
    assert [Manifest.read(tmp_path / name).depth for name in "12"] == [0, 1]
    assert Manifest.read(tmp_path / "1").refinement == "dropped"


def test_attachments_belong_to_the_checkpoint(tmp_path):
    save(tmp_path / "1", [part()], attachments={"x_states.pt": write})
    manifest = Manifest.read(tmp_path / "1")
    assert (tmp_path / "1" / "x_states.pt").read_bytes() == b"hello" + manifest.save_id.encode()
    assert [file.name for file in manifest.files if file.role == "attachment"] == ["x_states.pt"]
    assert dsq_ckpt.describe(tmp_path / "1")["bytes_kept"] == sum(
        file.stat().st_size for file in (tmp_path / "1").iterdir()
    )
    (tmp_path / "1" / "x_states.pt").write_bytes(b"hallo")
    with Checkpoint(tmp_path / "1") as checkpoint:
        assert [name for name, _, problem in checkpoint.verify() if problem] == ["x_states.pt"]


def test_a_failing_attachment_fails_the_save(tmp_path):
    def full(stream, save_id):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(SaveFailed, match="No space left"):
        save(tmp_path / "1", [part()], attachments={"a_states.pt": write, "b_states.pt": full})
    assert not list((tmp_path / "1").glob("*.pt")) and not list((tmp_path / "1").glob(".*"))
    assert dsq_ckpt.latest(tmp_path) is None
    save(tmp_path / "1", [part()])


def test_overwriting_leaves_nothing_of_the_old(tmp_path):
    save(tmp_path / "1", [part()], attachments={"a_states.pt": write, "b_states.pt": write})
    with pytest.raises(CheckpointExists):
        save(tmp_path / "1", [part()])
    save(tmp_path / "1", [part()], attachments={"a_states.pt": partial(write, data=b"new")}, overwrite=True)
    assert (tmp_path / "1" / "a_states.pt").read_bytes().startswith(b"new")
    named = {file.name for file in Manifest.read(tmp_path / "1").files} | {"manifest.json"}
    assert {file.name for file in (tmp_path / "1").iterdir()} == named


def test_a_chunk_brought_twice(tmp_path):
    with pytest.raises(SaveFailed, match="only one of them may write it"):
        save(tmp_path / "1", [part(), part(tensor=WEIGHT.clone())])
    with pytest.raises(SaveFailed, match="dtype float32 and float64"):
        save(tmp_path / "2", [part(tensor=WEIGHT[:40]), part(tensor=WEIGHT[40:].double(), offsets=(40, 0))])


def test_a_contribution_that_cannot_be_made(tmp_path):
    def broken():
        raise RuntimeError("no such buffer")

    with pytest.raises(SaveFailed, match="no such buffer"):
        save_parts(tmp_path / "1", broken, CONFIG, SingleProcess())
    assert not (tmp_path / "1").exists()


def test_saving_over_the_parent(tmp_path):
    """The second save is coded against the first, which it replaces; both have the same predecessor."""
    save(tmp_path / "0", [part()])
    save(tmp_path / "1", [part()])
    save(tmp_path / "1", [part()], overwrite=True)
    manifest = Manifest.read(tmp_path / "1")
    assert (manifest.depth, manifest.previous_name) == (2, "0")
    loaded = {"model": {"weight": torch.empty_like(WEIGHT)}}
    dsq_ckpt.load(loaded, tmp_path / "1")
    assert (loaded["model"]["weight"] - WEIGHT).norm() < 0.02 * WEIGHT.norm()


def test_a_tensor_with_a_part_missing(tmp_path):
    with pytest.raises(SaveFailed, match="2304 of 6144 elements are missing"):
        save(tmp_path / "1", halves()[:1])
    assert dsq_ckpt.latest(tmp_path) is None


def test_parts_that_overlap(tmp_path):
    parts = [part(tensor=WEIGHT[:40], offsets=(0, 0)), part(tensor=WEIGHT[:24], offsets=(30, 0))]
    with pytest.raises(SaveFailed, match="overlap"):
        save(tmp_path / "1", parts)
    left, right = WEIGHT[:, :50].contiguous(), WEIGHT[:, :46].contiguous()
    with pytest.raises(SaveFailed, match="overlap"):
        save(tmp_path / "1", [part(tensor=left, offsets=(0, 0)), part(tensor=right, offsets=(0, 40))])
    save(tmp_path / "1", [part(tensor=left, offsets=(0, 0)), part(tensor=right, offsets=(0, 50))])


def test_attachments_come_back_when_a_save_over_them_fails(tmp_path, monkeypatch):
    def no_space(*arguments, **options):
        raise OSError(28, "No space left on device")

    save(tmp_path / "1", [part()], attachments={"a_states.pt": write})
    before = (tmp_path / "1" / "a_states.pt").read_bytes()
    monkeypatch.setattr("dsq_ckpt.engine.pipeline.commit", no_space)
    with pytest.raises(SaveFailed, match="No space left"):
        save(tmp_path / "1", [part()], attachments={"a_states.pt": write, "b_states.pt": write}, overwrite=True)
    assert (tmp_path / "1" / "a_states.pt").read_bytes() == before
    with Checkpoint(tmp_path / "1") as checkpoint:
        assert [problem for *_, problem in checkpoint.verify() if problem] == []


def test_a_tag_of_deepspeed_is_not_merged(tmp_path):
    config = DSQConfig(system="lc", storage={"fsync": False})
    for name in "123":
        contribution = LocalState([part(tensor=WEIGHT + int(name))], attachments={"a_states.pt": write})
        save_parts(tmp_path / name, partial(lambda brought: brought, contribution), config, SingleProcess())
    with pytest.raises(SaveFailed, match="tag of DeepSpeed"):
        dsq_ckpt.merge(tmp_path / "3", tmp_path / "merged")
