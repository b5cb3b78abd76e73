"""DeepSpeed's workers as process groups."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.processes import run, torchrun

WORKERS = Path(__file__).parent / "workers"
ON_CPU = {"DS_ACCELERATOR": "cpu"}


def ranks(worker: str, count: int, *arguments: object, timeout: float = 280) -> str:
    """Run a worker on so many ranks; its output. The first of all builds an extension of DeepSpeed, in a minute."""
    return torchrun(worker, count, *arguments, timeout=timeout, workers=WORKERS, **ON_CPU)


def python(*arguments: object, timeout: float = 120) -> str:
    """Run a Python program, which must succeed; its output."""
    status, output = run(list(map(str, arguments)), timeout, **ON_CPU)
    assert status == 0, output[-4000:]
    return output
