"""Which values count as lying where a restore has put them."""

from __future__ import annotations

import numpy as np
import pytest

from dsq_ckpt.core.arrays import F32, Array
from dsq_ckpt.quantization import restored_values

CELLS, PARTS, ELEMENTS = 8, 16, 200_000
LOW = np.arange(256.0) + 100  # far from zero, whose neighbours are ignored


def is_uneven(places: Array) -> bool:
    """Return whether values at these places of their cells, in units of cells, count as restored."""
    codes = np.arange(len(places), dtype=np.uint8) % CELLS
    values: F32 = (LOW[codes] + places).astype(np.float32)
    sums = restored_values.measure_part_waves(
        values, codes, 1.0, LOW, np.full(256, float(PARTS)), PARTS, restored_values._WAVES
    )
    return restored_values._is_uneven(np.array(sums), restored_values._UNEVEN)


def spread(first: float, last: float, elements: int = ELEMENTS) -> Array:
    return np.random.default_rng(0).uniform(first, last, elements)


@pytest.mark.parametrize("first", [0.0, 0.03, 0.1, 0.17])
@pytest.mark.parametrize("last", [1.0, 0.96, 0.9, 0.81])
def test_spread_values_that_begin_or_end_within_a_part_are_not_restored(first: float, last: float) -> None:
    """As where values beyond have another code in the parent checkpoint, and so lie in the next cell."""
    assert not is_uneven(spread(first, last))


@pytest.mark.parametrize("first", [0.03, 0.1])
def test_nor_are_they_with_a_few_values_outside(first: float) -> None:
    assert not is_uneven(np.concatenate([spread(first, 0.9), spread(0, 1, ELEMENTS // 200)]))


@pytest.mark.parametrize("decay", [4, 16, 40])
def test_a_density_that_falls_steeply_is_not_restored(decay: float) -> None:
    places = np.random.default_rng(0).exponential(1 / decay, ELEMENTS)
    assert not is_uneven(places[places < 1])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("moved", [0.0, 0.1, 0.25])
def test_values_that_gather_are_restored_also_with_every_second_part_empty(parts: int, moved: float) -> None:
    width = parts / PARTS
    middles = (np.floor(spread(0.2, 0.8) / width) + 0.5) * width
    assert is_uneven(middles + np.random.default_rng(1).normal(0, moved / PARTS, ELEMENTS))
