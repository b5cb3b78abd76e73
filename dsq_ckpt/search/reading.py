"""Whether a metric is read the right way round, by what it says of a ruined model.

An accuracy that is read as a loss makes degradation an improvement, so a search would store the coarsest configuration.
A model with random signs of its weights has lost all that it learned, and is no better than before if it has learned
nothing yet; so if it scores much better, lower is not better, or the model is worse than a random one.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsq_ckpt.config.schema import SearchConfig
from dsq_ckpt.core.notices import warn
from dsq_ckpt.search.folds import degradation

_CLEAR = 0.1
"""Relative difference of metrics that is no chance: models that have learned nothing differ by less."""


@dataclass
class Reading:
    """The direction of a metric, as far as it is known.

    Attributes:
        doubted: a ruined model scored better, which was said.
        settled: nothing more is asked.
        asked: the metric of the model when a ruined one was evaluated last; None: none was.
    """

    doubted: bool = False
    settled: bool = False
    asked: float | None = None

    def is_open(self, exact: float, search: SearchConfig) -> bool:
        """Return whether a ruined model may tell more than at the saves before: once the metric has moved."""
        if self.settled or search.higher_is_better:  # which somebody has thought of
            return False
        return self.asked is None or abs(exact - self.asked) > _CLEAR * abs(self.asked)

    def judge(self, name: str, exact: float, ruined: float, search: SearchConfig, rank: int) -> None:
        """Warn if the ruined model scores much better; settle that lower is better once training shows it too."""
        worse = degradation(ruined, exact, search)
        self.doubted = worse < -_CLEAR
        self.settled = self.doubted or (worse > _CLEAR and self.asked is not None and exact < self.asked)
        self.asked = exact
        if self.doubted:
            warn(
                f"`{name}` gave {exact:.6g} for the model and {ruined:.6g} for one with random signs of its weights, "
                "which is ruined and counts as better, since search.higher_is_better is false. For an accuracy, set "
                "search.higher_is_better: true; for a loss, the model is worse than a random one, as where training "
                "diverged or has not begun. Configurations that improve the metric by more than their bound are not "
                "taken", rank=rank
            )
