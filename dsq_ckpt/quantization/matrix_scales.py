"""Scales of second moments: one number for each row and one for each column of a matrix.

Adam's second moments are nearly a product of a row factor and a column factor (Adafactor, section 3, rebuilds them from
these alone). Divided by both, most are within an octave of 1 whatever their size, so that one level serves nearly all.
A scale is a power of two. Its exponent, in eighths of an octave, is the sum of the numbers of the row and the column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt import native
from dsq_ckpt.coding.scales import FACTORS, ONE, TINY, divide, multiply
from dsq_ckpt.core.arrays import F32, F64, I16
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import moments as compiled

SHARED = 32
"""Least number of elements of a row or column that has its own number; for fewer, its 16 bits would not pay."""
_EIGHTH = 20  # bits of a float below an eighth of its octave
_REACH = 120 << 3  # largest distance of a ratio from 1
_TOGETHER = 1 << 24  # elements processed together on a device
_LANES = 16
_INVERSES: F64 = np.exp2((ONE - np.arange(256 << 3)) / 8)
"""float64[2048]: one over each scale, by ONE plus its number; not a power in kernels, as compilers have their own."""


class _Sums(NamedTuple):
    """Sums over some rows of a matrix.

    Attributes:
        numbers: float64[rows], eighths of an octave.
        column_sums: float64[2, columns], or of all columns together: sum and number of values divided by the scales of
            their rows.
        low, high: range of the values, in eighths of an octave around 1.
    """

    numbers: F64
    column_sums: F64
    low: float
    high: float


@dataclass(frozen=True)
class MatrixScales:
    """Scales of a chunk, viewed as a matrix with one row for each index of its first dimension.

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
        """Fit scales: of a row by its mean logarithm, of a column by the mean of the values over their row scales.

        The mean ratio of a column, and so of the chunk, is 1. With mean logarithms for columns too, second moments came
        back 1 to 6 % too small, and a restart lost two steps. After quantization `step_lengths.correct_scales` adjusts
        the stored scales. If an element is 120 octaves away from its scale, all scales are 1, because ratios could
        leave the range of fp32.

        Args:
            values: a chunk, in any floating dtype and on any device; values that are not positive and finite are
                ignored.
            workers: threads.
        """
        rows = len(values) if values.dim() else 1
        columns = max(1, values.numel() // max(rows, 1))
        empty = np.empty(0, np.int16)
        by_row, by_column = columns >= SHARED, rows >= SHARED
        if not values.numel() or not (by_row or by_column):
            return cls(columns, empty, empty)
        matrix = values.detach().reshape(rows, columns)
        is_cuda = matrix.device.type != "cpu"
        step = max(1, (_TOGETHER if is_cuda or workers is None else workers.block_elements) // columns)
        parts = (matrix[start : start + step] for start in range(0, rows, step))
        if columns == 1:  # as in flat partitions: kernels go row by row
            parts = (part.T for part in parts)
        work = partial(_sum_on_device if is_cuda else _sum_on_host, by_row=by_row, by_column=by_column and columns > 1)
        numbers, columns_sum, low, high = [], np.zeros((2, columns if by_column else 1)), 0.0, 0.0
        for sums in map(work, parts) if workers is None or is_cuda else workers.map(work, parts):
            if by_row:  # 8 bytes per element if rows have one element
                numbers.append(sums.numbers)
            columns_sum += sums.column_sums
            low, high = min(low, sums.low), max(high, sums.high)
        means = np.rint(_to_eighths(columns_sum[0] / np.maximum(columns_sum[1], 1)))
        if max(high - means.min(), means.max() - low) > _REACH:
            return cls(columns, empty, empty)
        offset = 0 if by_column else means
        return cls(
            columns, (np.concatenate(numbers) + offset).astype(np.int16) if by_row else empty,
            means.astype(np.int16) if by_column else empty,
        )

    @property
    def is_scaled(self) -> bool:
        """Whether any scale differs from 1."""
        return bool(len(self.by_row) or len(self.by_column))

    def divide(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Return values divided by their scales, float32; zero for zero and subnormal numbers.

        Args:
            values: consecutive elements of the flat chunk, on any device.
            start: index of the first of them.
        """
        values = values.to(torch.float32)
        if values.device.type == "cpu":
            values = values.contiguous()
            return torch.from_numpy(divide(values.numpy(), start, *self._numbers(start + len(values))))
        values = torch.where(values.abs() < TINY, 0.0, values)
        if not self.is_scaled:
            return values
        if len(values) < self.columns:  # for a part of a row, factors of its columns only
            indices = np.arange(start, start + len(values))
            entry = np.full(len(values), ONE, np.int32)
            entry += self.by_row[indices // self.columns] if len(self.by_row) else 0
            entry += self.by_column[indices % self.columns] if len(self.by_column) else 0
            return values.div_(torch.from_numpy(FACTORS[entry.clip(0, len(FACTORS) - 1)]).to(values.device))
        first, last = start // self.columns, -(-(start + len(values)) // self.columns)
        by_row, by_column = self.by_row[first:last], self.by_column
        ends = torch.from_numpy(np.concatenate([by_row, by_column])).to(values.device, torch.int32)
        rows = ends[: len(by_row), None] if len(by_row) else ends.new_zeros((last - first, 1))
        numbers = rows + (ends[len(by_row) :] if len(by_column) else ends.new_zeros(self.columns))
        numbers.add_(ONE).clamp_(0, len(FACTORS) - 1)
        factors = _factors(values.device)[numbers].view(-1)
        return values.div_(factors[start - first * self.columns :][: len(values)])

    def multiply(self, values: F32, start: int) -> None:
        """Multiply flat elements of the chunk from `start` on by their scales, in place.

        Products past the largest finite number become that number.

        Raises:
            ValueError: the values are not flat float32, or reach past the chunk.
        """
        if self.is_scaled:
            multiply(values, start, *self._numbers(start + len(values)))

    def _numbers(self, stop: int) -> tuple[int, I16, I16]:
        """Return the arguments of kernels for elements before `stop`: column count, numbers by row and by column."""
        zero = np.zeros(1, np.int16)
        by_row = self.by_row if len(self.by_row) else zero
        by_column = self.by_column if len(self.by_column) else zero
        is_single = len(by_row) == len(by_column) == 1
        return max(stop, 1) if is_single else self.columns, by_row, by_column


@cache
def _factors(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(FACTORS).to(device)


def _to_eighths(means: F64) -> F64:
    """Return means in eighths of an octave above 1; 0 for a mean of 0, which has no values."""
    eighths: F64 = 8 * np.log2(np.where(means > 0, means, 1.0))
    return eighths


def _sum_on_host(part: torch.Tensor, by_row: bool, by_column: bool) -> _Sums:
    rows, columns = part.shape
    numbers, reach = np.zeros(rows if by_row else 1), np.zeros(2, np.int32)
    sums = np.zeros((2, columns if by_column else 1))
    path, values = native.path_index(), part.to(torch.float32).contiguous().numpy()
    if path < 0:
        _add_sums(values.view(np.int32), by_row, by_column, _INVERSES, numbers, sums, reach)
    else:
        compiled.add_row_sums(path, values, by_row, by_column, _INVERSES, numbers, sums, reach)
    return _Sums(numbers, sums, *(reach * 2.0**-_EIGHTH))


def _sum_on_device(part: torch.Tensor, by_row: bool, by_column: bool) -> _Sums:
    """Return the sums of `_sum_on_host` for a part on a device; computed on the host if device memory is full."""
    try:
        values = part.to(torch.float32).contiguous()
        is_normal = (values >= TINY) & values.isfinite()
        logs = torch.where(is_normal, values.view(torch.int32).to(torch.float32) / (1 << _EIGHTH) - ONE, 0)
        numbers = torch.zeros(1, dtype=torch.float64, device=part.device)
        if by_row:
            numbers = (logs.sum(1, dtype=torch.float64) / is_normal.sum(1).clamp(min=1)).round()
            logs = torch.where(is_normal, logs - numbers[:, None].to(torch.float32), 0)
        ratios = torch.where(is_normal, values / torch.exp2(numbers / 8)[:, None], 0)
        sums = torch.stack([ratios.sum(0, dtype=torch.float64), is_normal.sum(0).to(torch.float64)])
        if not by_column:
            sums = sums.sum(1, keepdim=True)
        reach = torch.stack(logs.aminmax()).to(torch.float64)
        out = torch.cat([reach, numbers, sums.view(-1)]).cpu().numpy()  # one copy, because each waits
        low, high = out[:2]
        return _Sums(
            out[2 : 2 + len(numbers)].copy(), out[2 + len(numbers) :].reshape(sums.shape), min(low, 0), max(high, 0)
        )
    except torch.OutOfMemoryError:
        return _sum_on_host(part.cpu(), by_row, by_column)


@jit
def _sum_ratios(bits: Any, values: Any, inverse: float, lanes: Any) -> float:
    """Return the sum in fp64, in separate lanes so that no element waits for the sum before it."""
    first, infinite_bits = np.int32(1 << 23), np.int32(255 << 23)
    lanes[:] = 0
    for i in range(len(bits) // _LANES):
        for lane in range(_LANES):
            j = i * _LANES + lane
            counts = (bits[j] >= first) & (bits[j] < infinite_bits)
            lanes[lane] += np.float64(values[j]) * inverse if counts else 0.0
    total = lanes.sum()
    for j in range(len(bits) // _LANES * _LANES, len(bits)):
        counts = (bits[j] >= first) & (bits[j] < infinite_bits)
        total += np.float64(values[j]) * inverse if counts else 0.0
    return float(total)


@jit
def _add_sums(
    bits: Any, by_row: bool, by_column: bool, inverses: Any, numbers: Any, sums: Any, reach: Any
) -> None:
    rows, columns = bits.shape
    lanes = np.empty(_LANES)
    first, infinite_bits, low, high = np.int32(1 << 23), np.int32(255 << 23), np.int32(0), np.int32(0)
    values = bits.view(np.float32)
    for i in range(rows):
        row = bits[i]
        if by_row:
            total, count = np.int64(0), np.int64(0)
            for j in range(columns):
                counts = (row[j] >= first) & (row[j] < infinite_bits)
                total += np.int64(row[j]) if counts else 0
                count += counts
            numbers[i] = np.rint(total * 2.0**-20 / count) - ONE if count else 0.0
        number = numbers[i] if by_row else 0.0
        less = np.int32((number + ONE) * (1 << 20))
        inverse, held = inverses[int(number) + ONE], 0
        for j in range(columns):
            counts = (row[j] >= first) & (row[j] < infinite_bits)
            remainder = np.int32(row[j] - less) if counts else np.int32(0)
            low, high = min(low, remainder), max(high, remainder)
            if by_column:
                sums[0, j] += np.float64(values[i, j]) * inverse if counts else 0.0
                sums[1, j] += counts
            else:
                held += counts
        if not by_column:
            sums[0, 0] += _sum_ratios(row, values[i], inverse, lanes)
            sums[1, 0] += held
    reach[0], reach[1] = low, high
