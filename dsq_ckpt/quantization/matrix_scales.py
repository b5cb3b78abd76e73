"""Scales of second moments: one number for each row and one for each column of a matrix.

Adam's second moments are nearly a product of what a row and what a column has (Adafactor, section 3, rebuilds them from
the two alone). Divided by both, most are within an octave of 1 whatever their own size, so one level serves nearly all.
A scale is the sum of a row's and a column's number, in eighths of an octave on the axis of the bits of a float.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt.core.arrays import F32, F64, I16
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.kernels.jit import jit

SHARED = 32
"""Elements of a row, or of a column, from which it has a number of its own: 16 bits for fewer would not pay."""
_EIGHTH = 20  # bits of a float below an eighth of its octave
_ONE = 127 << 3  # eighths of an octave up to 1.0
_REACH = 120 << 3  # by which a ratio may be away from 1
_TOGETHER = 1 << 24  # elements that are looked at together on a device
_PIECE = 1 << 10  # elements of a row whose scales are made at once
_TINY = float(np.finfo(np.float32).tiny)
_LARGEST = np.float32(np.finfo(np.float32).max)


class _Sums(NamedTuple):
    """What some rows have: their numbers, what is left by column (sum and count), and the reach of what is left."""

    numbers: F64
    left: F64
    low: float
    high: float


@dataclass(frozen=True)
class MatrixScales:
    """Scales of a chunk, seen as a matrix with one row for each index of its first dimension.

    Attributes:
        columns: elements of a row.
        by_row: int16[rows], or int16[0]: all are zero.
        by_column: int16[columns], or int16[0].
    """

    columns: int
    by_row: I16
    by_column: I16

    @classmethod
    def fit(cls, values: torch.Tensor, workers: Workers | None = None) -> MatrixScales:
        """Return the mean logarithms of rows, and of what is left of columns; zeros and subnormal numbers do not count.

        All are 1 where elements are 120 octaves away from them: their ratios could leave the range of fp32.

        Args:
            values: a chunk, in any floating dtype and on any device; what is not positive and finite does not count.
            workers: threads.
        """
        rows = len(values) if values.dim() else 1
        columns = max(1, values.numel() // max(rows, 1))
        nothing = np.empty(0, np.int16)
        by_row, by_column = columns >= SHARED, rows >= SHARED
        if not values.numel() or not (by_row or by_column):
            return cls(columns, nothing, nothing)
        matrix = values.detach().reshape(rows, columns)
        step = max(1, (_TOGETHER if workers is None else workers.block_elements) // columns)
        parts = (matrix[start : start + step] for start in range(0, rows, step))
        near = matrix.device.type != "cpu"
        work = partial(_near if near else _here, by_row=by_row, by_column=by_column)
        numbers, left, low, high = [], np.zeros((2, columns if by_column else 1)), 0.0, 0.0
        for part in map(work, parts) if workers is None or near else workers.map(work, parts):
            numbers.append(part.numbers)
            left += part.left
            low, high = min(low, part.low), max(high, part.high)
        means = np.rint(left[0] / np.maximum(left[1], 1))
        if max(high - means.min(), means.max() - low) > _REACH:
            return cls(columns, nothing, nothing)
        return cls(
            columns, np.concatenate(numbers).astype(np.int16) if by_row else nothing,
            means.astype(np.int16) if by_column else nothing,
        )

    @property
    def any(self) -> bool:
        """Whether there are scales other than 1."""
        return bool(len(self.by_row) or len(self.by_column))

    def divide(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Return values over their scales, float32; zero for zero and subnormal numbers.

        Args:
            values: flat elements of the chunk from `start` on, on any device.
            start: see above.
        """
        values = values.to(torch.float32)
        if values.device.type == "cpu":
            out = np.empty(len(values), np.float32)
            _divide(values.numpy(), start, self.columns, *self._numbers(), out)
            return torch.from_numpy(out)
        values = torch.where(values.abs() < _TINY, 0.0, values)
        if not self.any:
            return values
        place = torch.arange(start, start + len(values), device=values.device)
        number = torch.full((len(values),), _ONE, dtype=torch.int32, device=values.device)
        if len(self.by_row):
            number += torch.from_numpy(self.by_row).to(values.device)[place // self.columns]
        if len(self.by_column):
            number += torch.from_numpy(self.by_column).to(values.device)[place % self.columns]
        return values / (number.clamp_(1 << 3, (255 << 3) - 1) << _EIGHTH).view(torch.float32)

    def multiply(self, values: F32, start: int) -> None:
        """Multiply flat elements of the chunk from `start` on by their scales, in place.

        Products past the largest finite number become that number.
        """
        if self.any:
            _multiply(values, start, self.columns, *self._numbers())

    def _numbers(self) -> tuple[I16, I16]:
        """Return what kernels take: by row, or the same for all; by column, likewise."""
        zero = np.zeros(1, np.int16)
        return (self.by_row if len(self.by_row) else zero), (self.by_column if len(self.by_column) else zero)


def _here(part: torch.Tensor, by_row: bool, by_column: bool) -> _Sums:
    rows, columns = part.shape
    numbers, left, reach = np.zeros(rows), np.zeros((2, columns if by_column else 1), np.int64), np.zeros(2, np.int32)
    _add(part.to(torch.float32).contiguous().numpy().view(np.int32), by_row, by_column, numbers, left, reach)
    return _Sums(numbers, left * np.array([[2.0**-_EIGHTH], [1.0]]), *(reach * 2.0**-_EIGHTH))


def _near(part: torch.Tensor, by_row: bool, by_column: bool) -> _Sums:
    """Return what `_here` does, from a part on a device; on the host, if its memory is full."""
    try:
        values = part.to(torch.float32).contiguous()
        held = (values >= _TINY) & values.isfinite()
        logs = torch.where(held, values.view(torch.int32).to(torch.float32) / (1 << _EIGHTH) - _ONE, 0)
        numbers, left = torch.zeros(len(part), dtype=torch.float64), torch.zeros((2, 1), dtype=torch.float64)
        if by_row:
            numbers = (logs.sum(1, dtype=torch.float64) / held.sum(1).clamp(min=1)).round()
            logs = torch.where(held, logs - numbers[:, None].to(torch.float32), 0)
        if by_column:
            left = torch.stack([logs.sum(0, dtype=torch.float64), held.sum(0).to(torch.float64)])
        return _Sums(numbers.cpu().numpy(), left.cpu().numpy(), min(float(logs.min()), 0), max(float(logs.max()), 0))
    except torch.OutOfMemoryError:
        return _here(part.cpu(), by_row, by_column)


@jit
def _add(bits: Any, by_row: bool, by_column: bool, numbers: Any, left: Any, reach: Any) -> None:
    rows, columns = bits.shape
    first, beyond, low, high = np.int32(1 << 23), np.int32(255 << 23), np.int32(0), np.int32(0)
    for i in range(rows):
        row = bits[i]
        if by_row:
            total, held = np.int64(0), np.int64(0)
            for j in range(columns):
                counts = (row[j] >= first) & (row[j] < beyond)
                total += np.int64(row[j]) if counts else 0
                held += counts
            numbers[i] = np.rint(total * 2.0**-20 / held) - _ONE if held else 0.0
        less = np.int32((numbers[i] + _ONE) * (1 << 20))
        for j in range(columns):
            counts = (row[j] >= first) & (row[j] < beyond)
            rest = np.int32(row[j] - less) if counts else np.int32(0)
            low, high = min(low, rest), max(high, rest)
            if by_column:
                left[0, j] += rest
                left[1, j] += counts
    reach[0], reach[1] = low, high


@jit
def _fill(start: int, stop: int, number: Any, by_column: Any, column: int, bits: Any) -> None:
    """Write the bits of the scales of elements `start` to `stop` of a row; one number of columns serves all."""
    if len(by_column) == 1:
        bits[: stop - start] = np.int32(min(max(number + by_column[0], 8), 2039)) << np.int32(20)
    else:
        for j in range(stop - start):
            bits[j] = np.int32(min(max(number + by_column[column + j], 8), 2039)) << np.int32(20)


@jit(error_model="numpy")
def _divide(values: Any, start: int, columns: int, by_row: Any, by_column: Any, out: Any) -> None:
    factors = np.empty(_PIECE, np.float32)
    bits, tiny = factors.view(np.int32), np.float32(_TINY)
    row, column, i = start // columns, start % columns, 0
    while i < len(values):
        stop = min(len(values), i + columns - column, i + _PIECE)
        number = np.int32(_ONE) + np.int32(by_row[row] if len(by_row) > 1 else by_row[0])
        _fill(i, stop, number, by_column, column, bits)
        for j in range(i, stop):
            out[j] = np.float32(0) if abs(values[j]) < tiny else values[j] / factors[j - i]
        column += stop - i
        i = stop
        if column == columns:
            row, column = row + 1, 0


@jit(error_model="numpy")
def _multiply(values: Any, start: int, columns: int, by_row: Any, by_column: Any) -> None:
    factors = np.empty(_PIECE, np.float32)
    bits = factors.view(np.int32)
    row, column, i = start // columns, start % columns, 0
    while i < len(values):
        stop = min(len(values), i + columns - column, i + _PIECE)
        number = np.int32(_ONE) + np.int32(by_row[row] if len(by_row) > 1 else by_row[0])
        _fill(i, stop, number, by_column, column, bits)
        for j in range(i, stop):
            values[j] = min(max(values[j] * factors[j - i], -_LARGEST), _LARGEST)
        column += stop - i
        i = stop
        if column == columns:
            row, column = row + 1, 0
