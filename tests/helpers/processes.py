"""Subprocesses of tests: whole process groups, each with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers import forks

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ROOT / "tests" / "dcp" / "workers"
PATIENCE = 900.0
"""Seconds after which a process counts as hanging, also on a busy machine."""
# Open MPI wants to be asked before it runs as root, or more ranks than there are cores. MPICH sleeps while it
# waits for other ranks; by default it calls `sched_yield` in a loop, a third of the processor time of ranks.
_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
}


def make_environment(more: dict[str, str]) -> dict[str, str]:
    """Return the variables of a process that is given some more."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def start(
    arguments: list[str], launcher: list[str] | None = None, directory: Path = ROOT,
    python: str | Path = sys.executable, **environment: str
) -> subprocess.Popen[str]:
    """A Python process in a process group of its own, or what a launcher makes of it."""
    return subprocess.Popen(
        [*(launcher or []), str(python), *arguments], env=make_environment(environment), cwd=directory, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )


def kill(process: subprocess.Popen[str] | forks.Fork) -> None:
    """Kill the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(
    arguments: list[str], timeout: float = PATIENCE, launcher: list[str] | None = None, forked: bool = False,
    directory: Path = ROOT, python: str | Path = sys.executable, **environment: str,
) -> tuple[int, str]:
    """Run to the end; returns status and output.

    Args:
        arguments: of Python.
        timeout: in seconds.
        launcher: what starts Python.
        forked: it need not import torch itself, see `forks`.
        directory: where it works.
        python: the interpreter, which a launcher starts.
        environment: variables to add.

    Raises:
        AssertionError: it took longer than `timeout` seconds.
    """
    if forked and forks.VARIABLE in os.environ:
        return _run_forked(arguments, timeout, make_environment(environment), directory)
    process = start(arguments, launcher, directory, python, **environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"{arguments} took longer than {timeout} s:\n{output[-6000:]}") from None
    finally:
        kill(process)
    return process.returncode, output


def run_apart(arguments: list[str], directory: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run to the end as a fork, see `forks`; stdout and stderr are apart."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        whole = make_environment(environment)
        process = forks.start(arguments, whole, directory, output.fileno(), errors=errors.fileno())
        try:
            process.wait(PATIENCE)
        finally:
            kill(process)
        output.seek(0)
        errors.seek(0)
        assert process.returncode is not None
        return subprocess.CompletedProcess(arguments, process.returncode, output.read(), errors.read())


def _run_forked(
    arguments: list[str], timeout: float, environment: dict[str, str], directory: Path
) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = forks.start(arguments, environment, directory, output.fileno())
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            output.seek(0)
            raise AssertionError(f"{arguments} took longer than {timeout} s:\n{output.read()[-6000:]}") from None
        finally:
            kill(process)
        output.seek(0)
        assert process.returncode is not None
        return process.returncode, output.read()


def torchrun(
    worker: str, ranks: int, *arguments: object, dies: bool = False, workers: Path = WORKERS, **environment: str
) -> str:
    """Run `workers/<worker>.py` on `ranks` ranks; its output, once all of them succeeded, or one was to die."""
    status, output = run(
        [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0",
            str(workers / f"{worker}.py"), *map(str, arguments),
        ],
        forked=True, **environment,
    )
    assert (status != 0) == dies, f"{worker} on {ranks} rank(s) ended with {status}:\n{output[-8000:]}"
    return output


def mpirun(ranks: int, *arguments: object, fails: bool = False, python: str | Path = sys.executable) -> str:
    """Run Python under MPI, with the `mpirun` that was installed beside it; its output, once it ended as expected."""
    launcher = [str(Path(sys.prefix) / "bin" / "mpirun"), "-n", str(ranks)]
    status, output = run([*map(str, arguments)], launcher=launcher, python=python, **_MPI)
    assert (status != 0) == fails, f"{arguments} on {ranks} rank(s) ended with {status}:\n{output[-8000:]}"
    return output
