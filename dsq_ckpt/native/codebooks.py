"""Bindings of codebooks.c; callers check dtypes, lengths and layouts."""

from __future__ import annotations

import numpy as np

from dsq_ckpt.core.arrays import F64, I32, I64, U8, Array, Mask
from dsq_ckpt.native import address, library


def solve_kmeans(path: int, points: F64, weights: F64, k_max: int) -> I32:
    """Return the start of the last cluster for every (clusters - 1, last point), int32[k_max, n]; see `dsq_kmeans`."""
    n = points.size
    starts, prefixes, rows = np.zeros((k_max, n), np.int32), np.empty(3 * (n + 1)), np.empty(2 * n)
    if library().dsq_kmeans(
        path, address(points), address(weights), n, k_max, address(prefixes),
        address(rows), address(starts),
    ):
        raise ValueError(f"{k_max} clusters of {n} points")
    return starts


def choose(
    rows: I64, columns: I64, points: F64, base: U8, movable: Mask, positions: F64, codes: U8, rank_of: I64, bits: F64,
    price: float, table: U8,
) -> None:
    """Set the codes of entries of a table; see `dsq_choose`.

    Raises:
        ValueError: an entry or a code is outside the tables.
    """
    arrays: list[Array] = [rows, columns, points, base, movable, positions, codes]
    arrays = [np.ascontiguousarray(array) for array in arrays]
    at = [address(array) for array in arrays]
    if library().dsq_choose(
        *at[:2], rows.size, *at[2:5], points.size, *at[5:], codes.size, address(rank_of), address(bits),
        *bits.shape, price, address(table),
    ):
        raise ValueError(f"an entry of a sketch or a code is outside the table, {list(table.shape)}")
