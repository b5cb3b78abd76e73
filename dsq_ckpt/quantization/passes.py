"""Multithreaded passes over the chunks of a rank, which compute their sketches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import F32, F64, Counts
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.kernels.keys import FULL, KEYS_PER_OCTAVE, KeyWindow
from dsq_ckpt.quantization import device
from dsq_ckpt.quantization.chunk import Chunk, block_values, coded_values, settle_streams, sketch_block
from dsq_ckpt.quantization.device.passes import add_joint as add_joint_on_device
from dsq_ckpt.quantization.device.passes import full_sketches

_SMALLEST = float(np.finfo(np.float32).tiny) * 2.0**24


class SparseSketch(NamedTuple):
    """Full sketch of a piece of a chunk, unscaled: occupied bins and their counts."""

    chunk: Chunk
    bins: Counts
    counts: Counts


def sketch_chunks(chunks: Sequence[Chunk], workers: Workers) -> list[SparseSketch]:
    """Return the full sketches of all chunks; a chunk may be sketched in several pieces."""
    on_device, on_host = _split_by_device(chunks)
    try:
        sketches = [
            SparseSketch(chunk, *_occupied_bins(counts))
            for chunk, counts in zip(on_device, full_sketches(on_device), strict=True)
        ]
    except torch.OutOfMemoryError:
        sketches, on_host = [], list(chunks)
    settle_streams(chunk.tensor for chunk in on_host)
    work = partial(_sketch_share, workers=workers)
    return [*sketches, *chain.from_iterable(workers.map(work, _share_out(on_host, workers)))]


def underflows(chunk: Chunk) -> bool:
    """Return whether a chunk that is not all zero would be nearly all zeros in float32."""
    if chunk.tensor.dtype != torch.float64 or not chunk.tensor.numel():
        return False
    return 0 < float(chunk.tensor.detach().abs().max()) < _SMALLEST


def _sketch_share(share: Sequence[Chunk], workers: Workers) -> list[SparseSketch]:
    sketches = []
    for chunk in share:
        counts = np.zeros((1, FULL.size), np.int64)
        _sketch_chunk(replace(chunk, parent=None, exponent=0.0), FULL, counts, workers)
        sketches.append(SparseSketch(chunk, *_occupied_bins(counts[0])))
    return sketches


def _split_by_device(chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks that are processed in device memory, and all others."""
    on_device = [chunk for chunk in chunks if device.is_supported(chunk)]
    return on_device, [chunk for chunk in chunks if not device.is_supported(chunk)]


def _occupied_bins(counts: Counts) -> tuple[Counts, Counts]:
    bins = np.flatnonzero(counts != 0)  # three times as fast as on int64
    return bins, counts[bins]


def is_on_host(chunk: Chunk) -> bool:
    """Return whether a chunk is sketched on the host."""
    return not device.is_supported(chunk)


def add_joint(
    chunks: Sequence[Chunk], joint: dict[str, Counts], windows: Mapping[str, KeyWindow], workers: Workers,
    octaves: dict[str, Counts] | None = None,
) -> None:
    """Add all chunks whose group is in `joint` to the joint sketch of the group.

    Args:
        chunks: chunks of any group.
        joint: counts by group, updated in place.
        windows: key window by group.
        workers: threads.
        octaves: counts by tensor, sign and biased exponent, int64[512], updated in place. The numbers to code are
            counted, but second moments by their own values. Only for chunks on the host.
    """
    for group, array in joint.items():
        members = [chunk for chunk in chunks if chunk.group == group]
        if not members:
            continue
        window = windows[group]
        on_device, on_host = _split_by_device(members) if octaves is None else ([], members)
        try:
            if on_device:
                add_joint_on_device(on_device, window, array)
        except torch.OutOfMemoryError:
            on_host = members
        settle_streams(chunk.tensor for chunk in on_host)
        shares = _share_out(on_host, workers)
        work = partial(_joint_share, window=window, by_octave=octaves is not None, workers=workers)
        targets = [array, *(np.zeros_like(array) for _ in shares[1:])]  # the first share adds to the result itself
        for counts, by_octave in workers.map(work, zip(shares, targets, strict=True)):
            if counts is not array:
                array += counts
            for fqn, octave_counts in by_octave:
                assert octaves is not None
                octaves[fqn] = octaves.get(fqn, 0) + octave_counts


