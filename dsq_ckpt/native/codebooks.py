"""Bindings of codebooks.c; callers check dtypes, lengths and layouts."""

from __future__ import annotations

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.core.arrays import F64, I32, I64, U8, Array, Mask


def solve_kmeans(path: int, points: F64, weights: F64, k_max: int) -> I32:
    """Return the start of the last cluster for every (clusters - 1, last point), int32[k_max, n]; see `dsq_kmeans`."""
    n = points.size
    starts, prefixes, rows = np.zeros((k_max, n), np.int32), np.empty(3 * (n + 1)), np.empty(2 * n)
    if native.library().dsq_kmeans(
        path, native.address(points), native.address(weights), n, k_max, native.address(prefixes),
        native.address(rows), native.address(starts),
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
    at = [native.address(array) for array in arrays]
    if native.library().dsq_choose(
        *at[:2], rows.size, *at[2:5], points.size, *at[5:], codes.size, native.address(rank_of), native.address(bits),
        *bits.shape, price, native.address(table),
    ):
        raise ValueError(f"an entry of a sketch or a code is outside the table, {list(table.shape)}")
