"""Subprocesses of tests: whole process groups, each with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "tests" / "dcp" / "workers"


def start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    """A Python process in a process group of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, *arguments], env=env, cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(arguments: list[str], timeout: float, **environment: str) -> tuple[int, str]:
    """Run to the end; returns status and output.

    Raises:
        AssertionError: it took longer than `timeout` seconds.
    """
    process = start(arguments, **environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"{arguments} took longer than {timeout} s:\n{output[-6000:]}") from None
    finally:
        kill(process)
    return process.returncode, output


def torchrun(worker: str, ranks: int, *arguments: object, timeout: float = 120, dies: bool = False) -> str:
    """Run `workers/<worker>.py` on `ranks` ranks; its output, once all of them succeeded, or one was to die."""
    status, output = run(
        [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0",
            str(WORKERS / f"{worker}.py"), *map(str, arguments),
        ],
        timeout,
    )
    assert (status != 0) == dies, f"{worker} on {ranks} rank(s) ended with {status}:\n{output[-8000:]}"
    return output
