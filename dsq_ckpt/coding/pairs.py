"""Counts of symbols by context, to which a model of rANS is fitted."""

from __future__ import annotations

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.core.arrays import I64, Codes
from dsq_ckpt.kernels.checks import check_array
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import sketches

_TABLES = 4  # used in turn, so that a run of equal pairs does not wait for each previous increment
_TABLE_GAP = 16  # entries between tables, so that their distances are not multiples of a page


@jit
def _count(contexts, symbols, bits, counts):  # type: ignore[no-untyped-def]
    whole = symbols.size // 4 * 4
    for i in range(0, whole, 4):
        counts[0, np.uint32(contexts[i]) << bits | symbols[i]] += np.uint32(1)
        counts[1, np.uint32(contexts[i + 1]) << bits | symbols[i + 1]] += np.uint32(1)
        counts[2, np.uint32(contexts[i + 2]) << bits | symbols[i + 2]] += np.uint32(1)
        counts[3, np.uint32(contexts[i + 3]) << bits | symbols[i + 3]] += np.uint32(1)
    for i in range(whole, symbols.size):
        counts[0, np.uint32(contexts[i]) << bits | symbols[i]] += np.uint32(1)


def count_pairs(contexts: Codes, symbols: Codes) -> I64:
    """Count the symbols of each context: int64[256, 256].

    Args:
        contexts: uint8[n], n below 2**32.
        symbols: uint8[n].

    Raises:
        ValueError: their lengths differ.
    """
    if contexts.shape != symbols.shape:
        raise ValueError(f"{contexts.shape} contexts and {symbols.shape} symbols, expected as many of both")
    for name, array in (("contexts", contexts), ("symbols", symbols)):
        check_array(name, array, np.uint8, (symbols.size,))
    bits = int(symbols.max(initial=0)).bit_length()
    rows, columns = int(contexts.max(initial=0)) + 1, 1 << bits
    path, pair_counts = native.path_index(), np.zeros((256, 256), np.int64)
    if path >= 0:
        sketches.count_pairs(path, contexts, symbols, rows, bits, pair_counts)
        return pair_counts
    counts = np.zeros((_TABLES, (rows << bits) + _TABLE_GAP), np.uint32)
    _count(contexts, symbols, np.uint32(bits), counts)
    pair_counts[:rows, :columns] = counts[:, : rows << bits].sum(0, dtype=np.int64).reshape(rows, columns)
    return pair_counts
