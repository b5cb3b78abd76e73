"""The batches on which a search takes the metric: those it chooses by, and others that confirm the choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import SaveFailed

_T = TypeVar("_T")


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


def agree(
    evaluate: Callable[[], float] | None, check: Callable[[], float] | None, comm: Communicator, work: Callable[[], _T]
) -> _T:
    """Make sure that all ranks have the same functions, after local work that all must succeed in; collective.

    Returns:
        The result of the work.

    Raises:
        DSQError: on all ranks, if one failed in its work.
        SaveFailed: on all ranks, if one has a function that another has not: it would wait for evaluations that the
            other never begins.
    """
    results: list[_T] = []

    def worked() -> tuple[bool, bool]:
        results.append(work())
        return evaluate is not None, check is not None

    gathered = gather_from_all_ranks(comm, worked)
    for name, given in zip(("evaluate", "check"), zip(*gathered, strict=True), strict=True):
        if any(given) and not all(given):
            raise SaveFailed(
                f"rank {given.index(True)} was given a function `{name}`, and rank {given.index(False)} none; all "
                "ranks evaluate together: give it to all of them, or to none"
            )
    return results[0]
