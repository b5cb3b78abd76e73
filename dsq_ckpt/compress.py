"""From chunks to codes: sketch, merge over ranks, fit, quantize.

One all-reduce per save carries everything: a status word, the magnitudes of every tensor (2 KiB each; they tell
outliers and non-finite values) and the joint sketch of every group. Groups that start anew need a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dsq_ckpt.chunk import Chunk, block_values, sketch_block
from dsq_ckpt.codebook import Codebook, Fitted, fit_group
from dsq_ckpt.comm import Communicator, sum_with_status
from dsq_ckpt.config import TensorConfig
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.keys import FULL, KEYS_PER_OCTAVE, KeyWindow
from dsq_ckpt.workers import Workers

Counts = npt.NDArray[np.int64]
_T = TypeVar("_T")
_OCTAVES = 256


@dataclass(frozen=True)
class Layout:
    """What all ranks agree on before they merge: the lossy tensors and their groups, in one order.

    Attributes:
        tensors: group of every lossy tensor, by fully qualified name.
        groups: configuration of every group.
    """

    tensors: dict[str, str]
    groups: dict[str, TensorConfig]

    @classmethod
    def union(cls, parts: Iterable[Layout]) -> Layout:
        """One layout from those of all ranks, sorted."""
        tensors: dict[str, str] = {}
        groups: dict[str, TensorConfig] = {}
        for part in parts:
            tensors.update(part.tensors)
            for name, config in part.groups.items():
                if groups.setdefault(name, config) != config:
                    raise ConfigError(f"ranks save with different configurations: group '{name}' differs")
        return cls(dict(sorted(tensors.items())), dict(sorted(groups.items())))


@dataclass(frozen=True)
class ParentModel:
    """What the parent checkpoint fixes for its child: codebooks by group, normalisation by tensor."""

    books: dict[str, Codebook]
    exponents: dict[str, int]

    def usable_for(self, layout: Layout) -> ParentModel:
        """Without the groups that are to change between linear and log: a linear window does not see small values."""
        return replace(self, books={
            group: book for group, book in self.books.items()
            if group in layout.groups and book.domain == getattr(layout.groups[group].codebook, "domain", "linear")
        })


@dataclass(frozen=True)
class Analysis:
    """The global outcome of the sketch; equal on all ranks.

    Attributes:
        fitted: per group.
        exponents: power of two by which outlier tensors are normalised (others absent).
        nonfinite: tensors with NaN or Inf, to be stored exactly.
    """

    fitted: dict[str, Fitted]
    exponents: dict[str, int]
    nonfinite: frozenset[str]


def analyse(
    load_chunks: Callable[[], Sequence[Chunk]],
    layout: Layout,
    parent: ParentModel | None,
    outlier_octaves: int,
    comm: Communicator,
    workers: Workers,
) -> tuple[list[Chunk], Analysis]:
    """Sketch the local chunks, merge over all ranks, and fit every group.

    A first all-reduce carries magnitudes by tensor and the joint sketches made with the parent's windows and
    normalisation. Groups without a parent, and those that have outgrown it, are then fitted anew on full sketches, in
    a second one; in the steady state there are none.

    Args:
        load_chunks: gives the local chunks; it is called in here so that its failure reaches the other ranks.
        layout: agreed tensors and groups.
        parent: what the parent checkpoint fixed, or None for a keyframe.
        outlier_octaves: when a tensor counts as an outlier of its group (0: never).

    Returns:
        The chunks, normalised, without those of non-finite tensors, and the analysis. Chunks of groups fitted anew have
        no parent.

    Raises:
        SaveFailed: on all ranks, when any rank failed.
    """
    parent = parent or ParentModel({}, {})
    books = {group: parent.books[group] for group in layout.groups if group in parent.books}
    joint = {group: np.zeros((book.symbols + 1, book.window.size), np.int64) for group, book in books.items()}
    index = {fqn: place for place, fqn in enumerate(layout.tensors)}
    octaves = np.zeros((len(index), _OCTAVES), np.int64)  # elements by biased exponent; 255 counts Inf and NaN

    def first_pass() -> tuple[list[Chunk], list[_Sparse]]:
        chunks = [replace(chunk, exponent=parent.exponents.get(chunk.key.fqn, 0)) for chunk in load_chunks()]
        pieces = [piece for share in _shares(chunks, workers) for piece in share]
        sketches = list(workers.map(partial(_sparse, workers=workers), pieces))
        for sparse in sketches:
            octaves[index[sparse.chunk.key.fqn]] += _octaves(sparse.bins, sparse.counts)
        diverged = {fqn for fqn, place in index.items() if octaves[place, -1]}  # must not shape its group's codebook
        for group, array in joint.items():
            mine = [chunk for chunk in chunks if chunk.group == group and chunk.key.fqn not in diverged]
            work = partial(_joint_share, window=books[group].window, like=array, workers=workers)
            for counts in workers.map(work, _shares(mine, workers)):
                array += counts
        return chunks, sketches

    done, failure = _attempt(first_pass)
    _merge([octaves, *joint.values()], comm, failure)
    chunks, sketches = done or ([], [])
    bad = frozenset(fqn for fqn, place in index.items() if octaves[place, -1])
    wanted, anew = _renewed(octaves, layout, parent, outlier_octaves)
    exponents = {
        fqn: wanted.get(fqn, 0) if group in anew else parent.exponents.get(fqn, 0)
        for fqn, group in layout.tensors.items()
    }
    full = {group: np.zeros((1, FULL.size), np.int64) for group in layout.groups if group in anew}

    def second_pass() -> None:
        for sparse in sketches:
            if sparse.chunk.group in full and sparse.chunk.key.fqn not in bad:
                _add_shifted(sparse, exponents[sparse.chunk.key.fqn], full[sparse.chunk.group], workers)

    if full:
        _, failure = _attempt(second_pass)
        _merge(list(full.values()), comm, failure)
    fitted = {}
    for group, config in layout.groups.items():
        counts, window, book = (full[group], FULL, None) if group in full else (
            joint[group], books[group].window, books[group]
        )
        fitted[group] = fit_group(counts, window, config.codebook, book, config.refinement_bits)
    kept = [
        replace(chunk, exponent=exponents[chunk.key.fqn], parent=None if chunk.group in anew else chunk.parent)
        for chunk in chunks if chunk.key.fqn not in bad
    ]
    return kept, Analysis(fitted, {fqn: e for fqn, e in exponents.items() if e}, bad)


class _Sparse(NamedTuple):
    """A piece of a chunk and its full sketch, unscaled: occupied bins and their counts."""

    chunk: Chunk
    bins: Counts
    counts: Counts


def _sparse(chunk: Chunk, workers: Workers) -> _Sparse:
    counts = np.zeros((1, FULL.size), np.int64)
    _sketch_chunk(replace(chunk, parent=None, exponent=0), FULL, counts, workers)
    bins = np.flatnonzero(counts[0])
    return _Sparse(chunk, bins, counts[0, bins])


def _joint_share(share: Sequence[Chunk], window: KeyWindow, like: Counts, workers: Workers) -> Counts:
    counts = np.zeros_like(like)
    for chunk in share:
        _sketch_chunk(chunk, window, counts, workers)
    return counts


def _add_shifted(sparse: _Sparse, exponent: int, counts: Counts, workers: Workers) -> None:
    """Add a sketch as if its values had been divided by 2**exponent: that moves keys, and needs no second pass."""
    if exponent < 0 and (sparse.bins % FULL.n == 0).any():  # subnormals become normal; their sketch does not tell how
        _sketch_chunk(replace(sparse.chunk, parent=None, exponent=exponent), FULL, counts, workers)
    else:
        np.add.at(counts[0], _shifted(sparse.bins, exponent), sparse.counts)


def _renewed(
    octaves: Counts, layout: Layout, parent: ParentModel, outlier_octaves: int
) -> tuple[dict[str, int], frozenset[str]]:
    """Normalisation by tensor as a keyframe would choose it, and the groups that must be fitted anew.

    A group is, when it has no parent; when one of its tensors has come to differ from the group, as it was normalised,
    by as much as makes an outlier; or when most of its energy lies below what its window resolves. Otherwise values
    that shrink, or tensors that were zero before, would all be zero for the codebook.
    """
    distances = _distances(octaves, layout)
    wanted = {fqn: int(np.clip(round(d), -100, 100)) for fqn, d in distances.items()
              if outlier_octaves and abs(d) >= outlier_octaves}
    anew = {group for group in layout.groups if group not in parent.books}
    energy = dict.fromkeys(layout.groups, 0.0)
    resolved = dict.fromkeys(layout.groups, 0.0)
    exponent = np.arange(_OCTAVES)
    for place, (fqn, group) in enumerate(layout.tensors.items()):
        shift = parent.exponents.get(fqn, 0)
        if outlier_octaves and abs(distances.get(fqn, shift) - shift) >= outlier_octaves:
            anew.add(group)
        if group in parent.books and not octaves[place, -1]:
            parts = (octaves[place] * 4.0 ** (exponent - 127.0 - shift))[1:255]
            energy[group] += float(parts.sum())
            first = parent.books[group].window.lo // KEYS_PER_OCTAVE
            resolved[group] += float(parts[exponent[1:255] - shift >= first].sum())
    anew |= {group for group in layout.groups if resolved[group] < energy[group] / 2}
    return wanted, frozenset(anew)


def _distances(octaves: Counts, layout: Layout) -> dict[str, float]:
    """log2 of each tensor's root mean square over that of its group; only where a group has several tensors.

    The group's is the median over its elements, so that one wild tensor does not move it. Tensors of zeros have none.
    """
    centres = np.arange(_OCTAVES, dtype=np.float64) - 127 + 0.5
    held = np.where(octaves[:, -1] > 0, 0, octaves[:, 1:255].sum(1))
    mean_square = (octaves * 4.0**centres)[:, 1:255].sum(1) / np.maximum(held, 1)
    size = 0.5 * np.log2(np.maximum(mean_square, 1e-300))
    names = list(layout.tensors)
    distances: dict[str, float] = {}
    for group in layout.groups:
        places = [p for p, fqn in enumerate(names) if layout.tensors[fqn] == group and held[p]]
        if len(places) < 2:
            continue
        places.sort(key=lambda place: size[place])
        cumulative = np.cumsum(held[places])
        median = size[places[int(np.searchsorted(cumulative, cumulative[-1] / 2))]]
        distances.update({names[place]: float(size[place] - median) for place in places})
    return distances


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """The result of local work, or its failure, which must still reach the other ranks in the collective."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _merge(arrays: Sequence[Counts], comm: Communicator, failure: Exception | None) -> None:
    """Sum all arrays over the ranks in one all-reduce, in place."""
    flat = np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.zeros(0, np.int64)
    merged = sum_with_status(comm, flat, failure)
    start = 0
    for array in arrays:
        array[...] = merged[start : start + array.size].reshape(array.shape)
        start += array.size


