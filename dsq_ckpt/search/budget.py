"""Budget of the loss by all restores of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsq_ckpt.config.schema import SearchConfig
from dsq_ckpt.storage.manifest import Manifest

_UNMEASURED_LOSS = 1.0
"""Relative degradation assumed for a restore whose loss no search has measured: the whole metric."""
_MAX_LOSS = 1e299
"""Largest sum of losses, of metrics that are nearly zero: manifests hold finite numbers."""


@dataclass(frozen=True)
class RunBudget:
    """Loss by the restores of a run so far.

    Attributes:
        lost: sum of the absolute relative changes of the metric by the restores.
        restores: number of restores.
    """

    lost: float = 0.0
    restores: int = 0

    @classmethod
    def from_manifest(cls, manifest: Manifest, refined: bool) -> RunBudget:
        """Return the budget of a run restored from a checkpoint.

        Args:
            manifest: manifest of the checkpoint.
            refined: whether the load used the refinement layer.
        """
        record = manifest.quality or {}
        run_loss = record.get("run_lost")
        if run_loss is None:  # saved without a search, or after restores without one
            run_loss = _UNMEASURED_LOSS if manifest.lossy_resumes else 0.0
        cost = 0.0
        if any(group.startswith("weights/") for group in manifest.groups):
            metric, loses = record.get("metric"), record.get("restore_loses")
            bases = [abs(record[key]) for key in ("degradation", "check_degradation") if record.get(key) is not None]
            metric = record.get("check_metric", metric)  # `restore_loses` is measured by `check`
            cost = max(bases, default=_UNMEASURED_LOSS)
            if refined and manifest.refinement == "kept" and metric and loses is not None:
                cost = abs(loses / metric)
        return cls(min(run_loss + cost, _MAX_LOSS), manifest.lossy_resumes + manifest.lossy)

    def get_allowed_change(self, search: SearchConfig, before: float | None, exact: float) -> float:
        """Return the allowed change of the metric by a restore, in units of the metric.

        Args:
            search: the configuration.
            before: metric at the previous checkpoint, None without one.
            exact: metric of the model being saved.
        """
        gained = 0.0 if before is None else max(0.0, exact - before if search.higher_is_better else before - exact)
        allowed = max(search.max_progress_loss * gained, search.floor * abs(exact))
        if search.max_run_loss is None:
            return allowed
        return min(allowed, self.get_remaining_share(search) * abs(exact))

    def get_remaining_share(self, search: SearchConfig) -> float:
        """Return the relative change of the metric allowed for the next restore: a share of the remaining budget.

        Infinite if the configuration does not bound the loss of the run.
        """
        if search.max_run_loss is None:
            return math.inf
        return max(0.0, search.max_run_loss - self.lost) / max(1, search.expected_restores - self.restores)
