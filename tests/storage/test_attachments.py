"""Tags of DeepSpeed hold more than named tensors: whatever reads these says so, and nothing empty passes for a tag."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.convert.export import ExportError, export_dcp, export_safetensors, export_torch
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.engine.local_state import LocalShard, LocalState
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from tests.helpers.commands import dsq_error, dsq_json, dsq_stdout, run_dsq
from tests.helpers.reading import read_checkpoint
from tests.helpers.saving import save_parts

FILE = "mp_rank_00_model_states.pt"
WEIGHT = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
EXPORTS = {"dcp": export_dcp, "torch": export_torch, "safetensors": export_safetensors}
MORE = "only the tensors that have names are {}: .*buffers, frozen parameters.*--format deepspeed --allow-pickle"
NOTHING = "nothing in it can be {} by name.*--format deepspeed --allow-pickle"


def tag(path, tensors):
    """A tag with a file of DeepSpeed, of 400,000 bytes, and the tensor beside it or none."""
    key = ChunkKey("model.weight", (0, 0), tuple(WEIGHT.shape))
    shards = [LocalShard(key, tuple(WEIGHT.shape), WEIGHT.dtype, lambda: WEIGHT)] if tensors else []
    attachments = {FILE: lambda stream, save_id: stream.write(bytes(400_000)) and None}
    nesting = {"model.weight": ("model", "weight")} if tensors else {}
    contribution = LocalState(shards, nesting=nesting, attachments=attachments)
    save_parts(path, lambda: contribution, DSQConfig(storage={"fsync": False}), SingleProcess())
    return path


@pytest.fixture
def mixed(tmp_path):
    return tag(tmp_path / "run" / "global_step1", True)


@pytest.fixture
def bare(tmp_path):
    return tag(tmp_path / "bare" / "global_step1", False)


@pytest.mark.parametrize("form", EXPORTS)
def test_exports_say_what_they_leave_out(mixed, tmp_path, form):
    for part in (None, "model"):
        with pytest.warns(UserWarning, match=MORE.format("exported")):
            done = EXPORTS[form](mixed, tmp_path / f"{form}-{part}", part=part)
        assert (done.tensors, done.left_out) == (1, [FILE])


@pytest.mark.parametrize("form", EXPORTS)
@pytest.mark.parametrize("part", [None, "model"])
def test_no_export_is_empty(bare, tmp_path, form, part):
    with pytest.raises(ExportError, match=NOTHING.format("exported")):
        EXPORTS[form](bare, tmp_path / "out", part=part)
    assert not (tmp_path / "out").exists()


def test_the_command_says_it_too_and_in_its_document(mixed, bare, tmp_path):
    with pytest.warns(UserWarning, match=MORE.format("exported")):  # which the program prints on stderr
        result = run_dsq("export", mixed, tmp_path / "out.safetensors")
    assert result.exit_code == 0 and result.stdout.count("\n") == 1 and FILE not in result.stdout
    head = (tmp_path / "out.safetensors").read_bytes()
    size = int.from_bytes(head[:8], "little")
    assert json.loads(json.loads(head[8 : 8 + size])["__metadata__"]["left_out"]) == [FILE]
    with pytest.warns(UserWarning, match=MORE.format("exported")):
        assert dsq_json("export", mixed, tmp_path / "out.pt")["left_out"] == [FILE]
    assert "by name" in dsq_error("export", bare, tmp_path / "none.safetensors")


def test_reads_and_compressions_leave_attachments_out(mixed, bare, tmp_path):
    with pytest.warns(UserWarning, match=MORE.format("read")):
        assert list(read_checkpoint(mixed)["model"]) == ["weight"]
    with pytest.warns(UserWarning, match=MORE.format("compressed")):
        dsq_ckpt.compress(mixed, tmp_path / "compressed")
    with pytest.raises(ExportError, match=NOTHING.format("read")):
        read_checkpoint(bare)
    with pytest.raises(LoadFailed, match=NOTHING.format("compressed")):
        dsq_ckpt.compress(bare, tmp_path / "nothing")


@pytest.mark.parametrize("state", [{}, {"model": {}}, {"model": {"weight": torch.zeros(64, 96)}}])
def test_a_load_of_a_tag_without_tensors_fails(bare, state):
    with pytest.raises(LoadFailed, match=NOTHING.format("loaded")):
        dsq_ckpt.load(state, bare)


def test_a_load_of_everything_says_what_it_lacks_and_one_by_names_does_not(mixed):
    with pytest.warns(UserWarning, match=MORE.format("loaded")):
        dsq_ckpt.load(everything := {}, mixed)
    assert list(everything["model"]) == ["weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsq_ckpt.load({"model": {"weight": torch.zeros(64, 96)}}, mixed)
    with pytest.raises(LoadFailed, match=r"no 'model\.mean', .* in whose own files alone are buffers"):
        dsq_ckpt.load({"model": {"weight": torch.zeros(64, 96), "mean": torch.zeros(3)}}, mixed)


def test_files_as_they_are_count_as_uncompressed(mixed, bare):
    """So a ratio compares the same things, and a run of which nothing is compressed is not 2 MiB of 0 B."""
    assert dsq_ckpt.describe(mixed)["bytes_logical"] == WEIGHT.nbytes + 400_000
    assert dsq_ckpt.describe(bare)["bytes_logical"] == 400_000
    log = dsq_stdout("log", bare.parent)
    assert "uncompressed" in log.splitlines()[1] and " 0 B" not in log and "391 KiB" in log
    assert dsq_json("log", bare.parent)["total"]["everything"]["ratio_written"] > 0.98
    assert "uncompressed" not in dsq_stdout("log", mixed.parent).splitlines()[1]
    shown = dsq_stdout("inspect", mixed)
    assert next(line for line in shown.splitlines() if "own files" in line).split()[3:7] == ["391", "KiB", "391", "KiB"]


def test_an_export_without_a_base_layer_is_exact(tmp_path):
    dsq_ckpt.save({"weight": WEIGHT}, tmp_path / "exact", config="exact")
    dsq_ckpt.save({"weight": WEIGHT}, tmp_path / "lossy")
    assert dsq_stdout("export", tmp_path / "exact", tmp_path / "a.pt").endswith(", torch, exact\n")
    options = ("--refinement", "base")
    assert dsq_stdout("export", tmp_path / "lossy", tmp_path / "b.pt", *options).endswith(", base layer alone\n")
