"""Subprocesses of tests: whole process groups, each with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ROOT / "tests" / "dcp" / "workers"
# Open MPI wants to be asked before it runs as root, or more ranks than there are cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def start(
    arguments: list[str], launcher: list[str] | None = None, **environment: str
) -> subprocess.Popen[str]:
    """A Python process in a process group of its own, or what a launcher makes of it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [*(launcher or []), sys.executable, *arguments], env=env, cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(
    arguments: list[str], timeout: float, launcher: list[str] | None = None, **environment: str
) -> tuple[int, str]:
    """Run to the end; returns status and output.

    Raises:
        AssertionError: it took longer than `timeout` seconds.
    """
    process = start(arguments, launcher, **environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"{arguments} took longer than {timeout} s:\n{output[-6000:]}") from None
    finally:
        kill(process)
    return process.returncode, output


def torchrun(
    worker: str, ranks: int, *arguments: object, timeout: float = 120, dies: bool = False, workers: Path = WORKERS,
    **environment: str,
) -> str:
    """Run `workers/<worker>.py` on `ranks` ranks; its output, once all of them succeeded, or one was to die."""
    status, output = run(
        [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0",
            str(workers / f"{worker}.py"), *map(str, arguments),
        ],
        timeout, **environment,
    )
    assert (status != 0) == dies, f"{worker} on {ranks} rank(s) ended with {status}:\n{output[-8000:]}"
    return output


def mpirun(ranks: int, *arguments: object, timeout: float = 120, fails: bool = False) -> str:
    """Run Python under MPI, with the `mpirun` that was installed beside it; its output, once it ended as expected."""
    launcher = [str(Path(sys.prefix) / "bin" / "mpirun"), "-n", str(ranks)]
    status, output = run([*map(str, arguments)], timeout, launcher, **_OPEN_MPI)
    assert (status != 0) == fails, f"{arguments} on {ranks} rank(s) ended with {status}:\n{output[-8000:]}"
    return output
