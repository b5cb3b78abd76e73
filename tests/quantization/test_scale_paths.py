"""Scales are multiplied alike on every path of the compiled code and without it."""

from __future__ import annotations

import numpy as np
import pytest

from dsq_ckpt.coding.scales import FACTORS
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from tests.helpers.coder_paths import path as path

LARGEST = np.float32(np.finfo(np.float32).max)


def scales_of(rows, columns, by_row, by_column, reach, seed):
    rng = np.random.default_rng(seed)
    exponents = [
        rng.integers(-reach, reach + 1, size if has else 0).astype(np.int16)
        for size, has in ((rows, by_row), (columns, by_column))
    ]
    return MatrixScales(columns, *exponents)


@pytest.mark.parametrize("shape", [(40, 100), (3, 5001), (700, 33), (20, 8), (5000, 1), (1, 3000)])
@pytest.mark.parametrize("reach", [30, 900, 32767])
def test_products(path, shape, reach):
    """Multiply any bit patterns, from any element on, by scales past both ends of the table."""
    rows, columns = shape
    for seed, (by_row, by_column) in enumerate([(True, True), (True, False), (False, True)]):
        scales = scales_of(rows, columns, by_row, by_column, reach, seed)
        bits = np.random.default_rng(seed).integers(0, 1 << 32, rows * columns, np.uint32)
        number = np.full(shape, 1016)
        number += scales.by_row[:, None] if by_row else 0
        number += scales.by_column if by_column else 0
        for start, stop in ((0, rows * columns), (1, 2), (columns // 2, rows * columns - 3)):
            if start >= stop:
                continue
            values = bits.view(np.float32)[start:stop].copy()
            with np.errstate(all="ignore"):
                wanted = values * FACTORS[number.clip(0, 2047)].reshape(-1)[start:stop]
            wanted = np.where(np.isnan(wanted), wanted, wanted.clip(-LARGEST, LARGEST))
            scales.multiply(values, start)
            assert (values.view(np.uint32) == wanted.view(np.uint32)).all()


def test_arrays_that_do_not_fit(path):
    scales = scales_of(40, 100, True, True, 5, 0)
    for values in (np.ones(100), np.ones((2, 50), np.float32), np.ones(200, np.float32)[::2]):
        with pytest.raises(ValueError, match="values"):
            scales.multiply(values, 0)
    with pytest.raises(ValueError, match="3 values from 3998 on are not all of 40 rows"):
        scales.multiply(np.ones(3, np.float32), 3998)
