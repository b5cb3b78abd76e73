"""One-shot compression of trained and of shipped models: the size at a bound on the loss, by every system.

The search sees a third of the held-out batches, and where it has a `check` another third. The last third tells what the
compressed weights really cost.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsq_ckpt
from dsq_ckpt.errors import DSQError
from evaluation import create, names, shipped
from evaluation.report import Column, Row, digits, percent, ratio

MODELS = (*names(), *shipped.SHIPPED)
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


@dataclass(frozen=True)
class Trained:
    """A model at the end of its training.

    Attributes:
        run: name and seed of the workload.
        model: the model, in evaluation mode; its weights change with each compression.
        weights: its state dict as trained.
        seen: held-out batches that a search sees.
        confirming: others, for `check`.
        unseen: others, which tell what compressed weights really cost.
    """

    run: str
    model: nn.Module
    weights: dict[str, Tensor]
    seen: list[tuple[Tensor, Tensor]]
    confirming: list[tuple[Tensor, Tensor]]
    unseen: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, name: str, seed: int, report: Callable[[str], None]) -> Trained:
        """Train a workload to its end, or take weights as they are shipped."""
        if name in shipped.SHIPPED:
            report(f"{name}, sounds by seed {seed}")
            model, batches = shipped.load(name, seed)
            return cls.judged(f"{name}, seed {seed}", model, batches)
        workload = create(name, seed)
        report(f"{name}, seed {seed}: {workload.steps} steps")
        workload.train(0, workload.steps)
        return cls.judged(f"{name}, seed {seed}", workload.model.eval(), list(workload.held_out()))

    @classmethod
    def judged(cls, run: str, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> Trained:
        """Judge a model as it is by batches, of which each use sees a third."""
        weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
        return cls(run, model, weights, list(batches[::3]), list(batches[1::3]), list(batches[2::3]))

    def compressed(self, system: str, bound: float) -> tuple[Row, dict[str, Tensor]]:
        """Return the row of a system, one of `SYSTEMS`, at a bound, and the weights that its checkpoint gives back.

        Raises:
            DSQError: the system does not serve this model.
        """
        self.model.load_state_dict(self.weights)
        exact = _loss(self.model, self.unseen)
        with tempfile.TemporaryDirectory() as directory:
            path, started = Path(directory) / "compressed", time.perf_counter()
            result = dsq_ckpt.compress(
                self.model, path, config={"system": system.split(",")[0]},
                evaluate=lambda: _loss(self.model, self.seen),
                check=(lambda: _loss(self.model, self.confirming)) if system == CHECKED else None,
                max_degradation=bound, probes=0 if system == UNIFORM else PROBES,
            )
            seconds = time.perf_counter() - started
            read: dict[str, Any] = {key: torch.zeros_like(value) for key, value in self.weights.items()}
            dsq_ckpt.load(read, path)
        self.model.load_state_dict(read)
        quality = result["quality"]
        return {
            "run": self.run, "name": system, "bound": bound, "ratio": result["bytes_logical"] / result["bytes_kept"],
            "degradation": quality.get("degradation"), "satisfied": quality["satisfied"],
            "other": _loss(self.model, self.unseen) / exact - 1, "evaluations": quality["evaluations"],
            "seconds": seconds, "steps": quality.get("steps"),
        }, read


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
    trained = Trained.of(name, seed, report)
    for system in systems:
        try:
            row, _ = trained.compressed(system, bound)
        except DSQError as error:
            yield {"run": trained.run, "name": system, "bound": bound, "skipped": " ".join(str(error).split())}
            continue
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
