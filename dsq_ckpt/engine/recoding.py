"""Recoding of chains: the codes of a group are coded given those of the keyframe only, or without a parent.

The codes themselves do not change, nor do values, codebooks, scales, protected values and refinement, which are not
read. Only the parent of the codes changes, and with it the model of the coder.
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

_NO_PARENT = 256  # row of the counts for codes without a parent


class GroupRecoder:
    """A recoder of the codes of one group of a file.

    Chunks are decoded twice, for counts and for coding, so that only the codes of one chunk are in memory.

    Args:
        checkpoint: the checkpoint to merge.
        chains: for each chunk of the group, the records that its codes are decoded through, newest first.
        keyframe: code without a parent in any case; otherwise only if that is no larger.
        workers: threads.

    Attributes:
        coder: the fitted coder.
        uses_parent: whether codes are coded given those of the oldest record of their chain.

    Raises:
        CorruptCheckpoint: a record of a chain is altered, or does not fit.
    """

    def __init__(
        self, checkpoint: Checkpoint, chains: Sequence[Sequence[RecordRef]], keyframe: bool, workers: Workers
    ) -> None:
        self._checkpoint, self._workers = checkpoint, workers
        counts = np.zeros((_NO_PARENT + 1, 256), np.int64)
        for chain in chains:
            codes, before = self._decode_chain(chain)
            for block in workers.blocks(len(codes)):  # without a parent a count takes eight bytes for each code
                if before is None:
                    counts[_NO_PARENT] += np.bincount(codes[block], minlength=256)
                else:
                    counts[:_NO_PARENT] += count_pairs(before[block], codes[block])
        symbols = checkpoint.read_codebook(chains[0][0]).symbols
        contexts = max((checkpoint.read_codebook(chain[-1]).symbols for chain in chains if len(chain) > 1), default=0)
        if counts[:, symbols:].any() or counts[contexts:_NO_PARENT].any():
            file = checkpoint.directory / chains[0][0].file
            raise CorruptCheckpoint(f"'{file}' has codes that its codebook does not have, or an ancestor of it has")
        joint = counts[[*range(contexts), _NO_PARENT], :symbols]
        totals = joint.sum(0, keepdims=True)
        conditional, unconditional = fit_fastest(joint), RansCoder.fit(totals)
        self.uses_parent = not keyframe and _count_bits(conditional, joint) < _count_bits(unconditional, totals)
        self.coder = conditional if self.uses_parent else unconditional

    def encode_blocks(self, chain: Sequence[RecordRef], size: int) -> Iterator[bytes | None]:
        """Yield the blocks of a chunk, `size` codes each; None for a block whose codes equal those of the parent."""
        codes, before = self._decode_chain(chain)
        if not self.uses_parent:
            before = None

        def encode(start: int) -> bytes | None:
            block, previous = codes[start : start + size], None if before is None else before[start : start + size]
            if previous is not None and np.array_equal(block, previous):
                return None
            return self.coder.encode(block, previous)

        yield from self._workers.map(encode, range(0, len(codes), size))

    def _decode_chain(self, chain: Sequence[RecordRef]) -> tuple[Codes, Codes | None]:
        """Return the codes of a chunk, and those of the oldest record of its chain if that is another record."""
        codes = self._checkpoint.decode_codes(chain[0], self._workers)
        return codes, self._checkpoint.decode_codes(chain[-1], self._workers) if len(chain) > 1 else None


def _count_bits(coder: Coder, counts: Counts) -> float:
    return coder.expected_bits(counts) + 8 * len(coder.to_bytes())
