"""Evaluation of the metric under the configurations of a search, on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dsq_ckpt.core import figures
from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.distributed.comm import FailedElsewhere, gather_from_all_ranks
from dsq_ckpt.errors import SaveFailed, described
from dsq_ckpt.quantization.analysis import Analysis
from dsq_ckpt.search.candidates import SaveSearch
from dsq_ckpt.search.folds import Fold
from dsq_ckpt.search.trial import EvaluationRaised, ModelChanged, Probe

_MIN_VISIBLE_DISTORTION = 0.1  # relative squared error of weights that any metric must notice
_MAX_METRIC = 1e299  # differences of metrics stay below 1e300, beyond which manifests refuse numbers


class EvaluationFailed(Exception):
    """`evaluate` or `check` raised an error or returned no finite number, on any rank."""


def measure_metrics(
    save: SaveSearch, fold: Fold, trials: Sequence[Analysis | Probe | None], refined: bool = False
) -> list[float]:
    """Return the metrics of configurations: by all ranks together or, with `parallel_trials`, distributed over ranks.

    Args:
        save: search of one save.
        fold: batches to evaluate on.
        trials: fits of each configuration, or probes; None: the unquantized model.
        refined: evaluate with the refinement layer of the fits. False: the base layer.

    Returns:
        A metric for each trial; not a number if it is infinite or too large for a manifest.

    Raises:
        EvaluationFailed: on all ranks.
        SaveFailed: on all ranks, if the function changed the model.
    """
    parallel, comm = save.config.search.parallel_trials and len(trials) > 1, save.comm
    own_trials = [i for i in range(len(trials)) if not parallel or i % comm.size == comm.rank]
    own_metrics: dict[int, float] = {}
    failure: str | None = None
    changed: ModelChanged | None = None
    stopped: BaseException | None = None
    try:
        for index in own_trials:
            own_metrics[index] = save.model.evaluate(fold.evaluate, trials[index], refined, fold.name)
            run_pending_handlers()
    except ModelChanged as error:
        changed = error
    except EvaluationRaised as error:
        failure = str(error)
    except BaseException as error:  # an interrupt or an internal error ends the save on all ranks
        stopped = error
    save.evaluations[fold.name] += -(-len(trials) // comm.size) if parallel else len(trials)
    texts = failure, None if changed is None else str(changed), None if stopped is None else described(stopped)
    status = own_metrics, *texts
    gathered = gather_from_all_ranks(comm, lambda: status)
    if stopped is not None:
        raise stopped
    for rank, (*_, text) in enumerate(gathered):
        if text is not None:
            raise FailedElsewhere(f"rank {rank} failed: {text}")
    for rank, (_, _, text, _) in enumerate(gathered):
        if text is not None:
            raise SaveFailed(f"rank {rank}: {text}") from changed  # of this rank, with its cause
    failures = [text for _, text, *_ in gathered if text is not None]
    if failures:
        raise EvaluationFailed(failures[0])
    metrics = []
    for index, trial in enumerate(trials):
        values = [values[index] for values, *_ in gathered if index in values]
        mean = sum(values) / len(values)
        if not abs(mean) < _MAX_METRIC:  # not a number, too
            if trial is None or trial is Probe.AGAIN:
                again = "" if trial is None else " when asked again"
                raise EvaluationFailed(
                    f"`{fold.name}` gave {mean} for the model as it is{again}, before any compression; it must return "
                    f"a finite number, of less than {_MAX_METRIC:g}"
                )
            mean = math.nan
        metrics.append(mean)
    return metrics


def check_noise(save: SaveSearch, fold: Fold, bound: float, record: dict[str, Any]) -> None:
    """Warn if the metric of the same model changes by more than a relative bound with other random numbers."""
    exact = save.metrics[fold.name]
    second = measure_metrics(save, fold, [Probe.AGAIN])[0]
    noise = min(abs(second - exact) / max(abs(exact), 1e-30), _MAX_METRIC)
    if noise:
        record["noise"] = max(noise, record.get("noise", 0.0))
    if noise > bound:
        save.warn(
            f"`{fold.name}` is not deterministic: of the same weights it gave {exact:.6g}, and {second:.6g} when asked "
            f"again. That differs by {figures.percent(noise)}, and a bound of this search is {figures.percent(bound)}, "
            "which is then kept by chance: evaluate on the same batches in each call, without dropout (model.eval())"
        )


def measure_ruined_model(save: SaveSearch, fold: Fold) -> float:
    """Return the metric of the model with random signs of its weights; infinite if its evaluation fails.

    Raises:
        EvaluationFailed: on all ranks, if neither these weights nor the coarsest candidate change the metric.
    """
    exact = save.metrics[fold.name]
    try:
        ruined = measure_metrics(save, fold, [Probe.RUINED])[0]
    except EvaluationFailed:  # for example, weights must be positive; no checkpoint restores such a model
        return math.inf
    if ruined == exact:  # possible for the accuracy of an untrained model
        coarsest = max(
            (save.get_candidate(point, 0) for point in save.space.points() if math.isfinite(save.get_size(point, 0))),
            key=save.compute_distortion,
        )
        visible = save.compute_distortion(coarsest) > _MIN_VISIBLE_DISTORTION
        if visible and measure_metrics(save, fold, [coarsest.analysis])[0] == exact:
            raise EvaluationFailed(
                f"`{fold.name}` gave {exact:.6g} for the model and for one whose weights are nearly gone: it must "
                "evaluate the model that the Compressor was given, with its present weights (does it measure an "
                "average of them, such as an EMA?)"
            )
    return ruined