def _sketch_chunk(chunk: Chunk, window: KeyWindow, counts: Counts, workers: Workers) -> None:
    flat = chunk.flat()
    for where in workers.blocks(flat.numel()):
        parent = None if chunk.parent is None else chunk.parent[where]
        sketch_block(block_values(flat[where]), parent, window, chunk.exponent, counts)


def _octaves(bins: Counts, counts: Counts) -> Counts:
    """Elements by biased exponent, int64[256]: 0 for zeros and subnormals, 255 for Inf and NaN."""
    place = bins % FULL.n  # 0: under, 1..: key - 63, n - 2: over (none), n - 1: non-finite
    exponent = np.where(place == FULL.n - 1, 255, (place + KEYS_PER_OCTAVE - 1) // KEYS_PER_OCTAVE)
    return np.bincount(exponent, weights=counts, minlength=_OCTAVES).astype(np.int64)


def _shifted(bins: Counts, exponent: int) -> Counts:
    """Bins of the values divided by 2**exponent."""
    if not exponent:
        return bins
    sign, place = np.divmod(bins, FULL.n)
    moved = place - exponent * KEYS_PER_OCTAVE
    moved = np.where(moved < 1, 0, np.where(moved > FULL.n - 3, FULL.n - 1, moved))
    return np.where(place == 0, bins, sign * FULL.n + moved)


def _shares(chunks: Sequence[Chunk], workers: Workers) -> list[list[Chunk]]:
    """Chunks dealt to threads so that each has about the same number of elements; large chunks are split."""
    pieces: list[Chunk] = []
    total = sum(chunk.key.elements for chunk in chunks)
    limit = max(workers.block_elements, -(-total // workers.threads))
    for chunk in chunks:
        if chunk.key.elements <= limit:
            pieces.append(chunk)
            continue
        flat = chunk.flat()
        for start in range(0, chunk.key.elements, limit):
            stop = min(start + limit, chunk.key.elements)
            parent = None if chunk.parent is None else chunk.parent[start:stop]
            key = chunk.key._replace(shape=(stop - start,))
            pieces.append(replace(chunk, key=key, tensor=flat[start:stop], parent=parent))
    shares: list[list[Chunk]] = [[] for _ in range(max(1, min(workers.threads, len(pieces))))]
    loads = [0] * len(shares)
    for piece in sorted(pieces, key=lambda piece: -piece.key.elements):
        lightest = loads.index(min(loads))
        shares[lightest].append(piece)
        loads[lightest] += piece.key.elements
    return shares
