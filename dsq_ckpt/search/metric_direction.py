"""Whether a metric is read the right way round, by what it says of a ruined model.

An accuracy that is read as a loss makes degradation an improvement, so a search would store the coarsest configuration.
A model with random signs of its weights has lost all that it learned, and is no better than before if it has learned
nothing yet; so if it scores much better, lower is not better, or the model is worse than a random one.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsq_ckpt.config.schema import SearchConfig
from dsq_ckpt.core.notices import warn
from dsq_ckpt.search.folds import compute_degradation

_MIN_DIFFERENCE = 0.1
"""Relative difference of metrics that is no chance: models that have learned nothing differ by less."""


@dataclass
class MetricDirection:
    """The direction of a metric, as far as it is known.

    Attributes:
        doubted: a ruined model scored better, which was said.
        settled: nothing more is asked.
        asked: the metric of the model when a ruined one was evaluated last; None: none was.
    """

    is_doubted: bool = False
    is_settled: bool = False
    checked_at: float | None = None

    def needs_check(self, exact: float, search: SearchConfig) -> bool:
        """Return whether a ruined model may tell more than at the saves before: once the metric has moved."""
        if self.is_settled or search.higher_is_better:  # which somebody has thought of
            return False
        return self.checked_at is None or abs(exact - self.checked_at) > _MIN_DIFFERENCE * abs(self.checked_at)

    def update(self, name: str, exact: float, ruined: float, search: SearchConfig, rank: int) -> None:
        """Warn if the ruined model scores much better; settle that lower is better once training shows it too."""
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
