"""Recorded runs: a workload trained once without failures, with an exact checkpoint at every turn.

A recording is a directory of `step-XXXXXX.pt` (torch.save) and a `record.json` that is written last: a recording
without it is not complete. Checkpoints of one workload and seed are bit-identical on one machine, so a complete
recording is reused.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from dsq_ckpt.cli import json_files
from dsq_ckpt.storage.atomic_io import AtomicFile
from evaluation.workloads import Workload, cache_directory, create

INFO_FILE = "record.json"
FORMAT = 1
"""Part of the settings: recordings of another format are made anew."""
GRADIENT_BATCHES = 50
GRADIENT_WEIGHT = 0.9
"""Weight of the newest gradient in the average that sensitivity is told from."""


class Checkpoint(TypedDict):
    """What one `step-XXXXXX.pt` holds: the run after `step` steps."""

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    gradient: dict[str, Tensor]
    """By parameter name; zeros at step 0, which no batch comes before."""
    loss: float
    accuracy: float


class Recording(NamedTuple):
    """A complete recording: its checkpoints in the order of steps, read one by one, and its `record.json`."""

    checkpoints: Iterator[Checkpoint]
    info: dict[str, Any]


class GradientAverage:
    """Exponential moving average of gradients, as a callback for `Workload.train`."""

    def __init__(self, workload: Workload) -> None:
        self._parameters = dict(workload.model.named_parameters())
        self.values = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}

    def __call__(self) -> None:
        """Take in the gradients of this step."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.values[name].mul_(1 - GRADIENT_WEIGHT).add_(parameter.grad, alpha=GRADIENT_WEIGHT)


def default_directory(name: str, seed: int) -> Path:
    """Return where the recording of a workload is kept if nothing else is said."""
    return cache_directory() / "runs" / f"{name}-seed{seed}"


def record(
    name: str, seed: int = 0, directory: Path | None = None, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Train a workload and keep its checkpoints, unless that has been done.

    Args:
        name: Name of the workload.
        seed: Seed of its weights and batches.
        directory: Where to, `default_directory` if None. `step-*.pt` of other runs in it are deleted.
        report: Called with a line about every checkpoint.

    Returns:
        The directory.
    """
    directory = directory or default_directory(name, seed)
    with one_thread():
        workload = create(name, seed)
        settings = workload.settings() | {
            "format": FORMAT, "gradient_batches": GRADIENT_BATCHES, "gradient_weight": GRADIENT_WEIGHT,
        }
        if _is_complete(directory, settings):
            report(f"{directory} is complete")
            return directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / INFO_FILE).unlink(missing_ok=True)
        rows = list(_train(workload, directory, report))
    for stale in set(directory.glob("step-*.pt")) - {directory / row["file"] for row in rows}:
        stale.unlink()
    info = {
        "settings": settings, "checkpoints": rows,
        "seconds_per_step": sum(row["seconds"] for row in rows) / workload.steps,
        "torch": torch.__version__, "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(), "date": time.strftime("%Y-%m-%d"),
    }
    json_files.write(directory / INFO_FILE, info)
    return directory


def load_recording(directory: Path) -> Recording:
    """Open a complete recording.

    Raises:
        FileNotFoundError: It is not complete.
    """
    if not (directory / INFO_FILE).is_file():
        raise FileNotFoundError(f"{directory} holds no complete recording: run scripts/evaluate.py record")
    info = json.loads((directory / INFO_FILE).read_text())
    files = [directory / row["file"] for row in info["checkpoints"]]
    return Recording((torch.load(file, weights_only=True) for file in files), info)


def _train(workload: Workload, directory: Path, report: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Train from start to end, write every checkpoint and yield what `record.json` says about it."""
    for step in range(0, workload.steps + 1, workload.checkpoint_every):
        gradient = GradientAverage(workload)
        started = time.perf_counter()
        if step:
            first = step - workload.checkpoint_every
            watched = max(first, step - GRADIENT_BATCHES)
            workload.train(first, watched)
            workload.train(watched, step, after_backward=gradient)
        seconds = time.perf_counter() - started
        loss, accuracy = workload.evaluate(), workload.accuracy()
        checkpoint = {
            "step": step, **workload.state(), "gradient": gradient.values, "loss": loss, "accuracy": accuracy,
        }
        file = f"step-{step:06d}.pt"
        with AtomicFile(directory / file, fsync=False) as new:
            torch.save(checkpoint, new.stream)
            new.publish()
        report(f"{workload.name} step {step}: loss {loss:.4f}, accuracy {accuracy:.4f}, {seconds:.1f} s")
        yield {"step": step, "file": file, "loss": loss, "accuracy": accuracy, "seconds": seconds}


def _is_complete(directory: Path, settings: dict[str, Any]) -> bool:
    try:
        info = json.loads((directory / INFO_FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return info["settings"] == settings and all((directory / row["file"]).is_file() for row in info["checkpoints"])


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread, since sums over several threads differ in bits between machines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
