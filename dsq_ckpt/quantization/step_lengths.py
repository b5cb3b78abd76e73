"""The length of Adam's next steps, which decoded second moments must not change as a rule.

A step is proportional to 1 / sqrt(v). Where v comes back as v', the next steps are sqrt(v / v') times as long as they
would be. Errors of single elements average out over a row; an error that a row, a column or a chunk shares does not,
since it is a change of that part's learning rate. So the mean of sqrt(v / v') is kept at 1 for each of them: scales of
rows and columns are moved after quantization, and the levels of a chunk are multiplied by what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt.core.arrays import F32, F64, I16, Codes
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.quantization.matrix_scales import MatrixScales

_TOGETHER = 1 << 24  # elements that are looked at together on a device
_FURTHEST = 64  # eighths of an octave by which a scale may be moved


class StepLengths(NamedTuple):
    """Sums over some elements of a chunk, and the numbers of elements: of sqrt(v / v').

    Attributes:
        first: row of the first of them.
        rows: float64[2, r], sum and number by row; of all together, where rows have no scales.
        columns: float64[2, c], by column; float64[2, 1], unused, where columns have no scales.
    """

    first: int
    rows: F64
    columns: F64


def step_lengths(values: F32, codes: Codes, levels: F64, scales: MatrixScales, start: int) -> StepLengths:
    """Return the sums for a block. Values whose code has no positive level do not count.

    Args:
        values: float32[n], over their scales.
        codes: uint8[n].
        levels: float64[k], k at most 256.
        scales: of the chunk.
        start: place of the block's first element in the chunk.
    """
    by_row, by_column = len(scales.by_row) > 0, len(scales.by_column) > 1
    columns = scales.columns if by_row or by_column else max(1, len(values))
    first = start // columns if by_row else 0
    last = (start + max(len(values), 1) - 1) // columns if by_row else 0
    found = StepLengths(first, np.zeros((2, last + 1 - first)), np.zeros((2, columns if by_column else 1)))
    offset = start % columns if by_row or by_column else 0
    _add(values, codes, _inverse_roots(levels), offset, columns, by_row, by_column, found.rows, found.columns)
    return found


def step_lengths_on_device(
    values: torch.Tensor, codes: torch.Tensor, levels: F64, scales: MatrixScales
) -> torch.Tensor:
    """Return the sums for a whole chunk, as `unpacked` takes them; float64, on the device of the values."""
    inverse = torch.from_numpy(_inverse_roots(levels)).to(values.device)
    by_row, by_column = len(scales.by_row) > 0, len(scales.by_column) > 1
    columns = scales.columns if by_row or by_column else max(1, values.numel())
    step = max(1, _TOGETHER // columns) * columns
    by_rows, by_columns = [], torch.zeros(2, columns if by_column else 1, dtype=torch.float64, device=values.device)
    for value, code in zip(values.split(step), codes.split(step), strict=True):
        factors = inverse[code.int()].view(-1, columns)
        held = factors > 0
        lengths = torch.where(held, value.view(-1, columns).sqrt() * factors, 0.0)
        by_rows.append(torch.stack([lengths.sum(1), held.sum(1)]))
        if by_column:
            by_columns += torch.stack([lengths.sum(0), held.sum(0)])
    rows = torch.cat(by_rows, 1) if by_rows else torch.zeros(2, 1, dtype=torch.float64, device=values.device)
    return torch.cat([rows if by_row else rows.sum(1, keepdim=True), by_columns], 1)


def unpacked(found: F64, scales: MatrixScales) -> StepLengths:
    """Return the sums that came from a device."""
    rows = max(1, len(scales.by_row))
    return StepLengths(0, found[:, :rows], found[:, rows:])


def corrected(scales: MatrixScales, blocks: Sequence[StepLengths]) -> tuple[MatrixScales, float]:
    """Return scales for the decoder, and the log2 of the factor that levels are multiplied by.

    By these, the mean of sqrt(v / v') is 1 in the chunk, and in its rows and columns as nearly as eighths of an octave
    allow.

    Args:
        scales: by which the values were divided.
        blocks: sums for all blocks of the chunk.
    """
    rows, columns = np.zeros((2, max(1, len(scales.by_row)))), np.zeros((2, max(1, len(scales.by_column))))
    for block in blocks:
        rows[:, block.first : block.first + block.rows.shape[1]] += block.rows
        columns += block.columns
    total, count = rows.sum(1)
    if not total > 0:
        return scales, 0.0
    by_row, row_factor = _moves(rows, total / count)
    by_column, column_factor = _moves(columns, total / count)
    moved = replace(
        scales, by_row=scales.by_row + by_row[: len(scales.by_row)],
        by_column=scales.by_column + by_column[: len(scales.by_column)],
    )
    return moved, 2 * float(np.log2(total / count * row_factor * column_factor))


def _moves(sums: F64, mean: float) -> tuple[I16, float]:
    """Return how far to move each scale, int16, and by which factor that changes the mean."""
    held = sums[0] > 0
    means = np.divide(sums[0], sums[1], where=held, out=np.full(sums.shape[1], mean))
    moves = np.rint(16 * np.log2(means / mean)).clip(-_FURTHEST, _FURTHEST)
    total = sums[0].sum()
    return moves.astype(np.int16), float((sums[0] * np.exp2(-moves / 16)).sum() / total) if total > 0 else 1.0


def _inverse_roots(levels: F64) -> F64:
    """Return one over the root of the level of each code, float64[256]; zero for codes of no positive level."""
    out = np.zeros(256)
    np.divide(1.0, np.sqrt(levels.clip(0)), out=out[: len(levels)], where=levels > 0)
    return out


@jit
def _add(
    values: Any, codes: Any, inverse: Any, offset: int, columns: int, by_row: bool, by_column: bool, rows: Any,
    sums: Any,
) -> None:
    i, row, column = 0, 0, offset
    while i < len(values):
        size = min(columns - column, len(values) - i)
        total, held = 0.0, 0
        for j in range(i, i + size):
            factor = inverse[codes[j]]
            if factor > 0:
                length = np.sqrt(values[j]) * factor
                total += length
                held += 1
                if by_column:
                    sums[0, column + j - i] += length
                    sums[1, column + j - i] += 1
        rows[0, row] += total
        rows[1, row] += held
        i += size
        column = 0
        row += by_row
