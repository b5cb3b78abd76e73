"""Programs of examples/ run as their docstrings say, twice where they resume, and go on where they were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import dsq_ckpt
from tests.helpers import forks
from tests.helpers.deepspeed_processes import ON_CPU, by_torchrun
from tests.helpers.packages import needs
from tests.helpers.processes import ROOT, run, torchrun

EXAMPLES = ROOT / "examples"


def program(name: str, *arguments: object, status: int = 0, **environment: str) -> str:
    """Run a program of the folder in a process of its own; its output."""
    exit_status, output = run([str(EXAMPLES / f"{name}.py"), *map(str, arguments)], forked=True, **environment)
    assert exit_status == status, output[-4000:]
    return output


def checkpoints(run_directory: Path) -> list[str]:
    return sorted(path.name for path in run_directory.iterdir())


def test_plain_loop(tmp_path: Path) -> None:
    program("plain_loop", "--out", tmp_path)
    output = program("plain_loop", "--out", tmp_path, "--steps", 60)
    assert "step-000040 at step 40" in output
    assert checkpoints(tmp_path) == ["step-000020", "step-000040", "step-000060"]


def test_one_shot(tmp_path: Path) -> None:
    program("one_shot", "--out", tmp_path)
    assert dsq_ckpt.describe(tmp_path / "bounded")["bytes_kept"] > 0
    exported, original = torch.load(tmp_path / "exported.pt"), torch.load(tmp_path / "model.pt")
    assert {name: value.shape for name, value in exported.items()} == {n: v.shape for n, v in original.items()}


def test_lightning(tmp_path: Path) -> None:
    program("lightning_fit", "--out", tmp_path, **ON_CPU)
    output = program("lightning_fit", "--out", tmp_path, "--epochs", 6, **ON_CPU)
    assert "epoch 6 step 48" in output and "kept: epoch=4.ckpt epoch=5.ckpt last.ckpt" in output


def test_gradient_log(tmp_path: Path) -> None:
    """What is recovered is bit for bit what the process had when it died."""
    died = program("gradient_log", "--out", tmp_path, "--die-at", 25, status=1)
    output = program("gradient_log", "--out", tmp_path)
    recovered = re.search(r"recovered step 25: .* checksum (\S+)", output)
    assert recovered is not None and f"step 25, checksum {recovered[1]}" in died
    assert "step 40 loss" in output


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_programs_of_several_ranks(name: str, tmp_path: Path) -> None:
    """They resume on another number of ranks."""
    torchrun(name, 2, "--out", tmp_path, workers=EXAMPLES)
    output = torchrun(name, 1, "--out", tmp_path, "--steps", "60", workers=EXAMPLES)
    assert "step-000040 at step 40" in output
    assert checkpoints(tmp_path) == ["step-000020", "step-000040", "step-000060"]


@needs("transformers", "accelerate")
@pytest.mark.slow
def test_hugging_face(tmp_path: Path) -> None:
    """Trainer and Accelerate; what is resumed is the newest checkpoint."""
    program("hf_trainer", "--out", tmp_path / "trainer", **ON_CPU)
    output = program("hf_trainer", "--out", tmp_path / "trainer", "--steps", 30, **ON_CPU)
    assert re.search(r"checkpoint-20 \d+ bytes, from which it resumed", output)
    assert checkpoints(tmp_path / "trainer") == ["checkpoint-10", "checkpoint-20", "checkpoint-30", "final"]
    assert (tmp_path / "trainer" / "final" / "model.safetensors").exists()
    program("accelerate_loop", "--out", tmp_path, **ON_CPU)
    output = program("accelerate_loop", "--out", tmp_path, "--steps", 60, **ON_CPU)
    assert "checkpoint_1 at step 40" in output and "step 60 loss" in output
    assert checkpoints(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


TWICE = """
import ray, runpy, sys
arguments = sys.argv[2:]
ray.init(runtime_env={"py_executable": sys.argv[1]})
for sys.argv in (arguments, [*arguments, "--steps", "60"]):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs("ray")
@pytest.mark.slow(25)
def test_ray_train(tmp_path: Path) -> None:
    """Two workers, twice in one process, as Ray's start takes long; what it keeps of the deltas is complete.

    Workers and Ray's actors, a dozen processes, are forks that need not import torch, nor what Ray imports. Ray they
    import themselves: forks of a process that has imported it draw the same ids.
    """
    python = forks.interpreter(tmp_path / "python")
    status, output = run(
        ["-c", TWICE, str(python), str(EXAMPLES / "ray_train.py"), "--out", str(tmp_path / "run")], forked=True,
        RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
        **{forks.PRELOAD: "pandas pyarrow.fs pyarrow.parquet jsonschema requests pydantic"},
    )
    assert status == 0, output[-4000:]
    assert "began at step 0" in output and "resumed at step 40" in output and "saved step-000060" in output
    paths = sorted(path.parent for path in (tmp_path / "run").glob("*/manifest.json"))
    assert [path.name for path in paths] == ["step-000050", "step-000060"]
    assert all(dsq_ckpt.describe(path)["depth"] >= 4 for path in paths)
    for path in paths:
        target: dict[str, object] = {}
        dsq_ckpt.load(target, path)
        assert target["step"] == int(path.name[-6:])


@needs("torchft")
@pytest.mark.slow(15)
def test_torchft(tmp_path: Path) -> None:
    """A replica that was killed gets the state of the other, and both end with the same weights."""
    output = program("torchft_ddp")
    assert "replica 1 ended with -9, and starts again" in output
    assert re.search(r"starts again.*replica 1 got the state of step (9|10)\b", output, re.S)
    assert "step 20: the same weights" in output


@needs("deepspeed")
@pytest.mark.slow
def test_deepspeed(tmp_path: Path) -> None:
    """By torchrun; DeepSpeed's own launcher is tested in `tests/deepspeed`."""
    script = EXAMPLES / "deepspeed_zero.py"
    by_torchrun(script, "--out", tmp_path)
    output = by_torchrun(script, "--out", tmp_path, "--steps", 60)
    assert re.search(r"resumed from .* at step 40", output)
    assert (tmp_path / "global_step60" / "manifest.json").exists()


def test_each_says_how_it_is_run_and_is_listed() -> None:
    """Each docstring has commands for that very file, and README and the site name all of them."""
    readme = (ROOT / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        docstring = path.read_text().split('"""')[1]
        commands = re.findall(r"^    (.*examples/.*)$", docstring, re.M)
        assert commands and all(f"examples/{path.name}" in command for command in commands), path.name
        assert f"`{path.name}`" in readme, path.name
