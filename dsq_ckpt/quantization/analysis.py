"""From sketches to codebooks.

`GlobalSketch.fit` needs neither data nor communication, so that a search can fit many configurations on one sketch.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

import numpy as np

from dsq_ckpt import kernels
from dsq_ckpt.codebooks import CodebookConfig, Weighing
from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.kernels.keys import KeyWindow
from dsq_ckpt.quantization.chunk import Chunk
from dsq_ckpt.quantization.codebook import Codebook, GroupFit, GroupSketch, PartitionTurn, SensitivitySplit, fit_group
from dsq_ckpt.quantization.layout import Fractions, Layout
from dsq_ckpt.quantization.restored_values import LoadCounts, RestoreTracker
from dsq_ckpt.quantization.scales import Scales
from dsq_ckpt.quantization.worst_tensor import WorstTensor, find_worst_tensor


@dataclass(frozen=True)
class Analysis:
    """Global result of fitting the sketch; equal on all ranks.

    Attributes:
        fitted: codebook, table and counts of every group.
        exponents: log2 of the factor taken out of a tensor, a multiple of 1/4; 0 for tensors that are absent.
        nonfinite: tensors with NaN or Inf, which are not quantized.
        worst_tensors: tensor with the largest error, by group.
    """

    fitted: dict[str, GroupFit]
    exponents: dict[str, float]
    nonfinite: frozenset[str]
    worst_tensors: dict[str, WorstTensor] = field(default_factory=dict)


class ImportanceClasses:
    """Classes of sensitivity of one group: all thresholds that a configuration may need, in ascending order."""

    def __init__(self, counts: Counts, fractions: Fractions) -> None:
        self._prune = {f: kernels.importance_thresholds(counts, 0.0, f)[0] for f in fractions.prune if f > 0}
        self._protect = {f: kernels.importance_thresholds(counts, f, 0.0)[1] for f in fractions.protect if f > 0}
        thresholds = {*self._prune.values(), *self._protect.values()} - {0.0, np.inf}
        self.edges = np.array(sorted(thresholds))
        pruning = [edge for edge in self._prune.values() if edge > 0]
        self.neutral = int(np.searchsorted(self.edges, max(pruning), side="right")) if pruning else 0
        """Class of elements without a gradient: neither pruned nor protected."""

    def limits(self, prune: float, protect: float) -> tuple[float, float]:
        """Return the thresholds (prune below, protect from) of two fractions, which must be among the constructor's."""
        return self._prune[prune] if prune else 0.0, self._protect[protect] if protect else np.inf

    def split(self, by_class: Counts, prune: float, protect: float) -> tuple[Counts, SensitivitySplit]:
        """Split a joint sketch by class, int64[classes, rows, bins], into the part for the codebook and the rest."""
        lower, upper = self.limits(prune, protect)
        low = int(np.searchsorted(self.edges, lower, side="right"))  # classes 0..low-1 lie below that edge
        high = int(np.searchsorted(self.edges, upper, side="right")) if np.isfinite(upper) else len(self.edges) + 1
        low = min(low if lower else 0, high)
        split = SensitivitySplit(by_class[:low].sum(0), by_class[high:].sum(0), (lower, upper))
        return by_class[low:high].sum(0), split


@dataclass
class GlobalSketch:
    """Sketch of a save over all ranks, before any codebook; equal on all ranks except for `chunks`.

    Attributes:
        chunks: local chunks, scaled, without those of non-finite tensors; chunks of refit groups have no parent.
        layout: tensors and groups.
        joint: counts by group, int64[rows, bins] in its window; int64[classes, rows, bins] for groups with sensitivity.
        windows: key window by group.
        books: the parent's codebooks by group, of groups that have one.
        scales: scales of the tensors.
        nonfinite: tensors with NaN or Inf.
        importance: classes of sensitivity by group.
        octaves: elements by biased exponent, int64[256], of the tensors coded by their own values.
        sizes: elements of every chunk of every rank, of groups whose parts take turns.
        delta_count: number of deltas since the keyframe before this save.
        has_nan: whether tensors that are not quantized hold NaN on some rank.
        has_lost_rows: whether the user must be warned of weights with rows that one step for all loses.
        loads: loads since the last save, summed over all ranks.
        restores: tracker of the local chunks that lie where a restore has put them.
    """

    chunks: list[Chunk]
    layout: Layout
    joint: dict[str, Counts]
    windows: dict[str, KeyWindow]
    books: dict[str, Codebook]
    scales: Scales
    nonfinite: frozenset[str]
    importance: dict[str, ImportanceClasses]
    octaves: dict[str, Counts] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    delta_count: int = 0
    has_nan: bool = False
    has_lost_rows: bool = False
    loads: LoadCounts = field(default_factory=LoadCounts)
    restores: RestoreTracker = field(default_factory=RestoreTracker)

    def fit(self, configs: dict[str, TensorConfig] | None = None, previous: Analysis | None = None) -> Analysis:
        """Return the codebooks, tables and exact code counts of every group, without data or communication.

        Args:
            configs: configurations by group, in place of the layout's.
            previous: analysis with the groups that `configs` does not name.
        """
        fitted = {}
        for group, default_config in self.layout.groups.items():
            if previous is not None and group not in (configs or {}):
                fitted[group] = previous.fitted[group]
                continue
            config = (configs or {}).get(group, default_config)
            counts, split = self.joint[group], None
            if group in self.importance:
                prune, protect, prunes = config.codebook.weighing or Weighing(0.0, 0.0, False)
                counts, split = self.importance[group].split(counts, prune if prunes else 0.0, protect)
            sketch = GroupSketch(
                counts, self.windows[group], self.scales.units.get(group, 0.0), split,
                self._partition_turn(group, config.codebook),
            )
            fitted[group] = fit_group(
                sketch, config.codebook, self.books.get(group), config.refinement_bits, deltas=self.delta_count
            )
        exponents = {fqn: exponent for fqn, exponent in self.scales.exponents.items() if exponent}
        return Analysis(fitted, exponents, self.nonfinite)

    def find_worst_tensors(self, analysis: Analysis, compensated: Set[str] = frozenset()) -> dict[str, WorstTensor]:
        """Return the tensor with the largest error by group, for groups that are coded by their own values.

        Groups with a tensor in `compensated` are omitted, since sketches do not show their errors.
        """
        octaves: dict[str, dict[str, Counts]] = {}
        for fqn, counts in self.octaves.items():
            octaves.setdefault(self.layout.tensors[fqn], {})[fqn] = counts
        worst_tensors = {}
        for group in octaves.keys() & analysis.fitted.keys() - {self.layout.tensors[fqn] for fqn in compensated}:
            joint = self.joint[group]
            worst = find_worst_tensor(
                analysis.fitted[group], joint.sum(0) if group in self.importance else joint, octaves[group],
                analysis.exponents,
            )
            if worst is not None:
                worst_tensors[group] = worst
        return worst_tensors

    def _partition_turn(self, group: str, codebook: CodebookConfig) -> PartitionTurn | None:
        if not codebook.turns:
            return None
        turn = PartitionTurn(codebook.turns, self.delta_count % codebook.turns)
        parts = [turn.slice_of(size) for size in self.sizes[group]]
        return replace(turn, elements=sum(part.stop - part.start for part in parts))
