"""The batches on which a search takes the metric: those it chooses by, and others that confirm the choice."""

from __future__ import annotations

from collections.abc import Callable
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


def agree(evaluate: Callable[[], float] | None, check: Callable[[], float] | None, comm: Communicator) -> None:
    """Make sure that all ranks have the same functions; collective.

    Raises:
        SaveFailed: on all ranks, if one has a function that another has not: it would wait for evaluations that the
            other never begins.
    """
    told = comm.gather((evaluate is not None, check is not None))
    for name, given in zip(("evaluate", "check"), zip(*told, strict=True), strict=True):
        if any(given) and not all(given):
            raise SaveFailed(
                f"rank {given.index(True)} was given a function `{name}`, and rank {given.index(False)} none; all "
                "ranks evaluate together: give it to all of them, or to none"
            )
