"""The configuration manager: searches the smallest configuration of each checkpoint that keeps the model's quality.

Inshrinkerator, section 5: a guided exhaustive search at the first checkpoint, then the neighbourhood of the last
choice. Candidates are ordered by the exact size of their nearest codes, which the joint sketch gives without encoding;
only quality needs the model. There are two bounds: on the base layer, relative to the unquantized model (epsilon, as in
the paper); and on a restore, relative to the gain of training since the last checkpoint. `check` may confirm a choice.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.config.renamed import current_keys
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.config.space import Point
from dsq_ckpt.config.systems import SYSTEMS
from dsq_ckpt.core import figures
from dsq_ckpt.core.config_trees import iter_dotted_keys
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, run_on_all_ranks
from dsq_ckpt.quantization.analysis import Analysis, GlobalSketch
from dsq_ckpt.quantization.chunk import Chunk
from dsq_ckpt.quantization.codebook.base import MAX_REFINEMENT_BITS
from dsq_ckpt.quantization.plan import QuantizationPlan, plan_as_configured
from dsq_ckpt.search.allocation import Allocation, Losses
from dsq_ckpt.search.budget import RunBudget
from dsq_ckpt.search.candidates import Candidate, SaveSearch
from dsq_ckpt.search.folds import MAX_IMPROVEMENT, Fold, compute_degradation, keeps_bound
from dsq_ckpt.search.guided import drive, guided_exhaustive
from dsq_ckpt.search.metric_direction import MetricDirection
from dsq_ckpt.search.metric_evaluation import EvaluationFailed, check_noise, measure_metrics, measure_ruined_model
from dsq_ckpt.search.neighbourhood import neighbourhood
from dsq_ckpt.search.trial import Probe, TrialModel
from dsq_ckpt.storage.manifest import Manifest

logger = logging.getLogger(__name__)

_COMFORTABLE_SHARE = 1 / 8  # of its bound; a restore that costs less is tried with one bit less at the next save
_VARIANT_RATIO = 0.5  # another variant must reduce the degradation to this share to be chosen
_UNCHECKED_SHARE = 0.75  # of its bound that steps by class may use without `check`: the best of many choices overfits
_LATER_HINT = "Of later ones only `satisfied` in `quality` tells"


@dataclass
class _SearchMemory:
    """State of the search from one checkpoint to the next."""

    point: Point | None = None
    variant: int = 0
    refinement_bits: int | None = None
    comfortable: bool = False
    degradation: float | None = None
    distortion: float | None = None


class ConfigManager:
    """A policy of `DSQStorageWriter` that searches the configuration.

    Args:
        model: the model that `evaluate` evaluates.
        evaluate: returns the metric of the model in its current state, the same number for the same weights.
        refresh: see `TrialModel`.
        check: the same metric on other data. A configuration must keep its bounds on both.
        probes: evaluations, in addition to those of the search, that choose a step per class of tensors (`Allocation`).
    """

    def __init__(
        self, model: nn.Module, evaluate: Callable[[], float], refresh: Callable[[], None] | None = None,
        check: Callable[[], float] | None = None, probes: int = 0,
    ) -> None:
        self._model = model
        self._probes = probes
        self._refresh = refresh
        self.folds = [Fold("evaluate", evaluate)]
        if check is not None:
            self.folds.append(Fold("check", check, "check_metric"))
        self._memory = _SearchMemory()
        self._budget = RunBudget()
        self._direction = MetricDirection()
        self._warned = set[str]()

    def resume(self, manifest: Manifest, *, refined: bool) -> None:
        """Resume the search of a loaded checkpoint.

        Args:
            manifest: manifest of the checkpoint.
            refined: whether the load used the refinement layer.
        """
        self._budget, quality = RunBudget.from_manifest(manifest, refined), manifest.quality
        self._warned.clear()
        if not quality or quality.get("chosen") is None:
            return
        config = current_keys(manifest.config, silent=True)
        try:
            loaded = DSQConfig.create(config)
        except ValueError:  # of another version
            return
        space = SYSTEMS[loaded.system].space
        if space is not None:
            names = [variant.name for variant in space.variants]
            name = quality["chosen"].get("variant")
            self._memory = _SearchMemory(
                point=space.nearest(dict(iter_dotted_keys(config))),
                refinement_bits=loaded.quantize.weights.refinement_bits,
                variant=names.index(name) if name in names else 0,
            )
            for fold in self.folds:
                fold.metric, fold.is_checked = quality.get(fold.key), fold.key in quality

    def __call__(
        self, sketches: GlobalSketch, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
    ) -> QuantizationPlan:
        """Search the configuration; collective over `comm`.

        Raises:
            SaveFailed: on all ranks, if `evaluate` or `check` changed the model; its parameters are restored.
        """
        started, space = time.perf_counter(), SYSTEMS[config.system].space
        # There are none in a keyframe of value deltas.
        groups = [name for name in sketches.layout.groups if name.startswith("weights/") and sketches.joint[name].any()]
        default_analysis = sketches.fit()
        if space is None:
            return plan_as_configured(sketches, local, config, comm, workers)
        if not groups:
            return QuantizationPlan(default_analysis, config)
        record: dict[str, Any] = {"system": config.system, "bound": config.search.bound}
        if self._budget.restores:
            record["run_lost"] = self._budget.lost
        # A failure of one rank, such as of the copy's allocation, must reach all ranks before they evaluate.
        model = run_on_all_ranks(comm, lambda: TrialModel(self._model, local, workers, self._refresh, comm).__enter__())
        save = SaveSearch(sketches, config, space, comm, model, default_analysis, groups, self._warned)
        try:
            choice = self._search(save, record)
        except EvaluationFailed as failure:
            choice = self._plan_fallback(save, record, str(failure), failed=True)
        finally:
            model.__exit__()
        record |= {"evaluations": save.evaluations["evaluate"], "seconds": time.perf_counter() - started}
        if len(self.folds) > 1:
            record["checks"] = save.evaluations["check"]
        assert choice.quality is record
        logger.debug("rank %d: %s after %d evaluations", comm.rank, record.get("chosen"), record["evaluations"])
        return choice

    def _search(self, save: SaveSearch, record: dict[str, Any]) -> QuantizationPlan:
        search, memory = save.config.search, self._memory
        for fold in self.folds:
            save.metrics[fold.name] = record[fold.key] = measure_metrics(save, fold, [None])[0]
            self._check_fold(save, fold, record)
        probes = self._probes
        if probes and save.is_compensable:
            probes -= 1
            try:
                measure_metrics(save, self.folds[0], [Probe.INPUTS])
            except EvaluationFailed as failure:
                logger.info("no inputs of layers recorded, so errors do not compensate each other: %s", failure)
        if not self._budget.get_remaining_share(search):
            spent = f"restores of this run have cost {figures.percent(self._budget.lost)} of the metric"
            if self._budget.lost >= 1:
                spent = "what restores of this run have cost was not measured"
            return self._plan_exact(save, record, f"{spent}, and search.max_run_loss is {search.max_run_loss:g}")
        point, variant = self._search_base_layer(save, record)
        best = min((loss for losses in save.degradations.values() for loss in losses.values()), default=0.0)
        if search.higher_is_better and best < -MAX_IMPROVEMENT:  # the direction is not checked then
            save.warn(
                f"coarser weights improve the metric by {-best:.0%}, which is not believed, and was not taken: if "
                "lower is better, as of a loss, unset search.higher_is_better"
            )
        last = save.most_conservative
        if point is None and save.disable_rate_distortion(last) and self._try_points(save, [last], 0)[0]:
            point, variant = last, 0
            record["search"] = "exhaustive, then without rate-distortion choice"
        candidate = save.get_candidate(last if point is None else point, variant)
        losses = None if point is None else save.degradations[point, variant]
        codebook = candidate.config.quantize.weights.codebook
        steps: dict[str, float] = {}
        if self._probes and isinstance(codebook, Lattice):
            candidate, losses = self._allocate_steps(save, save.recount(candidate), codebook.step, losses, probes)
            candidate = save.trim_levels(candidate)
            steps = {
                group: fit.codebook.step for group, fit in candidate.groups.items() if isinstance(fit.codebook, Lattice)
            }
        if losses is None:
            both = ", by `evaluate` and by `check`" if len(self.folds) > 1 else ""
            cause = f"no configuration keeps the metric within {search.epsilon:.2%}{both}"
            return self._plan_fallback(save, record, cause)
        bits = self._search_refinement_bits(save, candidate, record)
        if bits is None:
            most = "a finite metric" if search.max_run_loss is None else "search.max_run_loss"
            return self._plan_exact(save, record, f"no refinement of {MAX_REFINEMENT_BITS} bits keeps to {most}")
        # The configuration is chosen from here on.
        point, loss = point or last, losses["evaluate"]
        record |= {
            "chosen": save.space.describe(point, save.space.variants[variant]), "degradation": loss,
            "predicted_bytes": candidate.bits / 8, "satisfied": record.get("satisfied", True),
        }
        if steps:
            record["steps"] = steps
        if len(self.folds) > 1:
            record["check_degradation"] = losses["check"]
        distortion = save.compute_distortion(candidate)
        if memory.degradation is not None and memory.distortion:
            record["predicted_degradation"] = memory.degradation * distortion / memory.distortion
        config = save.configure_refinement(candidate, bits)
        analysis = save.fit_refinement(candidate, bits)
        if compensations := save.model.compensations:
            analysis = replace(analysis, fitted=save.model.recount(analysis.fitted))
            record["compensated"] = save.model.compensated_share
        self._memory = _SearchMemory(point, variant, bits, memory.comfortable, loss, distortion)
        for fold in self.folds:
            fold.metric = save.metrics[fold.name]
        return QuantizationPlan(analysis, config, record, compensations)

    def _check_fold(self, save: SaveSearch, fold: Fold, record: dict[str, Any]) -> None:
        """Check once that a metric depends on the weights, and the direction of `evaluate` until it is settled."""
        search, exact = save.config.search, save.metrics[fold.name]
        if not fold.is_checked:
            bound = search.epsilon
            restore = self._budget.get_allowed_change(search, None, exact) / max(abs(exact), 1e-30)
            if restore and self._bounds_restores(save.config):  # with 0 left, weights are stored exactly
                bound = min(bound, restore)
            check_noise(save, fold, bound, record)
        directs = fold is self.folds[0] and self._direction.needs_check(exact, search)
        if directs or not fold.is_checked:
            ruined = measure_ruined_model(save, fold)
            if directs:
                self._direction.update(fold.name, exact, ruined, search, save.comm.rank)
        fold.is_checked = True

    @staticmethod
    def _bounds_restores(config: DSQConfig) -> bool:
        """Return whether the configuration bounds the change by a restore, besides that by the base layer."""
        return config.search.max_run_loss is not None or (
            config.search.bound == "progress" and bool(config.quantize.weights.refinement_bits)
        )

    def _search_base_layer(self, save: SaveSearch, record: dict[str, Any]) -> tuple[Point | None, int]:
        """Return the smallest configuration whose base layer keeps epsilon: point, None without one, and variant."""
        search, memory, space = save.config.search, self._memory, save.space
        batch = save.comm.size if search.parallel_trials else 1
        if memory.point is not None and memory.point in space:
            variant = self._select_variant(save, memory.point, memory.variant)
            point, _ = drive(
                neighbourhood(
                    space.shape, memory.point, lambda p: save.get_size(p, variant), search.radius, batch, search.trials,
                    search.monotone,
                ),
                lambda points: self._try_points(save, points, variant),
            )
            if point is not None:
                record["search"] = "neighbourhood"
                return point, variant
        record["search"] = "exhaustive"
        best: tuple[Point | None, int] = (None, 0)
        for variant in self._list_variants(save):
            point, _ = drive(
                guided_exhaustive(space.shape, lambda p, v=variant: save.get_size(p, v), batch),  # type: ignore[misc]
                lambda points, v=variant: self._try_points(save, points, v),  # type: ignore[misc]
            )
            if point is not None and (best[0] is None or save.get_size(point, variant) < save.get_size(*best)):  # type: ignore[arg-type]
                best = point, variant
        return best

    def _allocate_steps(
        self, save: SaveSearch, start: Candidate, step: float, known_losses: Losses | None, probes: int
    ) -> tuple[Candidate, Losses | None]:
        """Return the candidate with a step per class of tensors, and its degradations by fold, None if above bound."""
        bound = save.config.search.epsilon * (1.0 if len(self.folds) > 1 else _UNCHECKED_SHARE)

        def judge(analysis: Analysis, confirm: bool) -> tuple[bool, Losses]:
            losses: Losses = {}
            for fold in self.folds if confirm else self.folds[:1]:
                losses[fold.name] = compute_degradation(
                    measure_metrics(save, fold, [analysis])[0], save.metrics[fold.name], save.config.search
                )
                if not keeps_bound(losses[fold.name], bound, self._direction.is_doubted):
                    return False, losses
            return True, losses

        probes -= bool(save.model.compensations)  # one is for nearest codes
        best, losses = Allocation(save, start, known_losses, step, bound, judge, max(probes, 0)).run()
        nearest = save.fit_nearest_codes(best)
        if probes >= 0 and nearest.bits < best.bits:
            save.model.compensate(False)
            keeps, own_losses = judge(nearest.analysis, True)
            if keeps:
                return nearest, own_losses
            save.model.compensate(True)
        return best, losses

    @staticmethod
    def _list_variants(save: SaveSearch) -> list[int]:
        """Return the distinct variants: without averaged gradients, sensitivity equals magnitude."""
        return [
            number for number, variant in enumerate(save.space.variants)
            if save.sketches.layout.has_gradients or "sensitivity" not in variant.values.values()
        ]

    def _select_variant(self, save: SaveSearch, point: Point, variant: int) -> int:
        """Return the other variant if it is clearly better at `point` (section 5, delta-neighbourhood search)."""
        if len(self._list_variants(save)) < 2 or not math.isfinite(save.get_size(point, 1 - variant)):
            return variant
        self._try_points(save, [point], 1 - variant)
        before = self._memory.degradation
        clearly = before is not None and save.degradations[point, 1 - variant]["evaluate"] < _VARIANT_RATIO * before
        return 1 - variant if clearly else variant

    def _try_points(self, save: SaveSearch, points: list[Point], variant: int) -> list[bool]:
        """Return for each point whether it keeps epsilon on every fold. Evaluate a point once per fold."""
        search, keeping = save.config.search, points
        for fold in self.folds:
            losses = {point: save.degradations.setdefault((point, variant), {}) for point in keeping}
            if new := [point for point in keeping if fold.name not in losses[point]]:
                metrics = measure_metrics(save, fold, [save.get_candidate(point, variant).analysis for point in new])
                for point, metric in zip(new, metrics, strict=True):
                    losses[point][fold.name] = compute_degradation(metric, save.metrics[fold.name], search)
            keeping = [
                point for point in keeping
                if keeps_bound(losses[point][fold.name], search.epsilon, self._direction.is_doubted)
            ]
        return [point in keeping for point in points]

    def _search_refinement_bits(self, save: SaveSearch, candidate: Candidate, record: dict[str, Any]) -> int | None:
        """Return the refinement bits of the weights: as configured, or more if a restore would exceed its bound.

        None if a restore costs more than its share of the run's budget, or is not finite, with all bits. With `check`
        it is measured there alone, since errors of a base layer chosen by `evaluate` may fit its batches. Few numbers
        of bits are tried, in order, so `check` is hardly overfitted. Groups of restored weights have all bits.
        """
        search, configured = save.config.search, candidate.config.quantize.weights.refinement_bits
        if not self._bounds_restores(candidate.config):
            return configured
        fold, exact = self.folds[-1], save.metrics[self.folds[-1].name]
        allowed = self._budget.get_allowed_change(search, fold.metric, exact)
        bits = max(self._memory.refinement_bits or 0, configured)
        if self._memory.comfortable and bits > configured and save.evaluations["evaluate"] <= 2:
            bits -= 1
        save.mark_restored_groups(candidate, bits)
        while True:
            metric = measure_metrics(save, fold, [save.fit_refinement(candidate, bits)], refined=True)[0]
            # An improvement counts, too: rounding averages out the noise of late steps together with what they
            # learned. Such a restore has a better metric, and the run ends worse.
            loss = abs(metric - exact) if math.isfinite(metric) else math.inf
            if loss <= allowed or bits == MAX_REFINEMENT_BITS:
                break
            bits += 1
        most = math.inf if search.max_run_loss is None else self._budget.get_remaining_share(search) * abs(exact)
        if loss > most or loss == math.inf:
            return None
        record |= {"refinement_bits": bits, "restore_loses": loss, "restore_may_lose": allowed}
        if save.restored:
            record["restored_weights"] = f"{MAX_REFINEMENT_BITS} bits for {', '.join(sorted(save.restored))}"
        if loss > allowed:
            record["satisfied"] = False
            save.warn(
                f"a restore from this checkpoint changes the metric by {loss:.3g}, more than the {allowed:.3g} "
                f"that its bound allows, with {bits} refinement bits; it is stored so. {_LATER_HINT}"
            )
        self._memory.comfortable = loss < _COMFORTABLE_SHARE * allowed
        return bits

    def _plan_exact(self, save: SaveSearch, record: dict[str, Any], reason: str) -> QuantizationPlan:
        """Return the plan that stores weights exactly, and warn with the reason."""
        record |= {"chosen": None, "satisfied": False, "reason": reason}
        save.warn(f"{reason}; the weights of this checkpoint are stored exactly. {_LATER_HINT}")
        analysis = save.analysis
        fits = {group: fitted for group, fitted in analysis.fitted.items() if group not in save.groups}
        return QuantizationPlan(Analysis(fits, analysis.exponents, analysis.nonfinite), save.config, quality=record)

    def _plan_fallback(self, save: SaveSearch, record: dict[str, Any], reason: str, failed: bool = False
                       ) -> QuantizationPlan:
        """Return the fallback plan, with a warning, if nothing satisfies the bound or the evaluation failed."""
        record |= {"chosen": None, "satisfied": False, "reason": reason}
        self._memory = _SearchMemory()
        if save.config.search.fallback == "exact" or save.config.search.max_run_loss is not None:
            return self._plan_exact(save, record, reason)
        point = save.most_conservative
        save.disable_rate_distortion(point)
        candidate = save.get_candidate(point, 0)
        bits = MAX_REFINEMENT_BITS if candidate.config.quantize.weights.refinement_bits else 0
        refined, fold = save.fit_refinement(candidate, bits), self.folds[-1]
        if bits and not failed:
            (metric,) = measure_metrics(save, fold, [refined], refined=True)
            loss = compute_degradation(metric, save.metrics[fold.name], save.config.search)
            if not keeps_bound(loss, save.config.search.epsilon, self._direction.is_doubted):
                return self._plan_exact(save, record, f"{reason}, nor does a restore with {bits} refinement bits")
        save.warn(
            f"{reason}; this checkpoint is stored with the most conservative configuration "
            f"({save.space.describe(point, save.space.variants[0])}). {_LATER_HINT}"
        )
        return QuantizationPlan(refined, save.configure_refinement(candidate, bits), record)
