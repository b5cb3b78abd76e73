"""The global sketch of a save: counts of its values over all ranks, from which codebooks are fitted.

One all-reduce per save carries the octaves of every tensor and the joint sketch of every group, without columns that
are empty on all ranks. Outliers, non-finite values and the size of gradients are read from the octaves. A second
all-reduce is needed for groups that are refit, whose scales changed, or that weigh elements by sensitivity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.distributed.counts import sum_counts
from dsq_ckpt.kernels.keys import FULL, KeyWindow
from dsq_ckpt.quantization.analysis import GlobalSketch, ImportanceClasses
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey
from dsq_ckpt.quantization.codebook import Codebook
from dsq_ckpt.quantization.layout import GRADIENT_PREFIX, MEASURE_ONLY, Fractions, Layout, ParentModel
from dsq_ckpt.quantization.passes import (
    SparseSketch,
    add_by_class,
    add_joint,
    add_shifted,
    importance_of,
    is_on_host,
    sketch_chunks,
    underflows,
)
from dsq_ckpt.quantization.restored_values import LoadCounts
from dsq_ckpt.quantization.scales import OCTAVES, choose_scales, count_octaves_of_bins

_T = TypeVar("_T")


class LocalChunks(NamedTuple):
    """Contribution of one rank to the global sketch.

    Attributes:
        chunks: lossy chunks, and chunks that are measured without being stored.
        nan_tensors: number of other tensors that hold NaN.
        lost_row_weights: number of weights with lost rows (`lost_rows`) that the user is to be warned of.
        loads, loads_of_moments: see `GlobalSketch.loads`.
    """

    chunks: Sequence[Chunk]
    nan_tensors: int = 0
    lost_row_weights: int = 0
    loads: int = 0
    loads_of_moments: int = 0


def build_global_sketch(
    load_chunks: Callable[[], LocalChunks], layout: Layout, parent: ParentModel | None, outlier_octaves: int,
    comm: Communicator, workers: Workers,
) -> GlobalSketch:
    """Sketch the local chunks and sum the counts over all ranks; collective.

    Args:
        load_chunks: function that returns the chunks of this rank. It is called inside the collective, so that the
            other ranks learn of its failure.
        layout: tensors and groups, the same on all ranks.
        parent: settings of the parent checkpoint, or None for a keyframe.
        outlier_octaves: distance in octaves from which a tensor is an outlier of its group (0: never).
        comm: communicator of the ranks that save.
        workers: threads.

    Raises:
        SaveFailed: any rank failed; raised on all ranks.
    """
    parent = parent or ParentModel({}, {})
    weighed, by_octave = layout.sensitivity_groups(), layout.octave_groups()
    books = {group: parent.books[group] for group in layout.groups if group in parent.books}
    joint = {
        group: np.zeros((book.symbols + 1, book.window.size), np.int64) for group, book in books.items()
        if group not in weighed
    }
    index = {name: number for number, name in enumerate(layout.octave_names())}
    octaves = np.zeros((len(index), OCTAVES), np.int64)  # elements by biased exponent; 255 counts Inf and NaN
    faint = np.zeros(len(index), np.int64)  # chunks that are not all zero but hold no normal number
    sums = np.zeros(len(LocalChunks._fields) - 1, np.int64)
    by_importance = {group: np.zeros(FULL.size, np.int64) for group in weighed}
    windows = {group: book.window for group, book in books.items()}
    counted: frozenset[ChunkKey] = frozenset()  # chunks whose octaves the joint pass counts

    def first_pass() -> tuple[list[Chunk], list[SparseSketch]]:
        nonlocal counted
        loaded, *sums[:] = load_chunks()
        chunks = [c.scaled(parent.exponents.get(c.key.fqn, 0.0)) for c in loaded if c.group != MEASURE_ONLY]
        gauges = [chunk for chunk in loaded if chunk.group == MEASURE_ONLY]
        gauges += [
            Chunk(c.key._replace(fqn=GRADIENT_PREFIX + c.key.fqn), c.gradient, MEASURE_ONLY, 0)
            for c in chunks if c.gradient is not None
        ]
        counted = frozenset(chunk.key for chunk in chunks if chunk.group in joint and is_on_host(chunk))
        sketches = sketch_chunks([
            replace(c, frame=None) if c.group in by_octave else c for c in chunks if c.key not in counted
        ], workers)
        for sparse in [*sketches, *sketch_chunks(gauges, workers)]:
            octaves[index[sparse.chunk.key.fqn]] += count_octaves_of_bins(sparse.bins, sparse.counts)
            if sparse.chunk.group in by_octave and (sparse.bins > FULL.n).any():
                octaves[index[sparse.chunk.key.fqn], -1] += 1  # a negative value is no second moment: stored exactly
        by_sign: dict[str, Counts] = {}
        add_joint([chunk for chunk in chunks if chunk.key in counted], joint, windows, workers, by_sign)
        for fqn, counts in by_sign.items():
            octaves[index[fqn]] += counts[:OCTAVES] + counts[OCTAVES:]
            if layout.tensors[fqn] in by_octave and counts[OCTAVES + 1 :].any():
                octaves[index[fqn], -1] += 1
        for chunk in chunks:
            number = index[chunk.key.fqn]
            if underflows(chunk):
                octaves[number, -1] += 1
            elif chunk.base_values is None and not octaves[number, 1:].any() and bool((chunk.tensor != 0).any()):
                faint[number] += 1
        diverged = {fqn for fqn in layout.tensors if octaves[index[fqn], -1]}  # must not shape their group's codebook
        sound = [chunk for chunk in chunks if chunk.key.fqn not in diverged]
        run_pending_handlers()
        is_stale = any(key.fqn in diverged for key in counted)
        for array in joint.values() if is_stale else ():
            array[...] = 0
        add_joint([chunk for chunk in sound if is_stale or chunk.key not in counted], joint, windows, workers)
        for group, counts in by_importance.items():
            for chunk in sound:
                if chunk.group == group and chunk.gradient is not None:
                    kernels.sketch(importance_of(chunk, slice(None)), FULL.lo, FULL.hi, 1.0, counts)
        return chunks, sketches

    result, failure = _attempt(first_pass)
    sum_counts(comm, [octaves, faint, sums, *joint.values(), *by_importance.values()], failure)
    octaves[:, -1] += np.where(octaves[:, 1:].any(axis=1), 0, faint)
    chunks, sketches = result or ([], [])
    bad = frozenset(fqn for fqn in layout.tensors if octaves[index[fqn], -1])
    scales = choose_scales(
        {name: octaves[number] for name, number in index.items()}, layout, books, parent.exponents, outlier_octaves
    )
    bad |= scales.out_of_range
    stale = {layout.tensors[fqn] for fqn in scales.out_of_range}  # groups whose joint sketch counts such a tensor
    books = {group: book for group, book in books.items() if group not in scales.refit}
    windows = {group: books[group].window if group in books else FULL for group in layout.groups}
    importance = {group: ImportanceClasses(by_importance[group], _fractions(layout, group)) for group in weighed}
    lossy = [
        c.scaled(scales.exponents[c.key.fqn], keep_parent=c.group not in scales.refit)
        for c in chunks if c.key.fqn not in bad
    ]
    second_counts = {group: np.zeros(_shape(group, books, windows, importance), np.int64) for group in layout.groups
             if group in scales.refit or group in scales.rescaled or group in weighed or group in stale}

    def second_pass() -> None:
        full = {group for group in second_counts if (group in books or group in by_octave) and group not in weighed}
        add_joint([chunk for chunk in lossy if chunk.group in full], second_counts, windows, workers)
        late = [chunk for chunk in lossy if chunk.key in counted and chunk.group in second_counts.keys() - full]
        for sparse in [*sketches, *sketch_chunks(late, workers)]:
            group, fqn = sparse.chunk.group, sparse.chunk.key.fqn
            if group in second_counts and group not in full and group not in weighed and fqn not in bad:
                add_shifted(sparse, scales.exponents[fqn], second_counts[group], workers)
        for chunk in lossy:
            if chunk.group in weighed:
                classes = importance[chunk.group]
                add_by_class(
                    chunk, windows[chunk.group], classes.edges, classes.neutral, second_counts[chunk.group], workers
                )

    if second_counts:
        _, failure = _attempt(second_pass)
        sum_counts(comm, list(second_counts.values()), failure)
    plain = {
        group for group, config in layout.groups.items()
        if config.codebook.coordinates == "values" and not config.codebook.turns and not layout.residual
    }
    return GlobalSketch(
        lossy, layout, {**joint, **second_counts}, windows, books, scales, bad, importance,
        {fqn: octaves[index[fqn]] for fqn, group in layout.tensors.items() if group in plain and fqn not in bad},
        _sizes(lossy, layout, comm), parent.depth, bool(sums[0]), bool(sums[1]), LoadCounts(int(sums[2]), int(sums[3])),
    )


def _sizes(chunks: Sequence[Chunk], layout: Layout, comm: Communicator) -> dict[str, list[int]]:
    """Return the sizes of all chunks of all ranks, by group, for groups whose parts take turns."""
    groups = [group for group, config in layout.groups.items() if config.codebook.turns]
    if not groups:
        return {}
    all_sizes = gather_from_all_ranks(comm, lambda: [(chunk.group, chunk.key.elements) for chunk in chunks])
    return {group: [size for rank in all_sizes for name, size in rank if name == group] for group in groups}


def _fractions(layout: Layout, group: str) -> Fractions:
    """Return the fractions of the group and the fractions that a search may try."""
    weighing = layout.groups[group].codebook.weighing
    assert weighing is not None
    return Fractions((*layout.fractions.prune, weighing.prune), (*layout.fractions.protect, weighing.protect))


def _shape(
    group: str, books: dict[str, Codebook], windows: dict[str, KeyWindow], importance: dict[str, ImportanceClasses]
) -> tuple[int, ...]:
    rows = books[group].symbols + 1 if group in books else 1
    shape = (rows, windows[group].size)
    return (len(importance[group].edges) + 1, *shape) if group in importance else shape


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
    """Return the result and the exception of local work; a failed rank still has to take part in the collective."""
    try:
        result = work()
        run_pending_handlers()
        return result, None
    except BaseException as error:
        return None, error
