"""What all restores of a run together may cost, stated once, and what those so far have cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsq_ckpt.config.schema import SearchConfig
from dsq_ckpt.storage.manifest import Manifest

_UNMEASURED = 1.0
"""Relative degradation that a restore counts as whose cost no search has measured: all that a run has."""


@dataclass(frozen=True)
class RunBudget:
    """Cost of the restores of a run so far.

    Attributes:
        lost: sum of the relative changes of the metric by these restores, in either direction.
        restores: their number.
    """

    lost: float = 0.0
    restores: int = 0

    @classmethod
    def after(cls, manifest: Manifest, refined: bool) -> RunBudget:
        """Return the budget of a run that was restored from a checkpoint.

        Args:
            manifest: of the checkpoint.
            refined: the load took the refinement layer, where there is one.
        """
        record = manifest.quality or {}
        lost = record.get("run_lost")
        if lost is None:  # a save without a search, or loads that no search was told of, if the run was restored before
            lost = _UNMEASURED if manifest.lossy_resumes else 0.0
        cost = 0.0
        if any(group.startswith("weights/") for group in manifest.groups):
            metric, loses = record.get("metric"), record.get("restore_loses")
            bases = [abs(record[key]) for key in ("degradation", "check_degradation") if record.get(key) is not None]
            metric = record.get("check_metric", metric)  # `restore_loses` is measured there
            cost = max(bases, default=_UNMEASURED)
            if refined and manifest.refinement == "kept" and metric and loses is not None:
                cost = abs(loses / metric)
        return cls(lost + cost, manifest.lossy_resumes + manifest.lossy)

    def allowed(self, search: SearchConfig, before: float | None, exact: float) -> float:
        """Return by how much a restore may change the metric, in its units.

        Args:
            search: the configuration.
            before: the metric at the checkpoint before, None where there is none.
            exact: the metric of the model that is saved.
        """
        gained = 0.0 if before is None else max(0.0, exact - before if search.higher_is_better else before - exact)
        allowed = max(search.max_progress_loss * gained, search.floor * abs(exact))
        return min(allowed, self.share(search) * abs(exact)) if search.max_run_loss is not None else allowed

    def share(self, search: SearchConfig) -> float:
        """Return the relative change of the metric that the next restore may cost: an equal share of what is left.

        Infinite where the configuration has no bound on the whole run.
        """
        if search.max_run_loss is None:
            return math.inf
        return max(0.0, search.max_run_loss - self.lost) / max(1, search.expected_restores - self.restores)
