"""LowDiff and LowDiff+ of this package, as systems to be compared."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dsq_ckpt.lowdiff as lowdiff
from dsq_ckpt.lowdiff.tuning import Tuner
from dsq_ckpt.storage.manifest import iter_checkpoints
from evaluation.lowdiff.durable import bytes_below
from evaluation.lowdiff.idle import wait_until_idle


class _Ours:
    """What the two have in common.

    Args:
        directory: The run's.
        core: CPU of the checkpointing process.
        options: Of the log, or of the replica.
    """

    def __init__(self, directory: Path, core: int | None, options: dict[str, Any]) -> None:
        self._directory = directory
        self._options = {"cores": None if core is None else [core], **options}
        self._seen: dict[int, int] = {}
        self._found: Any = None
        self._made: Any = None

    @property
    def bytes_written(self) -> int:
        """By files that are there now, or were when this was asked before; others are missing."""
        self._look()
        return sum(self._seen.values())

    @property
    def bytes_stored(self) -> int:
        return bytes_below(self._directory)

    @property
    def spent(self) -> float:
        """See `loop.TellsTime`."""
        return float(self._made.spent)

    def after_step(self, step: int) -> None:
        """End the iteration."""
        self._made.step()

    def wait(self) -> None:
        """Wait until the checkpointing process has nothing to do; logged steps that wait for their batch stay there."""
        wait_until_idle()
        self._look()

    def finish(self) -> None:
        """Close the log: all steps are written, and the process ends."""
        self._look()
        self._made.close()

    def recover(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Recover the newest state."""
        self._found = lowdiff.recover(self._directory, model, optimizer)
        return 0 if self._found is None else int(self._found.step)

    def _look(self) -> None:
        for path in self._directory.rglob("*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if path.is_file():
                self._seen[stat.st_ino] = stat.st_size


class LowDiff(_Ours):
    """`dsq_ckpt.lowdiff.GradientLog`.

    Args:
        directory: Its run directory.
        core: CPU of the checkpointing process.
        compressor: Of the gradients.
        options: Of the log: snapshot_every, batch, mtbf and so on.
    """

    def __init__(self, directory: Path, core: int | None = None, compressor: str = "none", **options: Any) -> None:
        super().__init__(directory, core, {"compressor": compressor, **options})

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Begin the log, with its first snapshot."""
        self._made = lowdiff.GradientLog(self._directory, model, optimizer, resume=self._found, **self._options)
        self.wait()

    def costs(self) -> dict[str, Any] | None:
        """Return the measurements of the recovered log: fields of `tuning.Costs`."""
        if self._found is None or self._found.tuner is None:
            return None
        costs = Tuner.from_state(self._found.tuner).costs()
        return None if costs is None else asdict(costs)

    @property
    def batch(self) -> int:
        """Steps that are written at once, now."""
        return int(self._made.batch)

    @property
    def snapshot_every(self) -> int:
        """Steps between snapshots, now."""
        return int(self._made.snapshot_every)


class LowDiffPlus(_Ours):
    """`dsq_ckpt.lowdiff.Replica`.

    Args:
        directory: Its run directory.
        core: CPU of the checkpointing process.
        options: Of the replica.
    """

    def __init__(self, directory: Path, core: int | None = None, **options: Any) -> None:
        super().__init__(directory, core, options)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Begin the replica."""
        self._made = lowdiff.Replica(self._directory, model, optimizer, resume=self._found, **self._options)
        self.wait()

    @property
    def persisted(self) -> int:
        """Step of the newest state on disk."""
        names = (path.name for path, _ in iter_checkpoints(self._directory))
        return max((int(name.rpartition("-")[2]) for name in names), default=0)
