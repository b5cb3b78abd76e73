"""The batches on which a search takes the metric: those it chooses by, and others that confirm the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsq_ckpt.comm import Communicator
from dsq_ckpt.errors import SaveFailed


@dataclass
class Fold:
    """Batches on which the metric is taken.

    Attributes:
        name: of the argument that gives it, `evaluate` or `check`.
        evaluate: gives the metric of the model as it is.
        key: of the metric in the record of a search.
        metric: of the model at the last checkpoint.
        sound: a search has seen that the same weights get the same metric, and others another.
    """

    name: str
    evaluate: Callable[[], float]
    key: str = "metric"
    metric: float | None = None
    sound: bool = False


def agree(folds: Sequence[Fold], comm: Communicator) -> None:
    """Make sure that all ranks have the same folds; collective.

    Raises:
        SaveFailed: on all ranks, if only some have a `check`: they would wait for evaluations that others never begin.
    """
    told = comm.gather(len(folds))
    if min(told) < max(told):
        raise SaveFailed(
            f"rank {told.index(max(told))} was given a `check`, and rank {told.index(min(told))} none; all ranks "
            "evaluate together: give it to all of them, or to none"
        )