def _joint_share(
    share_into: tuple[Sequence[Chunk], Counts], window: KeyWindow, by_octave: bool, workers: Workers
) -> tuple[Counts, list[tuple[str, Counts]]]:
    share, counts = share_into
    octaves = [np.zeros(512, np.int64) for _ in share if by_octave]
    for number, chunk in enumerate(share):
        _sketch_chunk(chunk, window, counts, workers, octaves[number] if by_octave else None)
    return counts, [(chunk.key.fqn, octave_counts) for chunk, octave_counts in zip(share, octaves, strict=False)]


def importance_of(chunk: Chunk, span: slice) -> F32:
    """Return the sensitivity of a block of a chunk with gradients, for its values or its differences to the parent."""
    assert chunk.gradient is not None
    values = coded_values(chunk.flat(), chunk.base_values, span, chunk.frame)
    return kernels.compute_importance(values, block_values(chunk.gradient.reshape(-1)[span]))


def add_by_class(
    chunk: Chunk, window: KeyWindow, edges: F64, neutral: int, counts: Counts, workers: Workers
) -> None:
    """Add a chunk to the sketch of its group by class of sensitivity.

    Args:
        chunk: the chunk to add.
        window: key window of the sketch.
        edges: sensitivities between the classes, ascending.
        neutral: class of all elements of a chunk without a gradient.
        counts: int64[classes, rows, window.size].
        workers: threads.
    """
    flat = chunk.flat()
    for span in workers.blocks(flat.numel()):
        values = coded_values(flat, chunk.base_values, span, chunk.frame)
        parent = None if chunk.parent is None else chunk.parent[span]
        if chunk.gradient is None:
            kind = np.full(len(values), neutral, np.int64)
        else:
            kind = np.searchsorted(edges, importance_of(chunk, span).astype(np.float64), side="right")
        for number in np.unique(kind):
            mask = kind == number
            sketch_block(values[mask], None if parent is None else parent[mask], window, chunk.exponent, counts[number])


def add_shifted(sparse: SparseSketch, exponent: float, counts: Counts, workers: Workers) -> None:
    """Add a sketch as if its values had been divided by 2**exponent; whole octaves only shift the keys."""
    is_integer = exponent == int(exponent)
    # Subnormals that become normal: their sketch does not resolve them.
    if not is_integer or (exponent < 0 and (sparse.bins % FULL.n == 0).any()):
        scaled = replace(sparse.chunk, parent=None, exponent=exponent)
        if device.is_supported(scaled):
            with suppress(torch.OutOfMemoryError):
                add_joint_on_device([scaled], FULL, counts)
                return
        _sketch_chunk(scaled, FULL, counts, workers)
    else:
        np.add.at(counts[0], _shift_bins(sparse.bins, int(exponent)), sparse.counts)


def _sketch_chunk(
    chunk: Chunk, window: KeyWindow, counts: Counts, workers: Workers, octaves: Counts | None = None
) -> None:
    flat, frame = chunk.flat(), chunk.frame
    for span in workers.blocks(flat.numel()):
        parent = None if chunk.parent is None else chunk.parent[span]
        values = coded_values(flat, chunk.base_values, span, frame)
        sketch_block(values, parent, window, chunk.exponent, counts)
        if octaves is not None:  # while the block is in the cache
            unscaled = values if frame is None or frame.scales is None else block_values(flat[span])
            kernels.count_octaves(unscaled, octaves)


def _shift_bins(bins: Counts, exponent: int) -> Counts:
    """Return the bins of the values after division by 2**exponent."""
    if not exponent:
        return bins
    sign, bin_ = np.divmod(bins, FULL.n)
    moved = bin_ - exponent * KEYS_PER_OCTAVE
    moved = np.where(moved < 1, 0, np.where(moved > FULL.n - 3, FULL.n - 1, moved))
    return np.where(bin_ == 0, bins, sign * FULL.n + moved)


def _share_out(chunks: Sequence[Chunk], workers: Workers) -> list[list[Chunk]]:
    """Partition chunks into shares of about equal numbers of elements, one per thread; large chunks are split."""
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
            values = None if chunk.base_values is None else chunk.base_values[start:stop]
            frame = None if chunk.frame is None else chunk.frame.part(slice(start, stop))
            pieces.append(
                replace(chunk, key=key, tensor=flat[start:stop], parent=parent, base_values=values, frame=frame)
            )
    shares: list[list[Chunk]] = [[] for _ in range(max(1, min(workers.threads, len(pieces))))]
    loads = [0] * len(shares)
    for piece in sorted(pieces, key=lambda piece: -piece.key.elements):
        lightest = loads.index(min(loads))
        shares[lightest].append(piece)
        loads[lightest] += piece.key.elements
    return shares
