"""Counts and errors of codes that compensate each other's errors.

They cannot be computed from sketches: compensation enlarges the values that are rounded, and at wide steps such codes
take up to twice the bits of nearest codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.chunk import Chunk, QuantizingChunk, flat_values
from dsq_ckpt.quantization.codebook import GroupFit
from dsq_ckpt.quantization.dequantizer import scale_of


def recount_codes(fitted: Mapping[str, GroupFit], chunks: Sequence[Chunk], workers: Workers) -> dict[str, GroupFit]:
    """Return fits by group with the counts and errors of the stored codes.

    Args:
        fitted: fits by group; those of groups without a compensated chunk are returned unchanged.
        chunks: chunks, including all chunks of the compensated groups.
        workers: threads.
    """
    groups = {chunk.group for chunk in chunks if chunk.compensation is not None} & fitted.keys()
    chunks = [chunk for chunk in chunks if chunk.group in groups]
    counts = {group: np.zeros((1, fitted[group].codebook.symbols), np.int64) for group in groups}
    energy = dict.fromkeys(groups, 0.0)

    def count_codes(chunk: Chunk) -> tuple[Counts, float]:
        return _count_chunk(chunk, fitted[chunk.group], workers.blocks(chunk.key.elements))

    for chunk, (count, error) in zip(chunks, workers.map(count_codes, chunks), strict=True):
        counts[chunk.group] += count
        energy[chunk.group] += error
    for group, count in counts.items():
        assert count.sum() == fitted[group].counts.sum(), group  # otherwise a stored code would have no frequency
    return {**fitted, **{
        group: fitted[group].recounted(count, energy[group] / max(int(count[0, :-1].sum()), 1))
        for group, count in counts.items()
    }}


def _count_chunk(chunk: Chunk, fitted: GroupFit, blocks: Iterable[slice]) -> tuple[Counts, float]:
    """Return how often each code occurs in a chunk, and the sum of squared errors, in units of the codebook."""
    book, values, energy = fitted.codebook, flat_values(chunk.tensor), 0.0
    source, levels = QuantizingChunk(replace(chunk, refinement_bits=0), fitted), np.append(book.levels, 0.0)
    counts = np.zeros(book.symbols, np.int64)
    for span in blocks:
        source.block(span)
        codes = source.codes[span]
        counts += np.bincount(codes, minlength=book.symbols)
        errors = np.where(codes == book.protected, 0.0, levels[codes] - values[span] / scale_of(chunk.exponent))
        energy += float(np.square(errors).sum())
    return counts, energy
