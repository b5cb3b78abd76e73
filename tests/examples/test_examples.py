"""Programs of examples/ run as their docstrings say, twice where they resume, and go on where they were."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import torch

import dsq_ckpt
from tests.helpers.processes import ROOT, run, torchrun

EXAMPLES = ROOT / "examples"
IN_TURN = """
import runpy, shlex, sys
for line in sys.argv[1:]:
    sys.argv = shlex.split(line)
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def in_turn(*lines: str) -> str:
    """Run programs one after the other in one process, each as `__main__`; the output of all."""
    status, output = run(["-c", IN_TURN, *lines], timeout=280)
    assert status == 0, output[-4000:]
    return output


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def checkpoints(run_directory: Path) -> list[str]:
    return sorted(path.name for path in run_directory.iterdir())


def test_programs_of_one_process(tmp_path: Path) -> None:
    """`gradient_log.py` dies in a process of its own and recovers beside the others."""
    logged = f"{EXAMPLES}/gradient_log.py --out {tmp_path}/logged"
    status, died = run([*logged.split(), "--die-at", "25"], timeout=280)
    assert status == 1, died[-4000:]
    plain = f"{EXAMPLES}/plain_loop.py --out {tmp_path}/plain"
    output = in_turn(logged, plain, f"{plain} --steps 60", f"{EXAMPLES}/one_shot.py --out {tmp_path}/compressed")

    recovered = re.search(r"recovered step 25: .* checksum (\S+)", output)
    assert recovered is not None and f"step 25, checksum {recovered[1]}" in died
    assert "step 40 loss" in output

    assert checkpoints(tmp_path / "plain") == ["step-000020", "step-000040", "step-000060"]
    assert "step-000040 at step 40" in output

    assert dsq_ckpt.describe(tmp_path / "compressed" / "bounded")["bytes_kept"] > 0
    exported = torch.load(tmp_path / "compressed" / "exported.pt")
    original = torch.load(tmp_path / "compressed" / "model.pt")
    assert {name: value.shape for name, value in exported.items()} == {n: v.shape for n, v in original.items()}


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_programs_of_several_ranks(name: str, tmp_path: Path) -> None:
    """They resume on another number of ranks."""
    torchrun(name, 2, "--out", tmp_path, workers=EXAMPLES, timeout=280)
    output = torchrun(name, 1, "--out", tmp_path, "--steps", "60", workers=EXAMPLES, timeout=280)
    assert "step-000040 at step 40" in output
    assert checkpoints(tmp_path) == ["step-000020", "step-000040", "step-000060"]


@pytest.mark.slow
def test_deepspeed(tmp_path: Path) -> None:
    """By DeepSpeed's own launcher, and then by torchrun."""
    pytest.importorskip("deepspeed")
    launcher = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", str(free_port())]
    status, output = run(
        [*launcher, str(EXAMPLES / "deepspeed_zero.py"), "--out", str(tmp_path)], timeout=280, DS_ACCELERATOR="cpu"
    )
    assert status == 0, output[-4000:]
    output = torchrun(
        "deepspeed_zero", 2, "--out", tmp_path, "--steps", "60", workers=EXAMPLES, timeout=280, DS_ACCELERATOR="cpu"
    )
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
