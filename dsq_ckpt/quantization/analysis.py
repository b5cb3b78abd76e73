"""From chunks to codes: sketch, merge over ranks, fit, quantize.

One all-reduce per save carries everything: a status word, the octaves of every tensor (2 KiB each; they tell outliers,
non-finite values and the size of gradients) and the joint sketch of every group. Groups that start anew, whose scales
moved, or that weigh elements by sensitivity, need a second one.

`build_global_sketch` does that and knows no codebook. `GlobalSketch.fit` then needs neither data nor communication, so
that a search can fit many configurations on the same sketches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from dsq_ckpt import kernels
from dsq_ckpt.codebooks import CodebookConfig, Weighing
from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.core.interrupts import let_signals_through
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, sum_with_status
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.kernels.keys import FULL, KeyWindow
from dsq_ckpt.quantization.chunk import Chunk
from dsq_ckpt.quantization.codebook import Codebook, Fitted, PartitionTurn, SensitivitySplit, fit_group
from dsq_ckpt.quantization.moments import WINDOW
from dsq_ckpt.quantization.passes import (
    Sparse,
    add_by_class,
    add_joint,
    add_shifted,
    importance_of,
    sparse_of,
    vanishes,
)
from dsq_ckpt.quantization.scales import GRADIENT, OCTAVES, Scales, choose_scales, gauges_of, octaves_of
from dsq_ckpt.quantization.worst import Worst, worst_tensor

_T = TypeVar("_T")

MEASURED = ""
"""Group of chunks that are only measured: optimizer state that tells the size of gradients."""


@dataclass(frozen=True)
class Fractions:
    """Fractions of elements that some configuration may prune or protect by sensitivity."""

    prune: tuple[float, ...] = ()
    protect: tuple[float, ...] = ()


@dataclass(frozen=True)
class Layout:
    """What all ranks agree on before they merge: the lossy tensors and their groups, in one order.

    Attributes:
        tensors: group of every lossy tensor, by fully qualified name.
        groups: configuration of every group.
        state: kind (exp_avg_sq, momentum) of the optimizer's tensors that tell the size of gradients.
        averaged: chunks of weights carry averaged gradients.
        fractions: what a search will ask for; those of the configuration itself need not be named.
        residual: what is coded are differences to the parent's values; without a parent, chunks are exact.
        settings: entries of `quantize.groups` that a tensor took its settings from.
        shapes: of all tensors, lossy or not, whole; they tell which state this is.
    """

    tensors: dict[str, str]
    groups: dict[str, TensorConfig]
    state: dict[str, str] = field(default_factory=dict)
    averaged: bool = False
    fractions: Fractions = Fractions()
    residual: bool = False
    settings: frozenset[str] = frozenset()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def union(cls, parts: Iterable[Layout]) -> Layout:
        """One layout from those of all ranks, sorted."""
        parts = list(parts)
        tensors: dict[str, str] = {}
        groups: dict[str, TensorConfig] = {}
        state: dict[str, str] = {}
        for part in parts:
            tensors.update(part.tensors)
            state.update(part.state)
            for name, config in part.groups.items():
                if groups.setdefault(name, config) != config:
                    raise ConfigError(f"ranks save with different configurations: group '{name}' differs")
        averaged = any(part.averaged for part in parts)
        fractions = parts[0].fractions if parts else Fractions()
        if len({part.residual for part in parts}) > 1:
            raise ConfigError("ranks save with different configurations: delta.against differs")
        return cls(dict(sorted(tensors.items())), dict(sorted(groups.items())), dict(sorted(state.items())), averaged,
                   fractions, any(part.residual for part in parts),
                   frozenset().union(*(part.settings for part in parts)),
                   {name: shape for part in parts for name, shape in part.shapes.items()})

    def rows(self) -> list[str]:
        """Names of everything whose octaves are counted."""
        averages = [GRADIENT + fqn for fqn, group in self.tensors.items() if group.startswith("weights/")]
        return list(dict.fromkeys([*self.tensors, *self.state, *(averages if self.averaged else ())]))

    def octaves(self) -> set[str]:
        """Groups that are coded by octave: their chunks have a frame, which octaves are not counted in."""
        return {group for group, config in self.groups.items() if config.codebook.coordinates == "octaves"}

    def weighed(self) -> list[str]:
        """Groups whose elements are pruned and protected by sensitivity too."""
        return [
            group for group, config in self.groups.items() if self.averaged and group.startswith("weights/")
            and config.codebook.weighing is not None
        ]


@dataclass(frozen=True)
class ParentModel:
    """What the parent checkpoint fixes for its child: codebooks by group, normalisation by tensor."""

    books: dict[str, Codebook]
    exponents: dict[str, float]

    def usable_for(self, layout: Layout) -> ParentModel:
        """Without the groups that are to change between linear and log: a linear window does not see small values."""
        return replace(self, books={
            group: book for group, book in self.books.items()
            if group in layout.groups and (book.domain == "log") == layout.groups[group].codebook.logarithmic
        })


@dataclass(frozen=True)
class Analysis:
    """The global outcome of the sketch; equal on all ranks.

    Attributes:
        fitted: per group.
        exponents: log2 of the factor taken out of tensors, a multiple of 1/4 (others absent).
        nonfinite: tensors with NaN or Inf, to be stored exactly.
        worst: by group, the tensor that is changed most.
    """

    fitted: dict[str, Fitted]
    exponents: dict[str, float]
    nonfinite: frozenset[str]
    worst: dict[str, Worst] = field(default_factory=dict)


class Importance:
    """Classes of sensitivity of one group: all thresholds that some configuration may ask for, in ascending order."""

    def __init__(self, counts: Counts, fractions: Fractions) -> None:
        self._prune = {f: kernels.thresholds(counts, 0.0, f)[0] for f in fractions.prune if f > 0}
        self._protect = {f: kernels.thresholds(counts, f, 0.0)[1] for f in fractions.protect if f > 0}
        found = {*self._prune.values(), *self._protect.values()} - {0.0, np.inf}
        self.edges = np.array(sorted(found))
        pruning = [edge for edge in self._prune.values() if edge > 0]
        self.neutral = int(np.searchsorted(self.edges, max(pruning), side="right")) if pruning else 0
        """Class of elements without a gradient: neither pruned nor protected."""

    def limits(self, prune: float, protect: float) -> tuple[float, float]:
        """(prune below, protect from) for these fractions."""
        return self._prune.get(prune, 0.0), self._protect.get(protect, np.inf)

    def aside(self, by_class: Counts, prune: float, protect: float) -> tuple[Counts, SensitivitySplit]:
        """Split a joint sketch by class, int64[classes, rows, bins], into what is left to the codebook and the rest."""
        below, above = self.limits(prune, protect)
        low = int(np.searchsorted(self.edges, below, side="right"))  # classes 0..low-1 lie below that edge
        high = int(np.searchsorted(self.edges, above, side="right")) if np.isfinite(above) else len(self.edges) + 1
        low = min(low if below else 0, high)
        split = SensitivitySplit(by_class[:low].sum(0), by_class[high:].sum(0), (below, above))
        return by_class[low:high].sum(0), split


@dataclass
class GlobalSketch:
    """Everything global about the values of a save, before any codebook: equal on all ranks but for `chunks`.

    Attributes:
        chunks: the local chunks, scaled, without those of non-finite tensors; without parent where a group starts anew.
        layout: what they are.
        joint: by group, int64[rows, bins] in its window; of weighed groups int64[classes, rows, bins].
        windows, books: by group; books are the parent's, where there is one.
        scales: of the tensors.
        nonfinite: tensors with NaN or Inf.
        importance: of weighed groups.
        octaves: of the tensors that are coded by their own values, int64[256] elements by biased exponent.
        sizes: elements of every chunk of every rank, of groups whose parts take turns.
        turn: how many deltas came before this one.
    """

    chunks: list[Chunk]
    layout: Layout
    joint: dict[str, Counts]
    windows: dict[str, KeyWindow]
    books: dict[str, Codebook]
    scales: Scales
    nonfinite: frozenset[str]
    importance: dict[str, Importance]
    octaves: dict[str, Counts] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    turn: int = 0

    def fit(self, configs: dict[str, TensorConfig] | None = None, known: Analysis | None = None) -> Analysis:
        """Codebooks, tables and exact code counts of every group.

        Args:
            configs: by group, in place of the layout's.
            known: groups that `configs` does not name are taken from here.
        """
        fitted = {}
        for group, usual in self.layout.groups.items():
            if known is not None and group not in (configs or {}):
                fitted[group] = known.fitted[group]
                continue
            config = (configs or {}).get(group, usual)
            counts, aside = self.joint[group], None
            if group in self.importance:
                prune, protect, prunes = config.codebook.weighing or Weighing(0.0, 0.0, False)
                counts, aside = self.importance[group].aside(counts, prune if prunes else 0.0, protect)
            fitted[group] = fit_group(
                counts, self.windows[group], config.codebook, self.books.get(group), config.refinement_bits,
                self.scales.units.get(group, 0.0), aside, self._turn(group, config.codebook),
            )
        exponents = {fqn: exponent for fqn, exponent in self.scales.exponents.items() if exponent}
        return Analysis(fitted, exponents, self.nonfinite)

    def worst(self, analysis: Analysis) -> dict[str, Worst]:
        """Return, by group, the tensor that is changed most; of groups that are coded by their own values."""
        octaves: dict[str, dict[str, Counts]] = {}
        for fqn, counts in self.octaves.items():
            octaves.setdefault(self.layout.tensors[fqn], {})[fqn] = counts
        found = {}
        for group in octaves.keys() & analysis.fitted.keys():
            joint = self.joint[group]
            worst = worst_tensor(
                analysis.fitted[group], joint.sum(0) if group in self.importance else joint, octaves[group],
                analysis.exponents,
            )
            if worst is not None:
                found[group] = worst
        return found

    def _turn(self, group: str, codebook: CodebookConfig) -> PartitionTurn | None:
        if not codebook.turns:
            return None
        turn = PartitionTurn(codebook.turns, self.turn % codebook.turns)
        parts = [turn.of(size) for size in self.sizes[group]]
        return replace(turn, elements=sum(part.stop - part.start for part in parts))


def analyse(
    load_chunks: Callable[[], Sequence[Chunk]], layout: Layout, parent: ParentModel | None, outlier_octaves: int,
    comm: Communicator, workers: Workers,
) -> tuple[list[Chunk], Analysis]:
    """`build_global_sketch` and fit with the layout's own configuration."""
    sketches = build_global_sketch(load_chunks, layout, parent, outlier_octaves, comm, workers)
    return sketches.chunks, sketches.fit()


