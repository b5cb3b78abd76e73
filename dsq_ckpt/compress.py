"""From chunks to codes: sketch, merge over ranks, fit, quantize.

One all-reduce per save carries everything: a status word, the number of non-finite elements of every tensor, and the
sketch of every group. A keyframe needs a small one before it (magnitudes per tensor, to find outlier tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dsq_ckpt.chunk import Chunk, block_values, sketch_block
from dsq_ckpt.codebook import Codebook, Fitted, fit_group
from dsq_ckpt.comm import Communicator, sum_with_status
from dsq_ckpt.config import TensorConfig
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
            groups.update(part.groups)
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

    Args:
        load_chunks: gives the local chunks; it is called in here so that its failure reaches the other ranks.
        layout: agreed tensors and groups.
        parent: what the parent checkpoint fixed, or None for a keyframe.
        outlier_octaves: when a tensor counts as an outlier of its group (0: never); decided at keyframes.

    Returns:
        The chunks, normalised, without those of non-finite tensors, and the analysis.

    Raises:
        SaveFailed: on all ranks, when any rank failed.
    """
    books = parent.books if parent else {}
    windows = {group: books[group].window if group in books else FULL for group in layout.groups}
    rows = {group: books[group].symbols + 1 if group in books else 1 for group in layout.groups}
    arrays = {group: np.zeros((rows[group], windows[group].size), np.int64) for group in layout.groups}
    if parent is None:
        chunks, exponents, bad = _sketch_keyframe(load_chunks, layout, outlier_octaves, arrays, comm, workers)
    else:
        exponents = dict(parent.exponents)
        chunks, bad = _sketch_delta(load_chunks, layout, exponents, windows, arrays, comm, workers)
    fitted = {
        group: fit_group(
            arrays[group], windows[group], tensor_config.codebook, books.get(group), tensor_config.refinement_bits
        )
        for group, tensor_config in layout.groups.items()
    }
    kept = [chunk for chunk in chunks if chunk.key.fqn not in bad]
    return kept, Analysis(fitted, {fqn: e for fqn, e in exponents.items() if e}, bad)


def _sketch_delta(
    load_chunks: Callable[[], Sequence[Chunk]], layout: Layout, exponents: Mapping[str, int],
    windows: Mapping[str, KeyWindow], arrays: dict[str, Counts], comm: Communicator, workers: Workers,
) -> tuple[list[Chunk], frozenset[str]]:
    """Joint sketches of all groups in one pass and one all-reduce; `arrays` become the global counts."""
    index = {fqn: place for place, fqn in enumerate(layout.tensors)}
    nonfinite = np.zeros(len(index), np.int64)

    def local() -> list[Chunk]:
        chunks = [replace(chunk, exponent=exponents.get(chunk.key.fqn, 0)) for chunk in load_chunks()]
        for group, array in arrays.items():
            mine = [chunk for chunk in chunks if chunk.group == group]
            work = partial(_joint_share, window=windows[group], like=array, workers=workers)
            for counts, bad in workers.map(work, _shares(mine, workers)):
                array += counts
                for fqn, count in bad.items():
                    nonfinite[index[fqn]] += count
        return chunks

    chunks, failure = _attempt(local)
    _merge([nonfinite, *arrays.values()], comm, failure)
    return chunks or [], frozenset(fqn for fqn, place in index.items() if nonfinite[place])


def _joint_share(
    share: Sequence[Chunk], window: KeyWindow, like: Counts, workers: Workers
) -> tuple[Counts, dict[str, int]]:
    bad_columns = [window.n - 1, 2 * window.n - 1]
    counts = np.zeros_like(like)
    bad: dict[str, int] = {}
    for chunk in share:
        before = int(counts[:, bad_columns].sum())
        _sketch_chunk(chunk, window, counts, workers)
        found = int(counts[:, bad_columns].sum()) - before
        if found:
            bad[chunk.key.fqn] = bad.get(chunk.key.fqn, 0) + found
            apart = np.zeros_like(counts)  # a diverged tensor must not shape the codebook of its group
            _sketch_chunk(chunk, window, apart, workers)
            counts -= apart
    return counts, bad


