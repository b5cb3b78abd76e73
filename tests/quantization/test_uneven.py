"""Weights of which rows or columns are much smaller than the others."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.quantization.uneven import RATIO, has_lost_rows
from tests.helpers.states import loaded, relative_error


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def with_part(values: torch.Tensor, where: object, factor: float) -> torch.Tensor:
    values[where] *= factor
    return values


@pytest.mark.parametrize("shape", [(300, 90), (90, 300), (2000, 7), (7, 2000), (40, 12, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_or_column_is_found(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for where in (5, (slice(None), 5)):
        assert has_lost_rows(with_part(normal(*shape).to(dtype), where, 0.5 / RATIO))
        assert not has_lost_rows(with_part(normal(*shape).to(dtype), where, 2.5 / RATIO))
        assert not has_lost_rows(with_part(normal(*shape).to(dtype), where, 0.0))


@pytest.mark.parametrize("values", [
    normal(300, 90), normal(300, 90).cumsum(0), normal(300, 90) * (normal(300, 90).flip(0) > 1.9), torch.zeros(70, 70),
    torch.eye(300), normal(5000), torch.tensor(3.0), torch.empty(0, 5), torch.full((70, 70), float("nan")),
    normal(90, 300).exp().t(), normal(1, 90_000), normal(3, 90_000), normal(90_000, 3), normal(90_000, 6),
    normal(16, 8, 9, 9).to(memory_format=torch.channels_last),
])
def test_others_are_not(values: torch.Tensor) -> None:
    assert not has_lost_rows(values)


def test_zeros_do_not_hide_a_small_row() -> None:
    """As the rows of a vocabulary that was made larger."""
    table = normal(500, 90)
    table[:100] = 0
    assert not has_lost_rows(table)
    table[300] *= 0.5 / RATIO
    assert has_lost_rows(table)


def test_it_is_said_at_a_keyframe(tmp_path: Path) -> None:
    """And true: the columns come back changed; of an exempt tensor they do not."""
    table = with_part(normal(2000, 7), (slice(None), slice(4)), 100.0)
    said = []
    for name, config in (("lossy", {}), ("exact", {"quantize": {"rules": [{"pattern": "pose*", "exact": True}]}})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(2):
                path = tmp_path / name / str(number)
                dsq_ckpt.save({"poses.weight": table, "w": normal(90, 90)}, path, config=config)
        said.append([str(one.message) for one in caught if "times smaller than the others" in str(one.message)])
        found = loaded(path, {"poses.weight": table})["poses.weight"]
        lost = relative_error(table[:, 4:], found[:, 4:])
        assert lost > 0.3 if name == "lossy" else lost == 0
    assert [len(one) for one in said] == [1, 0] and "columns of poses.weight are" in said[0][0]
