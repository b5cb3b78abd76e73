"""One-shot compression of trained models: the size at a bound on the loss, by every system and by `dsq` without probes.

The search sees a third of the held-out batches, and where it has a `check` another third. The last third tells what the
compressed weights really cost.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsq_ckpt
from dsq_ckpt.errors import DSQError
from evaluation import create
from evaluation.report import Column, Row, digits, percent, ratio

PROBES = 64
UNIFORM = "dsq, one step"
"""The default system without probes."""
CHECKED = "dsq, check"
"""With another third of the batches as `check`."""
SYSTEMS = ("dsq", CHECKED, UNIFORM, "inshrinkerator", "uniform", "adaptive", "kmeans")
COLUMNS = (
    Column("<model", "run"), Column("<system", "name"), Column("ratio", "ratio", ratio),
    Column("degradation", "degradation", percent), Column("on other batches", "other", percent),
    Column("evaluations", "evaluations", digits(0)), Column("seconds", "seconds", digits(1)),
)
NOTES = """\
ratio: bytes of the model's state dict over those of all files; degradation: relative rise of the loss on the batches
that the search saw"""


def compare(
    name: str, seed: int, bound: float, systems: Sequence[str], report: Callable[[str], None]
) -> Iterator[Row]:
    """Train a workload to its end, and compress it with every system.

    Args:
        name: of the workload.
        seed: of its weights and batches.
        bound: relative degradation allowed.
        systems: of `SYSTEMS`.
        report: called with progress, line by line.

    Yields:
        One row per system.
    """
    workload = create(name, seed)
    report(f"{name}, seed {seed}: {workload.steps} steps")
    workload.train(0, workload.steps)
    model = workload.model.eval()
    batches = list(workload.held_out())
    seen, confirming, unseen = batches[::3], batches[1::3], batches[2::3]
    trained = {key: value.detach().clone() for key, value in model.state_dict().items()}
    exact = _loss(model, unseen)
    for system in systems:
        model.load_state_dict(trained)
        row: Row = {"run": f"{name}, seed {seed}", "name": system, "bound": bound}
        with tempfile.TemporaryDirectory() as directory:
            path, started = Path(directory) / "compressed", time.perf_counter()
            try:
                found = dsq_ckpt.compress(
                    model, path, config={"system": system.split(",")[0]}, evaluate=lambda: _loss(model, seen),
                    check=(lambda: _loss(model, confirming)) if system == CHECKED else None, max_degradation=bound,
                    probes=0 if system == UNIFORM else PROBES,
                )
            except DSQError as error:
                yield row | {"skipped": " ".join(str(error).split())}
                continue
            seconds = time.perf_counter() - started
            read: dict[str, Any] = {key: torch.zeros_like(value) for key, value in trained.items()}
            dsq_ckpt.load(read, path)
        model.load_state_dict(read)
        quality = found["quality"]
        row |= {
            "ratio": found["bytes_logical"] / found["bytes_kept"], "degradation": quality.get("degradation"),
            "satisfied": quality["satisfied"], "other": _loss(model, unseen) / exact - 1,
            "evaluations": quality["evaluations"], "seconds": seconds, "steps": quality.get("steps"),
        }
        report(f"  {system}: {row['ratio']:.1f}x, {row['other']:+.2%} on other batches")
        yield row


@torch.no_grad()
def _loss(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the mean cross entropy over batches."""
    total, count = 0.0, 0
    for inputs, targets in batches:
        logits = model(inputs)
        total += float(nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum"))
        count += targets.numel()
    return total / count
