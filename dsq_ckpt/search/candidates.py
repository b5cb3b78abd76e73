"""Candidates of a search: configurations fitted on the sketches of a save, with their sizes."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from dsq_ckpt.codebooks.lattice import Lattice
from dsq_ckpt.config.schema import DSQConfig, TensorConfig
from dsq_ckpt.config.space import Point, Space
from dsq_ckpt.core.notices import is_new_warning, warn
from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.quantization.analysis import Analysis, GlobalSketch
from dsq_ckpt.quantization.codebook import GroupFit
from dsq_ckpt.quantization.codebook.base import MAX_REFINEMENT_BITS
from dsq_ckpt.quantization.groups import group_config
from dsq_ckpt.quantization.restored_values import find_restored_groups
from dsq_ckpt.search.trial import TrialModel

_PROTECTED_BITS = 16


@dataclass
class Candidate:
    """Configuration of the weights, fitted on the sketches.

    Attributes:
        config: configuration of the save.
        groups: configuration of each group of weights.
        analysis: fits of all groups.
        bits: size of codes and protected values; exact for nearest codes, for others after `SaveSearch.recount`.
    """

    config: DSQConfig
    groups: dict[str, TensorConfig]
    analysis: Analysis
    bits: float


@dataclass
class SaveSearch:
    """Search of one save: its sketches, and the fits and evaluations so far.

    Attributes:
        sketches, analysis: sketches of all groups, and their fits as configured.
        config, space: configuration of the save, and its search space.
        comm: communicator of the ranks that save.
        model: evaluates candidates; its context is entered.
        groups: quantized groups of weights.
        warned: warnings of this search and of those of earlier saves; see `is_new_warning`.
        candidates: candidates by point and number of the variant.
        fits: fits by group and codebook.
        degradations: degradations by fold (`evaluate`, `check`), by point and number of the variant.
        evaluations: number of evaluations on this rank, by fold.
        metrics: metric of the unquantized model, by fold.
        restored: groups of weights that lie where a restore has put them.
    """

    sketches: GlobalSketch
    config: DSQConfig
    space: Space
    comm: Communicator
    model: TrialModel
    analysis: Analysis
    groups: list[str]
    warned: set[str]
    candidates: dict[tuple[Point, int], Candidate] = field(default_factory=dict)
    fits: dict[str, Analysis] = field(default_factory=dict)
    degradations: dict[tuple[Point, int], dict[str, float]] = field(default_factory=dict)
    evaluations: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)
    restored: set[str] = field(default_factory=set)

    def warn(self, text: str) -> None:
        """Warn, unless a search of the run has issued the same warning, apart from its numbers; called on all ranks."""
        if is_new_warning(text, self.warned):
            warn(text, rank=self.comm.rank)

    def get_candidate(self, point: Point, variant: int) -> Candidate:
        """Return the fitted configuration at a point. Equal groups of several points are fitted once.

        Raises:
            ValueError: the point's values contradict each other, or the configuration.
        """
        key = (point, variant)
        if key not in self.candidates:
            values = self.space.values(point, self.space.variants[variant])
            config = self.config.with_values(**values)
            fitted = {}
            configs = {group: group_config(group, config.quantize) for group in self.groups}
            for group, chosen in configs.items():
                name = group + json.dumps(chosen.codebook.model_dump(), sort_keys=True)
                if name not in self.fits:
                    self.fits[name] = self.sketches.fit({group: chosen}, self.analysis)
                fitted[group] = self.fits[name].fitted[group]
            analysis = Analysis({**self.analysis.fitted, **fitted}, self.analysis.exponents, self.analysis.nonfinite)
            self.candidates[key] = Candidate(config, configs, analysis, sum(map(size_in_bits, fitted.values())))
        return self.candidates[key]

    def fit_refinement(self, candidate: Candidate, bits: int) -> Analysis:
        """Return the fits of a candidate with refinement cells, so that zeros are restored as zeros.

        Groups that are configured with more bits keep theirs. Groups that lie where a restore has put them have all.
        """
        configs = {
            group: _at_least(config, MAX_REFINEMENT_BITS if group in self.restored else bits)
            for group, config in candidate.groups.items()
        }
        return self.sketches.fit(configs, candidate.analysis)

    @staticmethod
    def configure_refinement(candidate: Candidate, bits: int) -> DSQConfig:
        """Return the configuration with the bits of `fit_refinement`, without those of restored groups."""
        groups = candidate.config.quantize.groups
        return candidate.config.with_values(**{
            "quantize.weights.refinement_bits": bits,
            "quantize.groups": {name: _at_least(config, bits).model_dump() for name, config in groups.items()},
        })

    def mark_restored_groups(self, candidate: Candidate, bits: int) -> None:
        """Set `restored` to the groups that lie where a restore from so many bits put them; collective."""
        fitted = self.fit_refinement(candidate, bits).fitted
        own = {chunk.key for chunk in self.sketches.chunks}  # other ranks test the replicas
        weights = [chunk for chunk in self.model.chunks if chunk.key in own]
        self.restored = find_restored_groups(
            weights, fitted, self.sketches.restores, self.comm, self.model.workers, all_chunks=True
        )

    def fit_nearest_codes(self, candidate: Candidate) -> Candidate:
        """Return the candidate refitted with nearest codes, and their size."""
        analysis = self.sketches.fit(candidate.groups, candidate.analysis)
        return replace(
            candidate, analysis=analysis, bits=sum(size_in_bits(analysis.fitted[group]) for group in self.groups)
        )

    def recount(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the counts and size of compensated codes, which sketches cannot compute."""
        fitted = self.model.recount(candidate.analysis.fitted)
        bits = sum(size_in_bits(fitted[group]) for group in self.groups)
        return replace(candidate, analysis=replace(candidate.analysis, fitted=fitted), bits=bits)

    def trim_levels(self, candidate: Candidate) -> Candidate:
        """Return the candidate without the outer lattice levels that no code uses."""
        groups = dict(candidate.groups)
        for group, config in groups.items():
            if isinstance(lattice := config.codebook, Lattice):
                fitted = candidate.analysis.fitted[group]
                used = fitted.codebook.levels[np.flatnonzero(fitted.counts.sum(0)[:-1])]
                half = round(np.abs(used).max(initial=0.0) / fitted.codebook.step) + (lattice.rate_distortion > 0)
                fewer = lattice.model_copy(update={"bins": min(2 * max(half, 1), lattice.bins)})
                groups[group] = config.model_copy(update={"codebook": fewer})
        return replace(candidate, groups=groups)

    @property
    def is_compensable(self) -> bool:
        """Whether all weights are stored as codes of lattices, without refinement."""
        configs = [group_config(group, self.config.quantize) for group in self.groups]
        return all(isinstance(config.codebook, Lattice) and not config.refinement_bits for config in configs)

    @property
    def most_conservative(self) -> Point:
        """The point furthest from the most aggressive one; among several, the one of the largest size."""
        sizes: dict[Point, float] = {}
        for _, points in itertools.groupby(sorted(self.space.points(), key=sum, reverse=True), key=sum):
            sizes = {point: size for point in points if math.isfinite(size := self.get_size(point, 0))}
            if sizes:  # do not fit other points
                break
        return max(sizes, key=sizes.__getitem__)

    def disable_rate_distortion(self, point: Point) -> bool:
        """Refit a point without rate-distortion choice, which keeps old codes in deltas; False if it has none."""
        candidate = self.get_candidate(point, 0)
        if not getattr(candidate.config.quantize.weights.codebook, "rate_distortion", 0.0):
            return False
        config = candidate.config.with_values(**{"quantize.weights.codebook.rate_distortion": 0.0})
        configs = {group: group_config(group, config.quantize) for group in self.groups}
        analysis = self.sketches.fit(configs, candidate.analysis)
        fits = [analysis.fitted[group] for group in self.groups]
        self.candidates[point, 0] = Candidate(config, configs, analysis, sum(map(size_in_bits, fits)))
        self.degradations.pop((point, 0), None)
        return True

    def get_size(self, point: Point, variant: int) -> float:
        """Return the bits of all weights at a point; infinite if the axes contradict each other."""
        try:
            return self.get_candidate(point, variant).bits
        except ValueError:  # e.g. fewer bins at most than at least
            return math.inf

    def compute_distortion(self, candidate: Candidate) -> float:
        """Return the relative squared error of the weights' base layers."""
        fits = [candidate.analysis.fitted[group] for group in self.groups]
        energy = sum(f.mean_square * int(f.counts.sum()) for f in fits)
        return sum(f.error * int(f.counts.sum()) for f in fits) / energy if energy else 0.0


def _at_least(config: TensorConfig, bits: int) -> TensorConfig:
    """Return the settings of a group with refinement of so many bits, or of more if it is configured with more."""
    return config.model_copy(update={"refinement_bits": max(bits, config.refinement_bits)})


def size_in_bits(fitted: GroupFit) -> float:
    """Return the size of a group's codes and protected values, in bits."""
    return fitted.bits + _PROTECTED_BITS * int(fitted.counts[:, fitted.codebook.protected].sum())
