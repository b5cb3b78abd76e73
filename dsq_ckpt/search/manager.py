"""The configuration manager: finds, for every checkpoint, the smallest configuration that keeps the model's quality.

Inshrinkerator, section 5: a guided exhaustive search at the first checkpoint, then the neighbourhood of the last
choice. Candidates are ordered by the exact size of nearest codes, which the joint sketch tells without encoding; only
quality needs the model. Two bounds: on the base layer, relative to the unquantized model (epsilon, as in the paper);
and on what a restore gives back (base and refinement), relative to what training gained since the last checkpoint.
A search can fit the few batches that it looks at, so a second fold of them, `check`, may confirm what it finds.
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
from dsq_ckpt.quantization.codebook.base import MOST_BITS
from dsq_ckpt.quantization.plan import QuantizationPlan, as_configured
from dsq_ckpt.search.allocation import Allocation, Losses
from dsq_ckpt.search.budget import RunBudget
from dsq_ckpt.search.candidates import Candidate, SaveSearch
from dsq_ckpt.search.folds import TOO_GOOD, Fold, degradation, keeps
from dsq_ckpt.search.guided import drive, guided_exhaustive
from dsq_ckpt.search.measuring import EvaluationFailed, check_noise, measure, ruined_metric
from dsq_ckpt.search.neighbourhood import neighbourhood
from dsq_ckpt.search.reading import Reading
from dsq_ckpt.search.trial import Probe, TrialModel
from dsq_ckpt.storage.manifest import Manifest

logger = logging.getLogger(__name__)

_COMFORTABLE = 1 / 8  # a restore that costs less than this share of its bound is tried with a bit less next time
_BETTER_VARIANT = 0.5  # another variant must halve the degradation to be switched to
_UNCHECKED = 0.75  # of its bound that steps by class may use without `check`: one choice of many flatters itself
_LATER = "Of later ones only `satisfied` in `quality` tells"


@dataclass
class _Known:
    """What the search remembers from one checkpoint to the next."""

    point: Point | None = None
    variant: int = 0
    refinement_bits: int | None = None
    comfortable: bool = False
    degradation: float | None = None
    distortion: float | None = None


class ConfigManager:
    """A policy for `DSQStorageWriter` that searches.

    Args:
        model: the model that `evaluate` looks at.
        evaluate: metric of the model as it is, on data of its own; it must give the same number for the same weights.
        refresh: see `TrialModel`.
        check: the same metric on other data. What keeps its bounds by `evaluate` alone is not chosen.
        probes: evaluations, beyond those of the search, to give each class of tensors a step of its own (`Allocation`).
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
        self._known = _Known()
        self._budget = RunBudget()
        self._reading = Reading()
        self._told = set[str]()

    def resume(self, manifest: Manifest, *, refined: bool) -> None:
        """Resume the search of a loaded checkpoint.

        Args:
            manifest: of the checkpoint.
            refined: the load took the refinement layer, where there is one.
        """
        self._budget = RunBudget.after(manifest, refined)
        self._told.clear()
        quality = manifest.quality
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
            self._known = _Known(
                point=space.nearest(dict(iter_dotted_keys(config))),
                refinement_bits=loaded.quantize.weights.refinement_bits,
                variant=names.index(name) if name in names else 0,
            )
            for fold in self.folds:
                fold.metric, fold.sound = quality.get(fold.key), fold.key in quality

    def __call__(
        self, sketches: GlobalSketch, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
    ) -> QuantizationPlan:
        """Search, and choose; collective over `comm`.

        Raises:
            SaveFailed: on all ranks, if `evaluate` or `check` changed the model; its parameters are put back.
        """
        started = time.perf_counter()
        space = SYSTEMS[config.system].space
        groups = [
            group for group in sketches.layout.groups if group.startswith("weights/") and sketches.joint[group].any()
        ]  # a keyframe of value deltas quantizes nothing
        usual = sketches.fit()
        if space is None:
            return as_configured(sketches, local, config, comm, workers)
        if not groups:
            return QuantizationPlan(usual, config)
        record: dict[str, Any] = {"system": config.system, "bound": config.search.bound}
        if self._budget.restores:
            record["run_lost"] = self._budget.lost
        # What may fail on one rank alone (memory for the copy) must fail on all, before they evaluate together.
        model = run_on_all_ranks(comm, lambda: TrialModel(self._model, local, workers, self._refresh, comm).__enter__())
        save = SaveSearch(sketches, config, space, comm, model, usual, groups, self._told)
        try:
            choice = self._searched(save, record)
        except EvaluationFailed as failure:
            choice = self._unbounded(save, record, str(failure), failed=True)
        finally:
            model.__exit__()
        record |= {"evaluations": save.evaluations["evaluate"], "seconds": time.perf_counter() - started}
        if len(self.folds) > 1:
            record["checks"] = save.evaluations["check"]
        assert choice.quality is record
        logger.debug("rank %d: %s after %d evaluations", comm.rank, record.get("chosen"), record["evaluations"])
        return choice

    def _searched(self, save: SaveSearch, record: dict[str, Any]) -> QuantizationPlan:
        search, known = save.config.search, self._known
        for fold in self.folds:
            save.metrics[fold.name] = record[fold.key] = measure(save, fold, [None])[0]
            self._check(save, fold, record)
        probes = self._probes
        if probes and save.compensable:
            probes -= 1
            try:
                measure(save, self.folds[0], [Probe.INPUTS])
            except EvaluationFailed as failure:
                logger.info("no inputs of layers recorded, so errors do not compensate each other: %s", failure)
        if not self._budget.share(search):
            spent = f"restores of this run have cost {figures.percent(self._budget.lost)} of the metric"
            if self._budget.lost >= 1:
                spent = "what restores of this run have cost was not measured"
            return self._exact(save, record, f"{spent}, and search.max_run_loss is {search.max_run_loss:g}")
        point, variant = self._base(save, record)
        best = min((one for found in save.degradations.values() for one in found.values()), default=0.0)
        if search.higher_is_better and best < -TOO_GOOD:  # of which no ruined model was asked
            save.warn(
                f"coarser weights improve the metric by {-best:.0%}, which is not believed, and was not taken: if "
                "lower is better, as of a loss, unset search.higher_is_better"
            )
        last = save.most_conservative
        if point is None and save.always_nearest(last) and self._try(save, [last], 0)[0]:
            point, variant = last, 0
            record["search"] = "exhaustive, then without rate-distortion choice"
        candidate = save.candidate(last if point is None else point, variant)
        found = None if point is None else save.degradations[point, variant]
        codebook = candidate.config.quantize.weights.codebook
        steps: dict[str, float] = {}
        if self._probes and isinstance(codebook, Lattice):
            candidate, found = self._allocated(save, save.recounted(candidate), codebook.step, found, probes)
            candidate = save.trimmed(candidate)
            steps = {
                group: own.codebook.step for group, own in candidate.groups.items() if isinstance(own.codebook, Lattice)
            }
        if found is None:
            both = ", by `evaluate` and by `check`" if len(self.folds) > 1 else ""
            why = f"no configuration keeps the metric within {search.epsilon:.2%}{both}"
            return self._unbounded(save, record, why)
        bits = self._refined(save, candidate, record)
        if bits is None:
            return self._exact(save, record, f"no refinement of {MOST_BITS} bits keeps to search.max_run_loss")
        # What follows is of weights that are stored so; before this, no configuration is chosen yet.
        point, lost = point or last, found["evaluate"]
        record |= {
            "chosen": save.space.describe(point, save.space.variants[variant]), "degradation": lost,
            "predicted_bytes": candidate.bits / 8, "satisfied": record.get("satisfied", True),
        }
        if steps:
            record["steps"] = steps
        if len(self.folds) > 1:
            record["check_degradation"] = found["check"]
        distortion = save.distortion(candidate)
        if known.degradation is not None and known.distortion:
            record["predicted_degradation"] = known.degradation * distortion / known.distortion
        config = candidate.config.with_values(**{"quantize.weights.refinement_bits": bits})
        analysis = save.refined(candidate, bits)
        if compensations := save.model.compensations:
            analysis = replace(analysis, fitted=save.model.recounted(analysis.fitted))
            record["compensated"] = save.model.compensated
        self._known = _Known(point, variant, bits, known.comfortable, lost, distortion)
        for fold in self.folds:
            fold.metric = save.metrics[fold.name]
        return QuantizationPlan(analysis, config, record, compensations)

    def _check(self, save: SaveSearch, fold: Fold, record: dict[str, Any]) -> None:
        """Check once that a metric tells something, and the direction of `evaluate` until that is settled."""
        search, exact = save.config.search, save.metrics[fold.name]
        if not fold.sound:
            bound = search.epsilon
            restore = self._budget.allowed(search, None, exact) / max(abs(exact), 1e-30)
            if restore and self._bounds_restores(save.config):  # nothing left: weights are stored exactly
                bound = min(bound, restore)
            check_noise(save, fold, bound, record)
        directs = fold is self.folds[0] and self._reading.is_open(exact, search)
        if directs or not fold.sound:
            ruined = ruined_metric(save, fold)
            if directs:
                self._reading.judge(fold.name, exact, ruined, search, save.comm.rank)
        fold.sound = True

    @staticmethod
    def _bounds_restores(config: DSQConfig) -> bool:
        """Return whether there is a bound on what a restore changes, besides the base layer's."""
        return config.search.max_run_loss is not None or (
            config.search.bound == "progress" and bool(config.quantize.weights.refinement_bits)
        )

    def _base(self, save: SaveSearch, record: dict[str, Any]) -> tuple[Point | None, int]:
        """Return the smallest configuration whose base layer keeps to epsilon."""
        search, known, space = save.config.search, self._known, save.space
        batch = save.comm.size if search.parallel_trials else 1
        if known.point is not None and known.point in space:
            variant = self._better_variant(save, known.point, known.variant)
            point, _ = drive(
                neighbourhood(
                    space.shape, known.point, lambda p: save.size(p, variant), search.radius, batch, search.trials,
                    search.monotone,
                ),
                lambda points: self._try(save, points, variant),
            )
            if point is not None:
                record["search"] = "neighbourhood"
                return point, variant
        record["search"] = "exhaustive"
        best: tuple[Point | None, int] = (None, 0)
        for variant in self._variants(save):
            point, _ = drive(
                guided_exhaustive(space.shape, lambda p, v=variant: save.size(p, v), batch),  # type: ignore[misc]
                lambda points, v=variant: self._try(save, points, v),  # type: ignore[misc]
            )
            if point is not None and (best[0] is None or save.size(point, variant) < save.size(*best)):  # type: ignore[arg-type]
                best = point, variant
        return best

    def _allocated(
        self, save: SaveSearch, start: Candidate, step: float, found: Losses | None, probes: int
    ) -> tuple[Candidate, Losses | None]:
        """Return the candidate with a step for each class of tensors, and its degradations by fold; None: too large."""
        bound = save.config.search.epsilon * (1.0 if len(self.folds) > 1 else _UNCHECKED)

        def judge(analysis: Analysis, confirm: bool) -> tuple[bool, Losses]:
            own: Losses = {}
            for fold in self.folds if confirm else self.folds[:1]:
                own[fold.name] = degradation(
                    measure(save, fold, [analysis])[0], save.metrics[fold.name], save.config.search
                )
                if not keeps(own[fold.name], bound, self._reading.doubted):
                    return False, own
            return True, own

        probes -= bool(save.model.compensations)  # one for nearest codes
        best, losses = Allocation(save, start, found, step, bound, judge, max(probes, 0)).run()
        nearest = save.nearest(best)
        if probes >= 0 and nearest.bits < best.bits:
            save.model.compensate(False)
            kept, own = judge(nearest.analysis, True)
            if kept:
                return nearest, own
            save.model.compensate(True)
        return best, losses

    @staticmethod
    def _variants(save: SaveSearch) -> list[int]:
        """Return the variants that differ: without averaged gradients, sensitivity is the same metric as magnitude."""
        return [
            number for number, variant in enumerate(save.space.variants)
            if save.sketches.layout.averaged or "sensitivity" not in variant.values.values()
        ]

    def _better_variant(self, save: SaveSearch, point: Point, variant: int) -> int:
        """Return the other variant if clearly better at the last choice (section 5, delta-neighbourhood search)."""
        if len(self._variants(save)) < 2 or not math.isfinite(save.size(point, 1 - variant)):
            return variant
        self._try(save, [point], 1 - variant)
        before = self._known.degradation
        clearly = before is not None and save.degradations[point, 1 - variant]["evaluate"] < _BETTER_VARIANT * before
        return 1 - variant if clearly else variant

    def _try(self, save: SaveSearch, points: list[Point], variant: int) -> list[bool]:
        """Return, for each point, whether it keeps to epsilon on every fold; each is evaluated once per fold."""
        search, keeping = save.config.search, points
        for fold in self.folds:
            found = {point: save.degradations.setdefault((point, variant), {}) for point in keeping}
            if new := [point for point in keeping if fold.name not in found[point]]:
                metrics = measure(save, fold, [save.candidate(point, variant).analysis for point in new])
                for point, metric in zip(new, metrics, strict=True):
                    found[point][fold.name] = degradation(metric, save.metrics[fold.name], search)
            keeping = [
                point for point in keeping if keeps(found[point][fold.name], search.epsilon, self._reading.doubted)
            ]
        return [point in keeping for point in points]

    def _refined(self, save: SaveSearch, candidate: Candidate, record: dict[str, Any]) -> int | None:
        """Return the bits of the weights' refinement: as configured, or more if a restore exceeds its bound otherwise.

        None if a restore costs more than its share of what the run may lose with any number of them. With `check` the
        restore is measured there alone: what is left of the errors of a base layer that was chosen by `evaluate` may
        suit the batches of `evaluate` too. Few bits are tried, in order, so `check` is hardly fitted.
        """
        search, configured = save.config.search, candidate.config.quantize.weights.refinement_bits
        if not self._bounds_restores(candidate.config):
            return configured
        fold = self.folds[-1]
        exact = save.metrics[fold.name]
        allowed = self._budget.allowed(search, fold.metric, exact)
        bits = max(self._known.refinement_bits or 0, configured)
        if self._known.comfortable and bits > configured and save.evaluations["evaluate"] <= 2:  # there is one to spare
            bits -= 1
        if save.lies_as_restored(candidate, bits):
            bits = MOST_BITS
        while True:
            metric = measure(save, fold, [save.refined(candidate, bits)], bits)[0]
            # Also where the metric improves: rounding averages out the noise of late steps, and with it what they
            # learned; such a restore looks good and the run ends worse.
            lost = abs(metric - exact) if math.isfinite(metric) else math.inf
            if lost <= allowed or bits == MOST_BITS:
                break
            bits += 1
        if search.max_run_loss is not None and lost > self._budget.share(search) * abs(exact):
            return None
        record |= {"refinement_bits": bits, "restore_loses": lost, "restore_may_lose": allowed}
        if lost > allowed:
            record["satisfied"] = False
            save.warn(
                f"a restore from this checkpoint changes the metric by {lost:.3g}, more than the {allowed:.3g} "
                f"that its bound allows, with {bits} refinement bits; it is stored so. {_LATER}"
            )
        self._known.comfortable = lost < _COMFORTABLE * allowed
        return bits

    def _exact(self, save: SaveSearch, record: dict[str, Any], why: str) -> QuantizationPlan:
        """Return the plan that stores weights exactly, with a warning that says why."""
        record |= {"chosen": None, "satisfied": False, "reason": why}
        save.warn(f"{why}; the weights of this checkpoint are stored exactly. {_LATER}")
        kept = {group: fitted for group, fitted in save.usual.fitted.items() if group not in save.groups}
        analysis = Analysis(kept, save.usual.exponents, save.usual.nonfinite)
        return QuantizationPlan(analysis, save.config, quality=record)

    def _unbounded(self, save: SaveSearch, record: dict[str, Any], why: str, failed: bool = False) -> QuantizationPlan:
        """Return the fallback, with a warning, if nothing satisfies the bound or evaluation `failed`."""
        record |= {"chosen": None, "satisfied": False, "reason": why}
        self._known = _Known()
        if save.config.search.fallback == "exact" or save.config.search.max_run_loss is not None:
            return self._exact(save, record, why)
        point = save.most_conservative
        save.always_nearest(point)
        candidate = save.candidate(point, 0)
        bits = MOST_BITS if candidate.config.quantize.weights.refinement_bits else 0
        refined, fold = save.refined(candidate, bits), self.folds[-1]
        if bits and not failed:
            lost = degradation(measure(save, fold, [refined], bits)[0], save.metrics[fold.name], save.config.search)
            if not keeps(lost, save.config.search.epsilon, self._reading.doubted):
                return self._exact(save, record, f"{why}, nor does a restore with {bits} refinement bits")
        save.warn(
            f"{why}; this checkpoint is stored with the most conservative configuration "
            f"({save.space.describe(point, save.space.variants[0])}). {_LATER}"
        )
        config = candidate.config.with_values(**{"quantize.weights.refinement_bits": bits})
        return QuantizationPlan(refined, config, record)
