"""Tables from (previous code, key) to code: nearest levels, or the minimum of distortion + lambda * bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.core.arrays import F64, Codes, Counts, Mask
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import codebooks


class OccupiedBins(NamedTuple):
    """Nonzero entries of a joint sketch; a few thousand of some hundred thousand.

    Attributes:
        rows, bins: int64[n], row and bin of each entry.
        counts: int64[n].
    """

    rows: Counts
    bins: Counts
    counts: Counts

    @classmethod
    def from_joint(cls, joint: Counts) -> OccupiedBins:
        """Return the nonzero entries of int64[rows, bins]."""
        flat = joint.reshape(-1)
        places = np.flatnonzero(flat != 0)  # three times as fast as on int64
        return cls(*np.divmod(places, joint.shape[1]), flat[places])

    def codes(self, table: Codes) -> Codes:
        """Look up the code of each entry in a table, uint8[rows, bins]."""
        codes: Codes = table[self.rows, self.bins]
        return codes

    def where(self, mask: Mask) -> OccupiedBins:
        """Return the entries selected by a mask."""
        return OccupiedBins(self.rows[mask], self.bins[mask], self.counts[mask])


def code_counts(bins: OccupiedBins, table: Codes, symbols: int) -> Counts:
    """Count how often each code follows each previous code: int64[rows, symbols]; table: uint8[rows, bins]."""
    counts = np.zeros(len(table) * symbols, np.int64)
    np.add.at(counts, bins.rows * symbols + bins.codes(table), bins.counts)  # several times as fast as with two indices
    return counts.reshape(len(table), symbols)


def code_bits(counts: Counts) -> F64:
    """Return -log2 of the frequency of each code in its row; absent codes count as half an occurrence."""
    smoothed = np.maximum(counts, 0.5)
    return np.log2(smoothed.sum(1, keepdims=True)) - np.log2(smoothed)


def entropy_bits(counts: Counts) -> float:
    """Return the bits that an ideal coder with one static table per row needs for `counts`."""
    totals = counts.sum(1, keepdims=True)
    seen = counts > 0
    shares = counts / np.maximum(totals, 1)
    return max(0.0, float(-(counts[seen] * np.log2(shares[seen])).sum()))


def rate_distortion_table(
    occupied: OccupiedBins, rows: int, points: F64, base: Codes, movable: Mask, positions: F64,
    codes: Codes, price: float, iterations: int = 3,
) -> Codes:
    """Refine a nearest-level assignment, so that each entry minimises (point - level)^2 + price * bits(code | row).

    Only the nearest level and its two neighbours compete, so that no value moves by more than one level. Cells stay
    narrow, and the refinement layer precise. The bits follow from the assignment itself, iterated to a fixed point
    (entropy-constrained quantization: Chou, Lookabaugh and Gray, 1989, section III).

    Args:
        occupied: occupied entries of the sketch.
        rows: number of rows of the table.
        points: float64[bins], value of each bin on the axis of distance.
        base: uint8[bins], code of the nearest level.
        movable: bool[bins], False where the code is forced (protected).
        positions, codes: float64[k], uint8[k], levels in ascending order and their codes.
        price: lambda in squared units of `points`.

    Returns:
        uint8[rows, bins].
    """
    table = np.broadcast_to(base, (rows, len(base))).copy()
    if price <= 0 or len(codes) < 2:
        return table
    symbols = int(base.max(initial=0)) + 2
    symbols = max(symbols, int(codes.max()) + 2)
    points = points.copy()  # those of a window are read-only, for which Numba would compile the loop anew
    rank_of = np.zeros(256, np.int64)
    rank_of[codes] = np.arange(len(codes))
    path = native.path_index()
    for _ in range(iterations):
        bits = code_bits(code_counts(occupied, table, symbols))
        arguments = occupied.rows, occupied.bins, points, base, movable, positions, codes, rank_of, bits, price, table
        if path < 0:
            _choose(*arguments)
        else:
            codebooks.choose(*arguments)
    return table


@jit
def _choose(
    rows: Any, columns: Any, points: Any, base: Any, movable: Any, positions: Any, codes: Any, rank_of: Any, bits: Any,
    price: float, table: Any,
) -> None:
    last = len(codes) - 1
    for row, column in zip(rows, columns):  # noqa: B905, Numba knows no `strict`
        if not movable[column]:
            continue
        middle = rank_of[base[column]]
        best, best_cost = base[column], np.inf
        for rank in range(max(middle - 1, 0), min(middle + 1, last) + 1):
            gap = points[column] - positions[rank]
            cost = gap * gap + price * bits[row, codes[rank]]
            if cost < best_cost:
                best_cost, best = cost, codes[rank]
        table[row, column] = best