def build_global_sketch(
    load_chunks: Callable[[], Sequence[Chunk]],
    layout: Layout,
    parent: ParentModel | None,
    outlier_octaves: int,
    comm: Communicator,
    workers: Workers,
    turn: int = 0,
) -> GlobalSketch:
    """Sketch the local chunks and merge over all ranks.

    Args:
        load_chunks: gives the local chunks; it is called in here so that its failure reaches the other ranks.
        layout: agreed tensors and groups.
        parent: what the parent checkpoint fixed, or None for a keyframe.
        outlier_octaves: when a tensor counts as an outlier of its group (0: never).
        comm: of the ranks that save.
        workers: threads.
        turn: how many deltas came before this one; parts of a tensor may take turns.

    Raises:
        SaveFailed: on all ranks, when any rank failed.
    """
    parent = parent or ParentModel({}, {})
    weighed, by_octave = layout.weighed(), layout.octaves()
    books = {group: parent.books[group] for group in layout.groups if group in parent.books}
    joint = {
        group: np.zeros((book.symbols + 1, book.window.size), np.int64) for group, book in books.items()
        if group not in weighed
    }
    index = {name: place for place, name in enumerate(layout.rows())}
    octaves = np.zeros((len(index), OCTAVES), np.int64)  # elements by biased exponent; 255 counts Inf and NaN
    faint = np.zeros(len(index), np.int64)  # chunks that are not zero, and hold no normal number
    by_importance = {group: np.zeros(FULL.size, np.int64) for group in weighed}

    def first_pass() -> tuple[list[Chunk], list[Sparse]]:
        loaded = list(load_chunks())
        chunks = [replace(c, exponent=parent.exponents.get(c.key.fqn, 0.0)) for c in loaded if c.group != MEASURED]
        gauges = [chunk for chunk in loaded if chunk.group == MEASURED]
        gauges += [
            Chunk(c.key._replace(fqn=GRADIENT + c.key.fqn), c.gradient, MEASURED, 0)
            for c in chunks if c.gradient is not None
        ]
        sketches = sparse_of([replace(c, frame=None) if c.group in by_octave else c for c in chunks], workers)
        for sparse in [*sketches, *sparse_of(gauges, workers)]:
            octaves[index[sparse.chunk.key.fqn]] += octaves_of(sparse.bins, sparse.counts)
            if sparse.chunk.group in by_octave and (sparse.bins > FULL.n).any():
                octaves[index[sparse.chunk.key.fqn], -1] += 1  # negative: no second moment, so it is stored exactly
        for chunk in chunks:
            place = index[chunk.key.fqn]
            if vanishes(chunk):
                octaves[place, -1] += 1
            elif chunk.base_values is None and not octaves[place, 1:].any() and bool((chunk.tensor != 0).any()):
                faint[place] += 1
        diverged = {fqn for fqn in layout.tensors if octaves[index[fqn], -1]}  # must not shape their group's codebook
        sound = [chunk for chunk in chunks if chunk.key.fqn not in diverged]
        let_signals_through()
        add_joint(sound, joint, {group: book.window for group, book in books.items()}, workers)
        for group, counts in by_importance.items():
            for chunk in sound:
                if chunk.group == group and chunk.gradient is not None:
                    kernels.sketch(importance_of(chunk, slice(None)), FULL.lo, FULL.hi, 1.0, counts)
        return chunks, sketches

    done, failure = _attempt(first_pass)
    _merge([octaves, faint, *joint.values(), *by_importance.values()], comm, failure)
    octaves[:, -1] += np.where(octaves[:, 1:].any(axis=1), 0, faint)
    chunks, sketches = done or ([], [])
    bad = frozenset(fqn for fqn in layout.tensors if octaves[index[fqn], -1])
    weights = [fqn for fqn, group in layout.tensors.items() if group.startswith("weights/")]
    scales = choose_scales(
        {name: octaves[place] for name, place in index.items()}, layout.tensors, layout.groups,
        gauges_of(weights, layout.state, layout.averaged), books, parent.exponents, outlier_octaves,
    )
    books = {group: book for group, book in books.items() if group not in scales.anew}
    windows = {
        group: books[group].window if group in books else WINDOW if group in by_octave else FULL
        for group in layout.groups
    }
    importance = {group: Importance(by_importance[group], _fractions(layout, group)) for group in weighed}
    kept = [
        replace(c, exponent=scales.exponents[c.key.fqn], parent=None if c.group in scales.anew else c.parent)
        for c in chunks if c.key.fqn not in bad
    ]
    again = {group: np.zeros(_shape(group, books, windows, importance), np.int64) for group in layout.groups
             if group in scales.anew or group in scales.moved or group in weighed}

    def second_pass() -> None:
        whole = {group for group in again if (group in books or group in by_octave) and group not in weighed}
        add_joint([chunk for chunk in kept if chunk.group in whole], again, windows, workers)
        for sparse in sketches:
            group, fqn = sparse.chunk.group, sparse.chunk.key.fqn
            if group in again and group not in whole and group not in weighed and fqn not in bad:
                add_shifted(sparse, scales.exponents[fqn], again[group], workers)
        for chunk in kept:
            if chunk.group in weighed:
                mine = importance[chunk.group]
                add_by_class(
                    chunk, windows[chunk.group], mine.edges, mine.neutral, again[chunk.group], workers
                )

    if again:
        _, failure = _attempt(second_pass)
        _merge(list(again.values()), comm, failure)
    plain = {
        group for group, config in layout.groups.items()
        if config.codebook.coordinates == "values" and not config.codebook.turns and not layout.residual
    }
    return GlobalSketch(
        kept, layout, {**joint, **again}, windows, books, scales, bad, importance,
        {fqn: octaves[index[fqn]] for fqn, group in layout.tensors.items() if group in plain and fqn not in bad},
        _sizes(kept, layout, comm), turn,
    )


