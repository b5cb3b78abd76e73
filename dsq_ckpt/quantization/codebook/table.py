"""The table (previous code, key) -> code: nearest level, or the choice that minimises distortion + lambda * bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsq_ckpt.core.arrays import F64, Codes, Counts, Mask
from dsq_ckpt.kernels.jit import jit


def code_counts(joint: Counts, table: Codes, symbols: int) -> Counts:
    """Count how often each code follows each previous code: int64[rows, symbols]; joint: int64[rows, bins]."""
    counts = np.zeros((joint.shape[0], symbols), np.int64)
    rows, bins = np.nonzero(joint)
    np.add.at(counts, (rows, table[rows, bins]), joint[rows, bins])
    return counts


def code_bits(counts: Counts) -> F64:
    """Return -log2 of each code's frequency in its row; codes absent from a row count as half an occurrence."""
    smoothed = np.maximum(counts, 0.5)
    return np.log2(smoothed.sum(1, keepdims=True)) - np.log2(smoothed)


def entropy_bits(counts: Counts) -> float:
    """Return the bits that an ideal coder with one static table per row needs for `counts`."""
    totals = counts.sum(1, keepdims=True)
    seen = counts > 0
    shares = counts / np.maximum(totals, 1)
    return max(0.0, float(-(counts[seen] * np.log2(shares[seen])).sum()))


def rate_distortion_table(
    joint: Counts, points: F64, base: Codes, movable: Mask, positions: F64,
    codes: Codes, price: float, iterations: int = 3,
) -> Codes:
    """Refine a nearest-level assignment: each entry minimises (point - level)^2 + price * bits(code | row).

    Only the nearest level and its two neighbours compete, so that no value moves further than one level: the cells
    stay narrow and the refinement layer precise. The bits come from the assignment itself, iterated to a fixed
    point (entropy-constrained quantization: Chou, Lookabaugh and Gray, 1989, section III).

    Args:
        joint: int64[rows, bins], occurrences.
        points: float64[bins], the value of each bin in the domain where distance is measured.
        base: uint8[bins], code of the nearest level.
        movable: bool[bins], False where the code is forced (protected).
        positions, codes: float64[k], uint8[k], the levels in ascending order and their codes.
        price: lambda in squared units of `points`.

    Returns:
        uint8[rows, bins].
    """
    rows = joint.shape[0]
    table = np.broadcast_to(base, (rows, len(base))).copy()
    if price <= 0 or len(codes) < 2:
        return table
    symbols = int(base.max(initial=0)) + 2
    symbols = max(symbols, int(codes.max()) + 2)
    rank_of = np.zeros(256, np.int64)
    rank_of[codes] = np.arange(len(codes))
    for _ in range(iterations):
        bits = code_bits(code_counts(joint, table, symbols))
        _choose(joint, points, base, movable, positions, codes, rank_of, bits, price, table)
    return table


@jit
def _choose(
    joint: Any, points: Any, base: Any, movable: Any, positions: Any, codes: Any, rank_of: Any, bits: Any,
    price: float, table: Any,
) -> None:
    last = len(codes) - 1
    for row in range(joint.shape[0]):
        for column in range(joint.shape[1]):
            if joint[row, column] == 0 or not movable[column]:
                continue
            middle = rank_of[base[column]]
            best, best_cost = base[column], np.inf
            for rank in range(max(middle - 1, 0), min(middle + 1, last) + 1):
                gap = points[column] - positions[rank]
                cost = gap * gap + price * bits[row, codes[rank]]
                if cost < best_cost:
                    best_cost, best = cost, codes[rank]
            table[row, column] = best
