"""Bindings of the passes over Adam's moments, in scales.c and moments.c.

Arrays are C-contiguous, of the dtypes told; those of values may begin at any byte.
"""

from __future__ import annotations

import numpy as np

from dsq_ckpt.core.arrays import F32, F64, I16, I32, U8
from dsq_ckpt.native import address, library, raise_error


def divide_by_scales(
    path: int, values: F32, start: int, columns: int, by_row: I16, by_column: I16, scales: F32, out: F32
) -> bool:
    """Divide elements of a matrix by scales of rows and columns; see `dsq_divide`. Return whether all have scales."""
    error: int = library().dsq_divide(
        path, address(values), values.size, start, columns, address(by_row), by_row.size, address(by_column),
        by_column.size, address(scales), address(out),
    )
    return error == 0


def divide_by_roots(path: int, values: F32, squares: F32, least: np.float32, out: F32) -> None:
    """Divide first moments by the roots of second moments, as many; see `dsq_over_roots`."""
    raise_error(library().dsq_over_roots(path, address(values), address(squares), values.size, least, address(out)))


def multiply_by_roots(path: int, values: F32, squares: F32, least: np.float32) -> None:
    """Multiply first moments by the roots of second moments, as many, in place; see `dsq_times_roots`."""
    raise_error(library().dsq_times_roots(path, address(values), address(squares), values.size, least))


def multiply_by_octaves(path: int, values: F32, squares: F32, units: F32) -> None:
    """Multiply first moments by units, float32[256], of octaves, in place; see `dsq_times_octaves`."""
    raise_error(library().dsq_times_octaves(path, address(values), address(squares), values.size, address(units)))


def add_step_lengths(
    path: int, values: F32, codes: U8, inverse: F32, offset: int, columns: int, by_row: bool, by_column: bool,
    rows: F64, sums: F64,
) -> bool:
    """Add lengths of steps to sums of rows and columns; see `dsq_step_lengths`. Return whether these are large enough.

    Args:
        path: index of the path.
        values, codes: of n elements.
        inverse: float32[256].
        offset, columns, by_row, by_column: column of the first element, elements of a row, and which sums there are.
        rows, sums: float64[2, r] and float64[2, c].
    """
    space = np.empty(min(columns, values.size), np.float32)  # of a row, known as a whole before its columns are added
    error: int = library().dsq_step_lengths(
        path, address(values), address(codes), values.size, address(inverse), offset, columns, by_row, by_column,
        address(rows), rows.shape[1], address(sums), sums.shape[1], address(space), space.size,
    )
    return error == 0


def add_row_sums(
    path: int, values: F32, by_row: bool, by_column: bool, inverses: F64, numbers: F64, sums: F64, reach: I32
) -> None:
    """Set numbers of the rows of a matrix, and add ratios to sums of columns; see `dsq_row_sums`.

    Args:
        path: index of the path.
        values: float32[rows, columns].
        by_row, by_column: whether rows have numbers, and whether columns have sums of their own.
        inverses: float64[2048].
        numbers: float64[rows], if by_row.
        sums: float64[2, columns], or float64[2, 1].
        reach: int32[2].
    """
    raise_error(library().dsq_row_sums(
        path, address(values), *values.shape, by_row, by_column, address(inverses), address(numbers), address(sums),
        address(reach),
    ))


def sum_part_waves(values: F32, codes: U8, inverse: float, low: F64, steps: F64, parts: int, waves: F64) -> F64:
    """Return sums of waves over parts of cells, float64[3]; see `dsq_part_waves`.

    Args:
        values, codes: of n elements.
        inverse: factor that multiplies values before anything else.
        low, steps: float64[256].
        parts: parts of each cell.
        waves: float64[2, places].

    Raises:
        ValueError: there are no parts, or more than 256.
    """
    space, out = np.zeros((3, 256 * parts)), np.empty(3)
    error: int = library().dsq_part_waves(
        address(values), address(codes), values.size, inverse, address(low), address(steps), parts, address(waves),
        waves.shape[1], address(space), address(out),
    )
    if error:
        raise ValueError(f"cells have {parts} parts, expected 1 to 256")
    return out
