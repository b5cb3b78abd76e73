"""Folds of batches on which a search evaluates the metric: for the choice and for its confirmation; quality bounds."""

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
"""Relative improvement of the metric above which quantized weights are rejected as implausible."""


@dataclass
class Fold:
    """Fold of batches on which the metric is evaluated.

    Attributes:
        name: name of the user's function, `evaluate` or `check`.
        evaluate: returns the metric of the model in its current state.
        key: key of the metric in the record of a search.
        metric: metric of the model at the last checkpoint.
        is_checked: whether a search has checked that equal weights have equal metrics, and other weights do not.
    """

    name: str
    evaluate: Callable[[], float]
    key: str = "metric"
    metric: float | None = None
    is_checked: bool = False


def check_same_functions(
    evaluate: Callable[[], float] | None, check: Callable[[], float] | None, comm: Communicator, work: Callable[[], _T]
) -> list[_T]:
    """Check that all ranks have the same functions, after local work that must succeed on all of them; collective.

    Returns:
        The results of the work of all ranks, in rank order; they must be picklable.

    Raises:
        DSQError: on all ranks, if the work failed on one.
        SaveFailed: on all ranks, if one lacks a function of another, which would wait for its evaluations.
    """
    gathered = gather_from_all_ranks(comm, lambda: (work(), evaluate is not None, check is not None))
    results, *presence = zip(*gathered, strict=True)
    for name, present in zip(("evaluate", "check"), presence, strict=True):
        if any(present) and not all(present):
            raise SaveFailed(
                f"rank {present.index(True)} was given a function `{name}`, and rank {present.index(False)} none; all "
                "ranks evaluate together: give it to all of them, or to none"
            )
    return list(results)


def compute_degradation(metric: float, exact: float, search: SearchConfig) -> float:
    """Return the relative degradation of the metric: negative for an improvement, infinite if it is not finite."""
    if not math.isfinite(metric):
        return math.inf
    change = (exact - metric) if search.higher_is_better else (metric - exact)
    return change / max(abs(exact), 1e-30)


def keeps_bound(loss: float, bound: float, doubted: bool = False) -> bool:
    """Return whether a degradation keeps a bound and is plausible.

    If coarser weights have a much better metric, `higher_is_better` may be wrong.

    Args:
        loss: degradation.
        bound: largest degradation.
        doubted: the direction of the metric is in doubt, so an improvement must not exceed the bound either.
    """
    return -(min(bound, MAX_IMPROVEMENT) if doubted else MAX_IMPROVEMENT) <= loss <= bound
