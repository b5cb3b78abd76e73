"""Chains of codes written anew: the codes of a group given those of the keyframe alone, or given none.

Codes, and so values, stay as they are, and with them codebooks, scales, protected values and refinement, which none of
this reads. Only what the codes are coded given changes, and the model with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dsq_ckpt.coding import Coder, RansCoder, fit_fastest
from dsq_ckpt.coding.pairs import count_pairs
from dsq_ckpt.core.arrays import Codes, Counts
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.shard import RecordRef

_ALONE = 256  # the row of counts of codes that are coded given none


class Recoding:
    """The codes of one group of a file, and the model by which they are written anew.

    Chunks are decoded twice, to be counted and to be coded, so that the codes of one at a time are in memory.

    Args:
        checkpoint: the checkpoint that is merged.
        chains: the records that the codes of each chunk of the group are decoded through, newest first.
        keyframe: code them given none, whatever that takes; otherwise so where it is no larger.
        workers: threads.

    Attributes:
        coder: the new model.
        given: whether codes are coded given those of the oldest record of their chain.

    Raises:
        CorruptCheckpoint: a record of a chain is altered, or does not fit.
    """

    def __init__(
        self, checkpoint: Checkpoint, chains: Sequence[Sequence[RecordRef]], keyframe: bool, workers: Workers
    ) -> None:
        self._checkpoint, self._workers = checkpoint, workers
        counts = np.zeros((_ALONE + 1, 256), np.int64)
        for chain in chains:
            codes, before = self._codes(chain)
            for where in workers.blocks(len(codes)):  # without a parent a count takes eight bytes for each code
                if before is None:
                    counts[_ALONE] += np.bincount(codes[where], minlength=256)
                else:
                    counts[:_ALONE] += count_pairs(before[where], codes[where])
        symbols = checkpoint.read_codebook(chains[0][0]).symbols
        contexts = max((checkpoint.read_codebook(chain[-1]).symbols for chain in chains if len(chain) > 1), default=0)
        if counts[:, symbols:].any() or counts[contexts:_ALONE].any():
            file = checkpoint.directory / chains[0][0].file
            raise CorruptCheckpoint(f"'{file}' has codes that its codebook does not have, or an ancestor of it has")
        joint = counts[[*range(contexts), _ALONE], :symbols]
        given, alone = fit_fastest(joint), RansCoder.fit(joint.sum(0, keepdims=True))
        self.given = not keyframe and _bits(given, joint) < _bits(alone, joint.sum(0, keepdims=True))
        self.coder = given if self.given else alone

    def blocks(self, chain: Sequence[RecordRef], size: int) -> Iterator[bytes | None]:
        """Yield the blocks of a chunk, `size` codes each; None where they equal those they are coded given."""
        codes, before = self._codes(chain)
        if not self.given:
            before = None

        def encode(start: int) -> bytes | None:
            own, previous = codes[start : start + size], None if before is None else before[start : start + size]
            if previous is not None and np.array_equal(own, previous):
                return None
            return self.coder.encode(own, previous)

        yield from self._workers.map(encode, range(0, len(codes), size))

    def _codes(self, chain: Sequence[RecordRef]) -> tuple[Codes, Codes | None]:
        """Return the codes of a chunk, and those of the oldest record of its chain if that is another."""
        codes = self._checkpoint.decode_codes(chain[0], self._workers)
        return codes, self._checkpoint.decode_codes(chain[-1], self._workers) if len(chain) > 1 else None


def _bits(coder: Coder, counts: Counts) -> float:
    return coder.expected_bits(counts) + 8 * len(coder.to_bytes())
