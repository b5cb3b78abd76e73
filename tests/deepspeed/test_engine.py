"""Compressed tags through DeepSpeed's engine: what the workers check is written in their docstrings."""

from __future__ import annotations

import shutil

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers.commands import dsq_error, dsq_stdout
from tests.helpers.deepspeed_processes import python, ranks
from tests.helpers.packages import needs

pytestmark = [pytest.mark.slow(3), needs("deepspeed")]


def test_every_stage_resumes_to_the_last_bit(tmp_path):
    assert ranks("stages", 2, tmp_path).count("same losses to the last bit") == 22


@pytest.mark.parametrize(("stage", "checks"), [(2, 42), (3, 41)])
def test_chains_and_failures(tmp_path, stage, checks):
    assert ranks("chain", 2, tmp_path, stage).count("[ok]") == checks


def test_files_are_what_deepspeed_writes(tmp_path):
    assert ranks("alike", 2, tmp_path).count("[ok]") == 33


def test_optimizers_of_the_client(tmp_path):
    assert ranks("clients", 2, tmp_path).count("[ok]") == 39


def test_mistakes_and_full_disks(tmp_path):
    assert ranks("mistakes", 2, tmp_path).count("[ok]") == 88


def test_searches(tmp_path):
    assert ranks("searched", 2, tmp_path).count("[ok]") == 56


def test_experts_and_pipelines_are_exact(tmp_path):
    output = ranks("others", 2, tmp_path)
    assert output.count("same losses to the last bit") == output.count("told once") == 3
    assert "without an optimizer: saved" in output


def test_example_of_the_docstring(tmp_path):
    assert "[ok]" in ranks("docstring", 1, tmp_path)


@pytest.fixture(scope="module", params=[2, 3])
def converted(request, tmp_path_factory):
    """A run with two tags, and the weights of an engine that loaded the second."""
    directory = tmp_path_factory.mktemp("converted")
    ranks("converted", 2, directory, request.param)
    return directory


def test_zero_to_fp32_reads_tags(converted, tmp_path):
    python(converted / "run" / "zero_to_fp32.py", converted / "run", tmp_path)
    expected = torch.load(converted / "expected.pt")
    weights = torch.load(tmp_path / "pytorch_model.bin")
    assert set(expected) <= set(weights)
    for name, tensor in expected.items():
        assert torch.equal(weights[name].float(), tensor), name


def test_a_moved_tag_is_whole(converted, tmp_path):
    """Nothing in a tag refers to a place outside of it."""
    shutil.copytree(converted / "run" / "global_step6", tmp_path / "elsewhere" / "global_step6")
    (tmp_path / "elsewhere" / "latest").write_text("global_step6")
    script = converted / "run" / "zero_to_fp32.py"
    python(script, tmp_path / "elsewhere", tmp_path / "out")
    expected = torch.load(converted / "expected.pt")
    assert torch.equal(torch.load(tmp_path / "out" / "pytorch_model.bin")["l1.weight"], expected["l1.weight"])


def test_tags_are_checkpoints_of_ours(converted):
    """Named, whole tensors, for any number of ranks: into a model without DeepSpeed."""
    tag = converted / "run" / "global_step6"
    expected = torch.load(converted / "expected.pt")
    state = {"model": {name: torch.empty_like(expected[name]) for name in ("emb.weight", "l1.weight", "norm.bias")}}
    dsq_ckpt.load(state, tag)
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, expected[name]), name
    with Checkpoint(tag) as checkpoint:
        assert [problem for *_, problem in checkpoint.verify() if problem] == []
        assert "optimizer.state.l2.weight.exp_avg_sq" in checkpoint.index["tensors"]
    assert dsq_ckpt.latest(converted / "run") == str(tag)


def test_plain_files_for_machines_without_us(converted, tmp_path):
    """`dsq export --format deepspeed`: the same tensors, and no mention of dsq_ckpt."""
    tag = converted / "run" / "global_step6"
    assert "--allow-pickle" in dsq_error("export", tag, tmp_path / "plain", "--format", "deepspeed")
    dsq_stdout("export", tag, tmp_path / "plain" / "global_step6", "--format", "deepspeed", "--allow-pickle")
    files = sorted(file.name for file in tag.glob("*.pt"))
    assert sorted(file.name for file in (tmp_path / "plain" / "global_step6").iterdir()) == files
    for name in files:
        plain = tmp_path / "plain" / "global_step6" / name
        assert b"dsq_ckpt" not in plain.read_bytes()
    (tmp_path / "plain" / "latest").write_text("global_step6")
    python(converted / "run" / "zero_to_fp32.py", tmp_path / "plain", tmp_path / "out")
    weights, expected = torch.load(tmp_path / "out" / "pytorch_model.bin"), torch.load(converted / "expected.pt")
    for name, tensor in expected.items():
        assert torch.equal(weights[name].float(), tensor), name


def test_another_number_of_ranks(tmp_path):
    ranks("worlds", 2, tmp_path, "save")
    assert ranks("worlds", 3, tmp_path, "again").count("[ok]") == 4
    python(
        "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", tmp_path / "2" / "global_step3",
        "--output_folder", tmp_path / "2" / "universal", "--inject_missing_state",
    )
    assert ranks("worlds", 3, tmp_path, "universal").count("[ok]") == 4
