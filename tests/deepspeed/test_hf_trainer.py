"""Hugging Face's Trainer and Accelerate, unchanged: the JSON block alone, found by `python -m dsq_ckpt.launch`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.deepspeed_processes import WORKERS, by_torchrun
from tests.helpers.packages import needs
from tests.helpers.processes import ROOT

pytestmark = [pytest.mark.slow(22), needs("deepspeed", "transformers", "accelerate")]
CONFIGS = ROOT / "configs" / "deepspeed"


def launched(worker: str, *arguments: object) -> str:
    """Run a worker on two ranks by the launcher; its output."""
    return by_torchrun("-m", "dsq_ckpt.launch", WORKERS / f"{worker}.py", *arguments)


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.M)}


def tags(run: Path) -> dict[str, Path]:
    """The tag directory in each of the trainer's checkpoints."""
    return {tag.parent.name: tag for tag in sorted(run.glob("checkpoint-*/global_step*"))}


@pytest.mark.parametrize("name", ["hf_trainer", "hf_trainer_zero3"])
def test_trainer(tmp_path, name):
    config = CONFIGS / f"{name}.json"
    first = losses(launched("hf_trainer", config, tmp_path / "run", 25))
    assert sorted(first) == list(range(1, 26))

    directories = tags(tmp_path / "run")
    assert sorted(directories) == ["checkpoint-20", "checkpoint-25"], "save_total_limit took checkpoint-10"
    manifests = {name: Manifest.read(tag) for name, tag in directories.items()}
    assert manifests["checkpoint-20"].depth >= 1, "coded against checkpoint-10"
    assert manifests["checkpoint-25"].depth > manifests["checkpoint-20"].depth
    assert {manifest.refinement for manifest in manifests.values()} == {"kept"}, "each is the newest of its directory"
    for tag in directories.values():
        with Checkpoint(tag) as checkpoint:
            assert [problem for _, _, problem in checkpoint.verify() if problem] == []

    shutil.rmtree(tmp_path / "run" / "checkpoint-25")
    again = losses(launched("hf_trainer", config, tmp_path / "run", 25))
    assert sorted(again) == list(range(21, 26)), "it went on from checkpoint-20"
    for step, loss in again.items():
        assert loss == pytest.approx(first[step], rel=2e-3)
    assert Manifest.read(tags(tmp_path / "run")["checkpoint-25"]).depth > manifests["checkpoint-20"].depth


def test_accelerate(tmp_path):
    assert "ok accelerate" in launched("accelerated", CONFIGS / "zero2.json", tmp_path)
