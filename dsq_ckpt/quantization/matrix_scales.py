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
_TINY = float(np.finfo(np.float32).tiny)
_LARGEST = np.float32(np.finfo(np.float32).max)
FACTORS: F32 = (np.arange(256 << 3, dtype=np.uint32).clip(1 << 3, (255 << 3) - 1) << _EIGHTH).view(np.float32)
"""float32[2048]: scales by 1016 plus the numbers of row and column; from the smallest normal number to a finite one."""


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
        """Return values over their scales, float32.

        Args:
            values: flat elements of the chunk from `start` on, on any device.
            start: see above.
        """
        values = values.to(torch.float32)
        if not self.any:
            return values
        if values.device.type == "cpu":
            out = np.empty(len(values), np.float32)
            _divide(values.numpy(), start, self.columns, *self._numbers(), FACTORS, out)
            return torch.from_numpy(out)
        place = torch.arange(start, start + len(values), device=values.device)
        number = torch.full((len(values),), _ONE, dtype=torch.int32, device=values.device)
        if len(self.by_row):
            number += torch.from_numpy(self.by_row).to(values.device)[place // self.columns]
        if len(self.by_column):
            number += torch.from_numpy(self.by_column).to(values.device)[place % self.columns]
        return values / torch.from_numpy(FACTORS).to(values.device)[number.clamp_(0, len(FACTORS) - 1)]

    def multiply(self, values: F32, start: int) -> None:
        """Multiply flat elements of the chunk from `start` on by their scales, in place.

        Products past the largest finite number become that number.
        """
        if self.any:
            _multiply(values, start, self.columns, *self._numbers(), FACTORS)

    def _numbers(self) -> tuple[I16, I16]:
        """Return what kernels take: by row, or the same for all; by column, likewise."""
        zero = np.zeros(1, np.int16)
        return (self.by_row if len(self.by_row) else zero), (self.by_column if len(self.by_column) else zero)


def _here(part: torch.Tensor, by_row: bool, by_column: bool) -> _Sums:
    rows, columns = part.shape
    numbers, left, reach = np.zeros(rows), np.zeros((2, columns if by_column else 1)), np.zeros(2)
    _add(part.to(torch.float32).contiguous().numpy().view(np.uint32), by_row, by_column, numbers, left, reach)
    return _Sums(numbers, left, *reach)


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
    first, beyond, eighths = np.uint32(1 << 23), np.uint32(255 << 23), 2.0**-20
    low, high = 0.0, 0.0
    for i in range(rows):
        if by_row:
            total, held = 0.0, 0
            for j in range(columns):
                if first <= bits[i, j] < beyond:
                    total += bits[i, j] * eighths
                    held += 1
            numbers[i] = np.rint(total / held) - _ONE if held else 0.0
        less = numbers[i] + _ONE
        for j in range(columns):
            if first <= bits[i, j] < beyond:
                rest = bits[i, j] * eighths - less
                low, high = min(low, rest), max(high, rest)
                if by_column:
                    left[0, j] += rest
                    left[1, j] += 1
    reach[0], reach[1] = low, high


@jit(error_model="numpy")
def _divide(values: Any, start: int, columns: int, by_row: Any, by_column: Any, factors: Any, out: Any) -> None:
    row, column, i = start // columns, start % columns, 0
    while i < len(values):
        stop = min(len(values), i + columns - column)
        number = _ONE + (by_row[row] if len(by_row) > 1 else by_row[0])
        if len(by_column) == 1:
            factor = factors[min(max(number + by_column[0], 0), 2047)]
            for j in range(i, stop):
                out[j] = values[j] / factor
        else:
            for j in range(i, stop):
                out[j] = values[j] / factors[min(max(number + by_column[column + j - i], 0), 2047)]
        row, column, i = row + 1, 0, stop


@jit(error_model="numpy")
def _multiply(values: Any, start: int, columns: int, by_row: Any, by_column: Any, factors: Any) -> None:
    row, column, i = start // columns, start % columns, 0
    while i < len(values):
        stop = min(len(values), i + columns - column)
        number = _ONE + (by_row[row] if len(by_row) > 1 else by_row[0])
        for j in range(i, stop):
            own = by_column[column + j - i] if len(by_column) > 1 else by_column[0]
            product = values[j] * factors[min(max(number + own, 0), 2047)]
            values[j] = min(max(product, -_LARGEST), _LARGEST)
        row, column, i = row + 1, 0, stop
