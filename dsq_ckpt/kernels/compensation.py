"""Quantization of a matrix in which later values compensate the rounding errors of earlier ones."""

from __future__ import annotations

import numpy as np

from dsq_ckpt.core.arrays import F32, U8
from dsq_ckpt.kernels.checks import check_array, scale_factor
from dsq_ckpt.kernels.cpu import compute_indices, scaled_bits
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.kernels.keys import KeyWindow

TILE = 64
"""Outputs processed together: a tile of 1,024 inputs is a quarter of a MiB."""


@jit
def _compensate(values, factors, lo, hi, inv_scale, table, levels):  # type: ignore[no-untyped-def]
    inputs, outputs = values.shape
    buffer = np.empty(outputs, np.float32)
    index = np.empty(outputs, np.uint32)
    errors = np.empty(outputs, np.float32)
    for i in range(inputs):
        row_values = values[i]
        compute_indices(scaled_bits(row_values, inv_scale, buffer), None, 0, lo, hi, index)
        for column in range(outputs):
            code = table[index[column]]
            errors[column] = row_values[column] - levels[code] if code < levels.size else np.float32(0.0)
        for j in range(i + 1, inputs):
            factor, later_values = factors[i, j], values[j]
            for column in range(outputs):
                later_values[column] -= factor * errors[column]


def compensate(values: F32, factors: F32, lo: int, hi: int, inv_scale: float, table: U8, levels: F32) -> None:
    """Shift each value to compensate the rounding errors of the values above it; the result has the codes to store.

    Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained transformers", 2023,
    Algorithm 1, with a table in place of a grid.

    Args:
        values: float32[inputs, outputs], of any strides; changed in place.
        factors: float32[inputs, inputs], share of an error of input i that is added to input j > i.
        lo, hi, inv_scale: as in `cpu.quantize`.
        table: uint8[bins], codes of a window's bins.
        levels: float32[codes], values of the codes; codes from `levels.size` on are protected.

    Raises:
        ValueError: a dtype or shape is wrong.
    """
    if values.dtype != np.float32 or values.ndim != 2:
        raise ValueError(f"values: expected float32[inputs, outputs], got {values.dtype}{list(values.shape)}")
    inputs, outputs = values.shape
    check_array("factors", factors, np.float32, (inputs, inputs))
    check_array("table", table, np.uint8, (KeyWindow(lo, hi).size,))
    check_array("levels", levels, np.float32)
    for start in range(0, outputs, TILE):
        tile = values[:, start : start + TILE].copy()
        _compensate(tile, factors, lo, hi, scale_factor(inv_scale), table, levels)
        values[:, start : start + TILE] = tile
