"""Lengths of Adam's next steps, whose mean decoded second moments must preserve.

A step is proportional to 1 / sqrt(v). If v is decoded as v', the next steps are sqrt(v / v') times as long. Errors of
single elements average out over a row; an error shared by a row, a column or a chunk does not, since it changes the
learning rate of that part. So the mean of sqrt(v / v') is kept at 1 for each of them: scales of rows and columns are
moved after quantization, and the levels of a chunk are multiplied by the remaining factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt import native
from dsq_ckpt.core.arrays import F32, F64, I16, Codes
from dsq_ckpt.kernels.checks import check_array
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import moments as compiled
from dsq_ckpt.quantization.matrix_scales import MatrixScales

_TOGETHER = 1 << 24  # elements that are processed together on a device
_FURTHEST = 64  # eighths of an octave by which a scale may be moved
_LANES = 16


class StepLengths(NamedTuple):
    """Sums of sqrt(v / v') over some elements of a chunk, and numbers of elements.

    Attributes:
        row: number of the first row.
        rows: float64[2, r], sum and number by row; of all rows together, if rows have no scales.
        column: number of the first of `columns`.
        columns: float64[2, c], by column, wrapping to the next row if there are fewer than a row; relative to the means
            of their rows, if rows have scales. float64[2, 1], unused, if columns have no scales.
    """

    row: int
    rows: F64
    column: int
    columns: F64

    @classmethod
    def zeros(cls, scales: MatrixScales) -> StepLengths:
        """Return zero sums for a chunk, to which those of its blocks are added."""
        return cls(0, np.zeros((2, max(1, len(scales.by_row)))), 0, np.zeros((2, max(1, len(scales.by_column)))))

    def add(self, block: StepLengths) -> None:
        """Add the sums of a block to those of its whole chunk."""
        self.rows[:, block.row : block.row + block.rows.shape[1]] += block.rows
        remaining = self.columns[:, block.column :]
        size = min(remaining.shape[1], block.columns.shape[1])
        remaining[:, :size] += block.columns[:, :size]
        self.columns[:, : block.columns.shape[1] - size] += block.columns[:, size:]


def sum_step_lengths(values: F32, codes: Codes, levels: F64, scales: MatrixScales, start: int) -> StepLengths:
    """Return the sums for a block. Zeros, and values whose code has no positive level, do not count.

    Args:
        values: float32[n], divided by their scales.
        codes: uint8[n].
        levels: float64[k], k at most 256.
        scales: scales of the chunk.
        start: position of the block's first element in the chunk.

    Raises:
        ValueError: values are not flat float32, or codes are not as many.
    """
    check_array("values", values, np.float32, (len(values),))
    check_array("codes", codes, np.uint8, (len(values),))
    by_row, by_column, n = len(scales.by_row) > 0, len(scales.by_column) > 1, max(1, len(values))
    columns = scales.columns if by_row or by_column else n
    row, column = divmod(start, columns) if by_row or by_column else (0, 0)
    rows = (column + n - 1) // columns + 1 if by_row else 1
    sums = np.zeros((2, min(columns, n) if by_column else 1))  # not of all columns: a row may be longer than a block
    lengths = StepLengths(row if by_row else 0, np.zeros((2, rows)), column if columns > n and by_column else 0, sums)
    path, place = native.path_index(), (_inverse_roots(levels), column, columns, by_row, by_column, lengths.rows, sums)
    if path < 0:
        _add_rows(values, codes, *place)
    elif not compiled.add_step_lengths(path, values, codes, *place):
        raise ValueError("arrays of sums have another size")
    return lengths


def sum_step_lengths_on_device(
    values: torch.Tensor, codes: torch.Tensor, levels: F64, scales: MatrixScales
) -> torch.Tensor:
    """Return the sums for a whole chunk in the form for `unpack_sums`; float64, on the device of the values."""
    inverse = torch.from_numpy(_inverse_roots(levels)).to(values.device)
    by_row, by_column = len(scales.by_row) > 0, len(scales.by_column) > 1
    columns = scales.columns if by_row or by_column else 1
    step = max(1, _TOGETHER // columns) * columns
    by_rows, by_columns = [], torch.zeros(2, columns if by_column else 1, dtype=torch.float64, device=values.device)
    for value, code in zip(values.split(step), codes.split(step), strict=True):
        lengths = (value.sqrt() * inverse[code.int()]).view(-1, columns)
        is_counted = lengths > 0  # no NaN, of values that are stored exactly
        lengths = torch.where(is_counted, lengths, 0.0)
        dims = 1 if by_row else (0, 1)
        rows = torch.stack([lengths.sum(dims, dtype=torch.float64), is_counted.sum(dims)]).view(2, -1)
        if by_column:
            if by_row:
                lengths *= (rows[1] / torch.where(rows[0] > 0, rows[0], 1.0))[:, None]
            by_columns += torch.stack([lengths.sum(0, dtype=torch.float64), is_counted.sum(0)])
        by_rows.append(rows)
    rows = torch.cat(by_rows, 1)
    return torch.cat([rows if by_row else rows.sum(1, keepdim=True), by_columns], 1)


def unpack_sums(sums: F64, scales: MatrixScales) -> StepLengths:
    """Return the sums from a device."""
    rows = max(1, len(scales.by_row))
    return StepLengths(0, sums[:, :rows], 0, sums[:, rows:])


def correct_scales(scales: MatrixScales, steps: StepLengths) -> tuple[MatrixScales, float]:
    """Return scales for the decoder, and the log2 of the factor for levels.

    With these, the mean of sqrt(v / v') is 1 in the chunk, and in its rows and columns up to the resolution of scales,
    an eighth of an octave.

    Args:
        scales: scales by which the values were divided.
        steps: sums for the chunk.
    """
    total, count = steps.rows.sum(1)
    if not total > 0:
        return scales, 0.0
    by_row, row_factor = _scale_moves(steps.rows)
    by_column, column_factor = _scale_moves(steps.columns)
    moved = replace(
        scales, by_row=scales.by_row + by_row[: len(scales.by_row)],
        by_column=scales.by_column + by_column[: len(scales.by_column)],
    )
    return moved, 2 * float(np.log2(total / count * row_factor * column_factor))


def _scale_moves(sums: F64) -> tuple[I16, float]:
    """Return by how much to move each scale, int16, and the factor by which the moves change the mean."""
    total, count = sums.sum(1)
    if not total > 0:
        return np.zeros(sums.shape[1], np.int16), 1.0
    means = np.divide(sums[0], sums[1], where=sums[0] > 0, out=np.full(sums.shape[1], total / count))
    moves = np.rint(16 * np.log2(means / (total / count))).clip(-_FURTHEST, _FURTHEST)
    return moves.astype(np.int16), float((sums[0] * np.exp2(-moves / 16)).sum() / total)


def _inverse_roots(levels: F64) -> F32:
    """Return one over the root of the level of each code, float32[256]; zero for codes without a positive level."""
    out = np.zeros(256, np.float32)
    np.divide(1.0, np.sqrt(levels.clip(0)), out=out[: len(levels)], where=levels > 0, casting="same_kind")
    return out


@jit
def _write_lengths(values: Any, codes: Any, inverse: Any, out: Any) -> int:
    """Write sqrt(v / v') of elements, 0 for those that do not count; return how many do.

    Compilers vectorize each of three loops, but not one loop of all three.
    """
    count = 0
    for j in range(len(out)):
        out[j] = np.sqrt(values[j])
    for j in range(len(out)):
        out[j] *= inverse[codes[j]]
    for j in range(len(out)):
        counts = out[j] > 0  # no NaN, of values that are stored exactly
        out[j] = out[j] if counts else np.float32(0)
        count += counts
    return count


@jit
def _sum_lengths(lengths: Any, lanes: Any) -> float:
    """Return the sum in fp64, in separate lanes so that no element waits for the sum before it."""
    lanes[:] = 0
    for i in range(len(lengths) // _LANES):
        for j in range(_LANES):
            lanes[j] += lengths[i * _LANES + j]
    total = lanes.sum()
    for i in range(len(lengths) // _LANES * _LANES, len(lengths)):
        total += lengths[i]
    return float(total)


@jit
def _add_rows(
    values: Any, codes: Any, inverse: Any, offset: int, columns: int, by_row: bool, by_column: bool, rows: Any,
    sums: Any,
) -> None:
    i, row, column, width = 0, 0, offset, sums.shape[1]
    space, lanes = np.empty(min(columns, len(values)), np.float32), np.empty(_LANES)
    full = 0
    while i < len(values):
        size = min(columns - column, len(values) - i)
        lengths = space[:size]  # of a row, which is known as a whole before its columns are added
        count = _write_lengths(values[i : i + size], codes[i : i + size], inverse, lengths)
        total = _sum_lengths(lengths, lanes)
        rows[0, row] += total
        rows[1, row] += count
        if by_column and total > 0:
            position = column if width == columns else i
            share = count / total if by_row else 1.0
            added, counts = sums[0, position : position + size], sums[1, position : position + size]
            for j in range(size):
                added[j] += lengths[j] * share
            if count == width:
                full += 1
            else:
                for j in range(size):
                    counts[j] += lengths[j] > 0
        i += size
        column = 0
        row += by_row
    for j in range(width):  # an addition of arrays takes a second to compile
        sums[1, j] += full
