"""The batches on which a search takes the metric, those it chooses by and others that confirm, and what it may cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dsq_ckpt.config.schema import SearchConfig
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import SaveFailed

_T = TypeVar("_T")
MAX_IMPROVEMENT = 0.2
"""Relative improvement that coarser weights are not believed to bring."""


@dataclass
class Fold:
    """Batches on which the metric is taken.

    Attributes:
        name: of the argument that gives it, `evaluate` or `check`.
        evaluate: gives the metric of the model as it is.
        key: of the metric in the record of a search.
        metric: of the model at the last checkpoint.
        sound: a search has asked whether the same weights get the same metric, and others another.
    """

    name: str
    evaluate: Callable[[], float]
    key: str = "metric"
    metric: float | None = None
    is_checked: bool = False


def check_same_functions(
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


def compute_degradation(metric: float, exact: float, search: SearchConfig) -> float:
    """Return the relative loss of quality, negative for an improvement; infinite if the metric is not finite."""
    if not math.isfinite(metric):
        return math.inf
    change = (exact - metric) if search.higher_is_better else (metric - exact)
    return change / max(abs(exact), 1e-30)


def keeps_bound(found: float, bound: float, doubted: bool = False) -> bool:
    """Return whether a degradation keeps to a bound, and is believed.

    Coarser weights that score much better may show that the metric is read the wrong way, and would ruin the history.

    Args:
        found: degradation.
        bound: of the degradation.
        doubted: the metric may be read the wrong way, so an improvement keeps to the bound too.
    """
    return -(min(bound, MAX_IMPROVEMENT) if doubted else MAX_IMPROVEMENT) <= found <= bound
