"""Weights of more than two dimensions of which slices along one of them are much smaller than the others."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.quantization.lost_rows import RATIO, are_rows_needed, has_lost_rows, may_have_lost_rows
from tests.helpers.states import load_copy


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def with_slice(values: torch.Tensor, dim: int, factor: float) -> torch.Tensor:
    values.select(dim, -1).mul_(factor)
    return values


SHAPES = [(1, 128, 32), (2, 128, 32), (4, 64, 128), (3, 256, 3, 3), (40, 12, 3, 3), (256, 128, 1, 7), (6, 5, 4, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_one_slice_along_any_dimension_is_found_and_needed(shape: tuple[int, ...], layout: str) -> None:
    """However few the slices along the first dimension are; the first look leaves out none of them."""
    for dim in (dim for dim in range(len(shape)) if shape[dim] > 1):
        small, large = (with_slice(normal(*shape), dim, factor / RATIO) for factor in (0.5, 4.0))
        squares = with_slice(normal(*shape), dim, 2.0 * RATIO).square()
        if layout == "transposed":
            small, large, squares = (tensor.mT.contiguous().mT for tensor in (small, large, squares))
        assert has_lost_rows(small) and may_have_lost_rows([large, small], [None, None])[1]
        assert are_rows_needed(small, squares) is True and are_rows_needed(small, torch.ones_like(squares)) is False
        assert not has_lost_rows(large) and not has_lost_rows(normal(*shape))
        assert not has_lost_rows(with_slice(normal(*shape), dim, 0.0))


@pytest.mark.parametrize("members", [4, 40])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_of_one_stacked_member_is_found_and_needed(members: int, dim: int) -> None:
    """As a row of one of many experts; no member of a fresh model is taken for one."""
    stacked, squares = normal(members, 64, 96), torch.ones(members, 64, 96)
    assert not has_lost_rows(stacked)
    with_slice(stacked[2], dim, 0.5 / RATIO)
    with_slice(squares[2], dim, (2.0 * RATIO) ** 2)
    assert has_lost_rows(stacked) and may_have_lost_rows([stacked], [None]) == [True]
    assert are_rows_needed(stacked, squares) is True and are_rows_needed(stacked, torch.ones_like(squares)) is False


@pytest.mark.parametrize(("shape", "dim"), [((128, 1100, 64), 1), ((16, 64, 9000), 2), ((256, 64, 700), 2)])
def test_none_of_very_many_rows_of_members_is_left_out(shape: tuple[int, ...], dim: int) -> None:
    """However many members they are looked at with at a time, and wherever they lie."""
    stacked, squares = normal(*shape), torch.ones(shape)
    assert not has_lost_rows(stacked)
    for member, row in ((2, 3), (shape[0] - 1, shape[dim] - 1), (shape[0] // 2 + 1, 5)):
        small = stacked[member].select(dim - 1, row)
        original = small.clone()
        small.mul_(0.5 / RATIO)
        assert may_have_lost_rows([stacked], [None]) == [True] and has_lost_rows(stacked)
        assert are_rows_needed(stacked, squares) is False
        large = squares[member].select(dim - 1, row).fill_((2.0 * RATIO) ** 2)
        assert are_rows_needed(stacked, squares) is True
        small.copy_(original)
        large.fill_(1.0)


def test_no_look_copies_a_tensor_that_is_not_contiguous() -> None:
    """As kernels in the layout channels_last: as much memory again for each."""
    kernel = normal(256, 128, 3, 3).to(memory_format=torch.channels_last)
    with torch.profiler.profile(profile_memory=True) as profile:
        may_have_lost_rows([kernel], [None])
        has_lost_rows(kernel)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < kernel.nbytes / 2


@pytest.mark.parametrize(("shape", "dim"), [((2, 128, 32), 2), ((3, 256, 3, 3), 1), ((4, 64, 128), 1)])
def test_needed_slices_come_back_exactly(tmp_path: Path, shape: tuple[int, ...], dim: int) -> None:
    """As weights of stacked models, or of input channels, in other units; and it is said."""
    original = {
        "model.w": with_slice(normal(*shape), dim, 1e-3),
        "optimizer.state.w.exp_avg_sq": with_slice(normal(*shape) * 1e-3, dim, 1e3).square(),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dsq_ckpt.save(original, tmp_path / "0")
    assert load_copy(tmp_path / "0", original)["model.w"].equal(original["model.w"])
    assert [
        "stored exactly" in str(warning.message) for warning in caught if "times smaller" in str(warning.message)
    ] == [True]
