"""Peers whose packages cannot share our environment: one of their own, and a process in it that does the work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from evaluation.workloads import cache_directory

VARIABLE = "DSQ_PEERS_PYTHON"
PACKAGES = ("nncodec==2.1.3", "zipnn==0.5.4", "safetensors")
"""NNCodec needs NumPy 1; ZipNN imports safetensors."""
READY = ".ready"


class PeerMissingError(RuntimeError):
    """A peer's packages are not here and could not be installed; the message says what to do."""


def find() -> Path | None:
    """Return the interpreter that has the packages, without installing anything; None if there is none.

    Raises:
        PeerMissingError: The environment variable names no file.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise PeerMissingError(f"{VARIABLE} is {named}, which is no file: name the python of an environment")
        return Path(named)
    return _interpreter() if (_directory() / READY).is_file() else None


def install(report: Any = print) -> Path:
    """Return the interpreter that has the packages; makes its environment in the user's cache on first use.

    Raises:
        PeerMissingError: That is not possible here.
    """
    if (known := find()) is not None:
        return known
    directory = _directory()
    report(f"installing {', '.join(PACKAGES)} into {directory}")
    shutil.rmtree(directory, ignore_errors=True)  # what was interrupted
    for command in (
        [sys.executable, "-m", "venv", str(directory)],
        [str(_interpreter()), "-m", "pip", "install", "--quiet", *PACKAGES],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = " ".join(done.stderr.strip().splitlines()[-2:]) or f"it ended with {done.returncode}"
            raise PeerMissingError(
                f"the packages of peers cannot be installed: {last}. Install {', '.join(PACKAGES)} into an environment "
                f"and name its python in {VARIABLE}, or leave out nncodec and zipnn by --peers"
            )
    (directory / READY).touch()
    return _interpreter()


class Worker:
    """A process in that environment; one request at a time, files carry the data."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("worker.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def __call__(self, **request: Any) -> float:
        """Send a request and return the seconds that it took in the process.

        Raises:
            PeerMissingError: The process ended, or could not do it; the message has its error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"its process ended with {self._process.wait()}"}
        if "error" in answer:
            raise PeerMissingError(f"{request['codec']}, {request['do']}: {answer['error']}")
        return float(answer["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _directory() -> Path:
    return cache_directory() / "peers"


def _interpreter() -> Path:
    return _directory() / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
