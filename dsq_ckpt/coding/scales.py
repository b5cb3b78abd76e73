"""Multiplication and division of a matrix by scales of its rows and columns, in one pass over the data.

A scale is an entry of a table, at the sum of the numbers of the row and the column, in eighths of an octave.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.core.arrays import F32, I16
from dsq_ckpt.errors import CodingError
from dsq_ckpt.kernels.checks import check_array, check_output
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import moments as compiled

ONE = 127 << 3
"""Index of the scale 1.0 in `FACTORS`."""
FACTORS: F32 = np.exp2(np.arange(256 << 3).clip(1 << 3, (255 << 3) - 1) / 8 - 127).astype(np.float32)
"""float32[2048]: scales, by ONE plus the numbers of row and column; all are normal and finite."""
TINY = float(np.finfo(np.float32).tiny)
"""The smallest normal number."""
_LARGEST = np.float32(np.finfo(np.float32).max)
_MANTISSAS = FACTORS[ONE : ONE + 8].view(np.int32) - (127 << 23)
_ITEM_ONE = 1 << 14  # item of number 0 in a pack: items are then in the order of numbers, with small differences
_PIECE = 1 << 10  # elements of a row whose scales are computed at once


def divide(values: F32, start: int, columns: int, by_row: I16, by_column: I16) -> F32:
    """Return elements divided by their scales; zero for zero and subnormal numbers.

    Args:
        values: consecutive elements of the matrix, flat, row by row.
        start: index of the first of them in the flat matrix.
        columns: elements of a row.
        by_row: int16[rows], or int16[1] for all rows.
        by_column: int16[columns], or int16[1] for all columns.

    Raises:
        ValueError: the values are not flat float32, the numbers not int16, or the values reach past the matrix.
    """
    check_array("values", values, np.float32, (len(values),))
    _check_numbers(values, start, columns, by_row, by_column)
    path, out = native.path_index(), np.empty(len(values), np.float32)
    if path < 0:
        _scale(values, start, columns, by_row, by_column, FACTORS, True, out)
    elif not compiled.divide_by_scales(path, values, start, columns, by_row, by_column, FACTORS, out):
        raise ValueError(_past_rows(values, start, by_row))
    return out


def multiply(values: F32, start: int, columns: int, by_row: I16, by_column: I16) -> None:
    """Multiply elements by their scales, in place; products past the largest finite number become that number.

    Args:
        values, start, columns, by_row, by_column: see `divide`.

    Raises:
        ValueError: as in `divide`, or the values are read-only.
    """
    check_output("values", values, np.float32, (len(values),))
    _check_numbers(values, start, columns, by_row, by_column)
    path = native.path_index()
    if path < 0:
        _scale(values, start, columns, by_row, by_column, FACTORS, False, values)
    elif native.scale(path, values, start, columns, by_row, by_column, FACTORS):
        raise ValueError(_past_rows(values, start, by_row))


def _check_numbers(values: F32, start: int, columns: int, by_row: I16, by_column: I16) -> None:
    """Require numbers for all rows and columns of the values; Numba's kernel would read past those that there are."""
    check_array("by_row", by_row, np.int16, (len(by_row),))
    check_array("by_column", by_column, np.int16, (len(by_column),))
    if len(by_column) not in (1, columns):
        raise ValueError(f"{len(by_column)} numbers of columns, expected 1 or {columns}")
    if start < 0 or (len(by_row) != 1 and start + len(values) > len(by_row) * columns):
        raise ValueError(_past_rows(values, start, by_row))


def _past_rows(values: F32, start: int, by_row: I16) -> str:
    return f"{len(values)} values from {start} on are not all of {len(by_row)} rows"


def pack_scales(numbers: I16) -> bytes:
    """Convert numbers of rows and columns to the items of a pack, two bytes each.

    Raises:
        CodingError: a number is out of range for scales, as in an altered file of format version 7 or before.
    """
    items = numbers.astype(np.int32) + _ITEM_ONE
    if items.size and not 0 <= items.min() <= items.max() < 1 << 15:
        raise CodingError(f"scales have the numbers {numbers.min()} to {numbers.max()}, expected less than 2^14")
    return items.astype("<u2").tobytes()


def unpack_scales(items: bytes) -> I16:
    """Invert `pack_scales`.

    Raises:
        CodingError: an item is out of range.
    """
    numbers = np.frombuffer(items, "<u2")
    if numbers.max(initial=0) >= 1 << 15:
        raise CodingError(f"item {numbers.argmax()} of scales is {numbers.max()}, expected less than {1 << 15}")
    return numbers.astype(np.int16) - np.int16(_ITEM_ONE)


@jit
def _fill_patterns(numbers: Any, out: Any) -> None:
    """Write the bits of the scales of 8 neighbouring row numbers with each column number, except for an octave.

    Scales have 8 mantissas, so the octave to add is the same for a whole row, and each element takes one sum.
    """
    for eighth in range(8):
        for j in range(len(numbers)):
            place = np.int64(numbers[j]) + eighth
            out[eighth, j] = np.int32(((place >> 3) << 23) + np.int64(_MANTISSAS[place & 7]))


@jit(error_model="numpy")
def _apply(values: Any, factors: Any, divides: bool, out: Any) -> None:
    tiny = np.float32(TINY)
    if divides:
        for j in range(len(values)):
            out[j] = np.float32(0) if abs(values[j]) < tiny else values[j] / factors[j]
    else:
        for j in range(len(values)):
            out[j] = min(max(values[j] * factors[j], -_LARGEST), _LARGEST)


@jit
def _scale(
    values: Any, start: int, columns: int, by_row: Any, by_column: Any, table: Any, divides: bool, out: Any
) -> None:
    """Divide or multiply elements by their scales; `out` may be `values`. One number may serve all rows or columns."""
    factors = np.empty(_PIECE, np.float32)
    bits = factors.view(np.int32)
    stop, width = start + len(values), min(columns, _PIECE)
    patterns = np.empty((8, width), np.int32)
    first, last = start // columns, (stop + columns - 1) // columns
    for left in range(0, columns if len(by_column) > 1 else width, width):
        numbers = by_column[left : left + width] if len(by_column) > 1 else by_column
        uses_patterns = len(by_column) > 1 and last - first > 8
        if uses_patterns:
            _fill_patterns(numbers, patterns)
        low, high = np.int64(min(numbers)), np.int64(max(numbers))
        for row in range(first, last):
            number = ONE + np.int64(by_row[row] if len(by_row) > 1 else by_row[0])
            begin = row * columns + left
            end = min(stop, (row + 1) * columns)
            if len(by_column) > 1:
                end = min(end, begin + width)
            i, column = max(start, begin), max(start - begin, 0)
            while i < end:
                size = min(end - i, _PIECE)
                if len(by_column) == 1:
                    factors[:size] = table[min(max(number + low, 0), 2047)]
                elif uses_patterns and number + low >= 8 and number + high < 2040:
                    octave, row_bits = np.int32(number >> 3) << np.int32(23), patterns[number & 7]
                    for j in range(size):
                        bits[j] = np.int32(row_bits[column + j] + octave)
                else:
                    for j in range(size):
                        factors[j] = table[min(max(number + numbers[column + j], 0), 2047)]
                _apply(values[i - start : i - start + size], factors[:size], divides, out[i - start : i - start + size])
                i += size
