"""Whether weights are later ones of the training that earlier codes are of.

Two trainings of one architecture, as the folds of a cross-validation, have the same names and shapes. Their weights are
independent of each other, while those of one training stay alike for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np

from dsq_ckpt.core.arrays import F64, Codes, Counts
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.quantization.chunk import ChunkKey, CodeSource

_SAMPLE = 4096
"""Elements of a chunk that tell."""
_SHUFFLES = 8
_SPREADS, _AT_LEAST = 2.0, 20.0
"""How much more codes tell of each other than shuffled ones do by chance, if they are related: ranges of that, nats."""
_RARE = 64
"""Codes other than the most frequent one that a sample needs to tell anything."""
_UNRELATED = 16
"""Chunks without any relation after which the others are not looked at."""


class Kinship:
    """A look at the weights of one rank as they are quantized, until one of them is related to what it was.

    Args:
        history: checkpoints whose codes are in memory.
        context: of the save.

    Attributes:
        found: whether any weights depend on the checkpoint before; None where that cannot be told.
    """

    def __init__(self, history: SaveHistory, context: SaveContext) -> None:
        self._earlier: Mapping[ChunkKey, Codes] = {}
        self._unrelated = 0
        self.found: bool | None = None
        before = (context.previous, context.parent) if not context.layout.residual else ()
        for known in (history.find(one.save_id) for one in before if one is not None):
            if known is not None and known.cache.codes:
                self._earlier = known.cache.codes
                break

    def wants(self, key: ChunkKey, group: str) -> bool:
        """Return whether a chunk can tell more."""
        undecided = self.found is not True and self._unrelated < _UNRELATED
        return undecided and group.startswith("weights/") and key in self._earlier and key.elements >= _SAMPLE

    def look(self, key: ChunkKey, codes: Codes) -> None:
        """Compare the codes of a chunk that is wanted with its earlier ones."""
        found = None if self.found else are_related(codes, self._earlier[key])
        self.found = self.found if found is None else found
        self._unrelated += found is False

    def look_at(self, sources: Iterable[CodeSource]) -> None:
        """Look at staged chunks, until one of them tells; of those on a device only what is looked at is waited for."""
        for source in sources:
            if self.wants(source.key, source.group):
                source.block(slice(0, 0))  # codes of a device are valid from here on
                self.look(source.key, source.codes)


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
    if min(len(codes) - np.bincount(codes).max() for codes in (one, other)) < _RARE:
        return None
    by_chance = [_information(one, other[order]) for order in _shuffles()]
    most = max(by_chance)
    return _information(one, other) > most + _SPREADS * (most - min(by_chance)) + _AT_LEAST / len(one)


@cache
def _shuffles() -> list[Counts]:
    """Return the orders of a sample that show what codes tell of each other by chance."""
    generator = np.random.default_rng(0)
    return [generator.permutation(_SAMPLE) for _ in range(_SHUFFLES)]


def _information(one: Codes, other: Codes) -> float:
    """Return the mutual information of two lists of codes, in nats per code, but for what no order of them changes."""
    counts = np.bincount(one.astype(np.int64) << 8 | other)
    pairs: F64 = counts[counts > 0] / len(one)
    return float((pairs * np.log(pairs)).sum())
