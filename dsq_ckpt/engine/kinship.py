"""Whether weights are later ones of the training that earlier codes are of.

Two trainings of one architecture, as the folds of a cross-validation, have the same names and shapes. Their weights are
independent of each other, while those of one training stay alike for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from dsq_ckpt.core.arrays import F64, Codes
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.quantization.chunk import ChunkKey

_SAMPLE = 4096
"""Elements of a chunk that tell."""
_SHUFFLES = 8
_MORE, _AT_LEAST = 1.5, 20.0
"""How much more codes tell of each other than shuffled ones do, by chance, if they are related: a factor, and nats."""


def codes_in_memory(history: SaveHistory, save_ids: Iterable[str]) -> Mapping[ChunkKey, Codes]:
    """Return the codes in memory of the first of these checkpoints that has any."""
    for save_id in save_ids:
        found = history.find(save_id)
        if found is not None and found.cache.codes:
            return found.cache.codes
    return {}


def are_related(codes: Codes, earlier: Codes) -> bool | None:
    """Return whether codes depend on earlier ones of the same chunk; None where that cannot be told.

    Args:
        codes: uint8[n].
        earlier: uint8[n], of the same codebook or of another one.
    """
    step = max(1, len(codes) // _SAMPLE)
    if len(codes) != len(earlier) or len(codes) < _SAMPLE:
        return None
    one, other = codes[::step][:_SAMPLE], earlier[::step][:_SAMPLE]
    generator = np.random.default_rng(0)
    by_chance = max(_information(one, generator.permutation(other)) for _ in range(_SHUFFLES))
    found = _information(one, other)
    return found > _MORE * by_chance + _AT_LEAST / len(one) if by_chance > 0 else None


def _information(one: Codes, other: Codes) -> float:
    """Return the mutual information of two lists of codes, in nats per code."""
    symbols = 1 + int(max(one.max(), other.max()))
    counts = np.bincount(one.astype(np.int64) * symbols + other, minlength=symbols**2)
    pairs: F64 = counts.reshape(symbols, symbols) / len(one)
    rows, columns = np.nonzero(pairs)
    expected = pairs.sum(1)[rows] * pairs.sum(0)[columns]
    return float((pairs[rows, columns] * np.log(pairs[rows, columns] / expected)).sum())
