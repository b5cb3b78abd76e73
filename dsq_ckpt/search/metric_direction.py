"""Check of the direction of a metric (`higher_is_better`) by a ruined model.

If an accuracy is taken for a loss, degradation counts as improvement, and a search would store the coarsest
configuration. A model with random signs of its weights has lost what it has learned, and an untrained model does not
improve by them. So if its metric is much better, lower is not better, or the model is worse than a random one.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsq_ckpt.config.schema import SearchConfig
from dsq_ckpt.core.notices import warn
from dsq_ckpt.search.folds import compute_degradation

_MIN_DIFFERENCE = 0.1
"""Relative difference of metrics that is significant: untrained models differ by less."""


@dataclass
class MetricDirection:
    """Direction of a metric, as far as it is known.

    Attributes:
        is_doubted: a ruined model had a better metric, which was warned of.
        is_settled: no further checks are needed.
        checked_at: metric of the model at the last check; None before the first.
    """

    is_doubted: bool = False
    is_settled: bool = False
    checked_at: float | None = None

    def needs_check(self, exact: float, search: SearchConfig) -> bool:
        """Return whether to evaluate a ruined model: at first, and then after the metric has changed."""
        if self.is_settled or search.higher_is_better:  # which a user has set explicitly
            return False
        return self.checked_at is None or abs(exact - self.checked_at) > _MIN_DIFFERENCE * abs(self.checked_at)

    def update(self, name: str, exact: float, ruined: float, search: SearchConfig, rank: int) -> None:
        """Warn if the ruined model's metric is much better. Settle the direction once training confirms it, too."""
        worse = compute_degradation(ruined, exact, search)
        self.is_doubted = worse < -_MIN_DIFFERENCE
        improved = self.checked_at is not None and exact < self.checked_at
        self.is_settled = self.is_doubted or (worse > _MIN_DIFFERENCE and improved)
        self.checked_at = exact
        if self.is_doubted:
            warn(
                f"`{name}` gave {exact:.6g} for the model and {ruined:.6g} for one with random signs of its weights, "
                "which is ruined and counts as better, since search.higher_is_better is false. For an accuracy, set "
                "search.higher_is_better: true; for a loss, the model is worse than a random one, as where training "
                "diverged or has not begun. Configurations that improve the metric by more than their bound are not "
                "taken", rank=rank
            )