def _sizes(chunks: Sequence[Chunk], layout: Layout, comm: Communicator) -> dict[str, list[int]]:
    """Elements of every chunk of every rank, by group, of groups whose parts take turns: codes follow from them."""
    groups = [group for group, config in layout.groups.items() if config.codebook.turns]
    if not groups:
        return {}
    everywhere = comm.gather([(chunk.group, chunk.key.elements) for chunk in chunks])
    return {group: [size for rank in everywhere for name, size in rank if name == group] for group in groups}


def _fractions(layout: Layout, group: str) -> Fractions:
    """Those a search will ask for, and the group's own."""
    own = layout.groups[group].codebook.weighing
    assert own is not None
    return Fractions((*layout.fractions.prune, own.prune), (*layout.fractions.protect, own.protect))


def _shape(
    group: str, books: dict[str, Codebook], windows: dict[str, KeyWindow], importance: dict[str, Importance]
) -> tuple[int, ...]:
    rows = books[group].symbols + 1 if group in books else 1
    one = (rows, windows[group].size)
    return (len(importance[group].edges) + 1, *one) if group in importance else one


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
    """The result of local work, or its failure, which must still reach the other ranks in the collective."""
    try:
        result = work()
        let_signals_through()
        return result, None
    except BaseException as error:
        return None, error


def _merge(arrays: Sequence[Counts], comm: Communicator, failure: BaseException | None) -> None:
    """Sum all arrays over the ranks in one all-reduce, in place."""
    flat = np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.zeros(0, np.int64)
    merged = sum_with_status(comm, flat, failure)
    start = 0
    for array in arrays:
        array[...] = merged[start : start + array.size].reshape(array.shape)
        start += array.size