def _sketch_keyframe(
    load_chunks: Callable[[], Sequence[Chunk]], layout: Layout, outlier_octaves: int, arrays: dict[str, Counts],
    comm: Communicator, workers: Workers,
) -> tuple[list[Chunk], dict[str, int], frozenset[str]]:
    """Sketches of all groups in one pass; two all-reduces, since normalisation needs magnitudes per tensor first.

    Multiplying by a power of two adds to the key, so outlier tensors are normalised in their sketch, not by a second
    pass over the data.
    """
    index = {fqn: place for place, fqn in enumerate(layout.tensors)}
    # One row per tensor: elements by biased exponent; the last column (exponent 255) counts Inf and NaN.
    octaves = np.zeros((len(index), _OCTAVES), np.int64)

    def local() -> tuple[list[Chunk], list[tuple[Chunk, Counts, Counts]]]:
        chunks = list(load_chunks())
        pieces = [piece for share in _shares(chunks, workers) for piece in share]
        sketches = []
        for piece, bins, counts in workers.map(lambda piece: _sparse(piece, workers), pieces):
            octaves[index[piece.key.fqn]] += _octaves(bins, counts)
            sketches.append((piece, bins, counts))
        return chunks, sketches

    done, failure = _attempt(local)
    _merge([octaves], comm, failure)
    bad = frozenset(fqn for fqn, place in index.items() if octaves[place, -1])
    exponents = _outlier_exponents(octaves, layout, outlier_octaves) if outlier_octaves else {}
    chunks, sketches = done or ([], [])
    for piece, bins, counts in sketches:
        exponent = exponents.get(piece.key.fqn, 0)
        if piece.key.fqn in bad:
            continue
        if exponent < 0 and (bins % FULL.n == 0).any():  # subnormals become normal; their sketch does not tell how
            _sketch_chunk(replace(piece, exponent=exponent), FULL, arrays[piece.group], workers)
        else:
            np.add.at(arrays[piece.group][0], _shifted(bins, exponent), counts)
    _merge(list(arrays.values()), comm, None)
    return [replace(c, exponent=exponents.get(c.key.fqn, 0)) for c in chunks], exponents, bad


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


def _sparse(chunk: Chunk, workers: Workers) -> tuple[Chunk, Counts, Counts]:
    """A chunk's full sketch: occupied bins and their counts."""
    counts = np.zeros((1, FULL.size), np.int64)
    _sketch_chunk(chunk, FULL, counts, workers)
    bins = np.flatnonzero(counts[0])
    return chunk, bins, counts[0, bins]


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


def _outlier_exponents(octaves: Counts, layout: Layout, outlier_octaves: int) -> dict[str, int]:
    """Powers of two that bring outlier tensors to their group's size.

    Size is log2 of a tensor's root mean square, and the group's is the median of its elements' tensors: a single wild
    tensor does not move it.
    """
    centres = np.arange(_OCTAVES, dtype=np.float64) - 127 + 0.5
    held = octaves[:, 1:255].sum(1)
    mean_square = (octaves * 4.0**centres)[:, 1:255].sum(1) / np.maximum(held, 1)
    size = 0.5 * np.log2(np.maximum(mean_square, 1e-300))
    names = list(layout.tensors)
    exponents: dict[str, int] = {}
    for group in layout.groups:
        places = [p for p, fqn in enumerate(names) if layout.tensors[fqn] == group and held[p]]
        if len(places) < 2:
            continue
        places.sort(key=lambda place: size[place])
        cumulative = np.cumsum(held[places])
        median = size[places[int(np.searchsorted(cumulative, cumulative[-1] / 2))]]
        for place in places:
            distance = float(size[place] - median)
            if abs(distance) >= outlier_octaves:
                exponents[names[place]] = int(np.clip(round(distance), -100, 100))
    return exponents
