"""The result of a recovery, from which a log goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsq_ckpt.errors import ConfigError


@dataclass
class Recovered:
    """The result of `recover`.

    Attributes:
        step: optimizer steps done in the recovered state.
        snapshot: optimizer steps done at the snapshot from which replay started.
        path: path of the snapshot, or of the run if the state came from memory.
        lossy: True if the snapshot is lossy, so that the state approximates that of training.
        closed: True if the log was closed, so that there was no failure.
        from_memory: True if the state came from a surviving process.
        ended: reason for the end of the log if part of the log is missing or damaged; None if the log is intact.
        left_out: with `partial`, logged parts that could not be restored.
        feedback_lost: with `partial`, True if the residuals of error feedback could not be restored.
        seconds: durations of loading the snapshot and of the replay.
        compressor: spec of the log's compressor.
        residual: residuals of error feedback on this rank at the snapshot, by parameter; None if it has none.
        sent: int64 indices of the elements sent since the snapshot, by parameter; None for all elements.
        tuner: state of the log's tuner; None if it has none.
        merged: True if steps were merged, so that the state equals a replay up to rounding.
        sessions: sessions of the snapshots that the run had.
        inexact: reason why the replayed steps are others than those of training; None if there is none.
    """

    step: int
    snapshot: int
    path: Path
    lossy: bool
    closed: bool
    from_memory: bool
    ended: str | None
    left_out: list[str]
    feedback_lost: bool
    seconds: tuple[float, float]
    compressor: str
    residual: dict[str, torch.Tensor] | None = field(default=None, repr=False)
    sent: dict[str, torch.Tensor | None] = field(default_factory=dict, repr=False)
    tuner: dict[str, Any] | None = field(default=None, repr=False)
    merged: bool = False
    sessions: frozenset[str] = frozenset()
    inexact: str | None = None

    @property
    def replayed(self) -> int:
        """Number of replayed steps."""
        return self.step - self.snapshot

    @property
    def exact(self) -> bool:
        """True if model, optimizer and states are bit for bit those after `step` steps of the run."""
        return not (self.lossy or self.left_out or self.merged or self.inexact)

    @property
    def continues_exactly(self) -> bool:
        """True if training continues exactly as it would have without the failure.

        With error feedback this requires that no steps were replayed: residuals are restored from the snapshot, without
        the elements sent since.
        """
        return self.exact and not self.feedback_lost and (self.replayed == 0 or self.residual is None)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the residuals of the snapshot, with zeros for elements sent since."""
        residuals = {name: tensor.clone() for name, tensor in (self.residual or {}).items()}
        for name, indices in self.sent.items():
            if name in residuals:
                residuals[name].view(-1)[slice(None) if indices is None else indices] = 0
        return residuals


def check_resume(resume: Any) -> Recovered | None:
    """Return `resume`, after a check of its type.

    Raises:
        ConfigError: `resume` is neither None nor a `Recovered`.
    """
    if resume is None or isinstance(resume, Recovered):
        return resume
    raise ConfigError(f"resume is {resume!r}; expected what dsq_ckpt.lowdiff.recover() returned, or None")
