"""Passes over gradients in Numba give what torch's own operations give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt.kernels.scan import Samples, as_integers, bitwise_equal, find_scale, gather_elements

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)
ODD = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45)


def make_gradient(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """A gradient of which a part is zero, and a few elements are odd."""
    values = rng.normal(size=shape) * (rng.random(shape) < 0.5)
    odd = rng.choice(np.array(ODD), shape)
    return torch.tensor(np.where(rng.random(shape) < 0.2, odd, values)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 2**32 - 1))
def test_gather_is_torch_s(dtype: torch.dtype, shapes: list[tuple[int, ...]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    gradients = [make_gradient(shape, dtype, rng) for shape in shapes]
    supports = [torch.tensor(rng.integers(0, gradient.numel(), 3 if gradient.numel() else 0)) for gradient in gradients]
    counts = [support.numel() for support in supports]
    values, nonzero = torch.ones(sum(counts), dtype=dtype), torch.full((len(shapes),), -1)
    gather_elements(gradients, torch.cat(supports), counts, values, nonzero)
    expected = torch.cat([gradient.reshape(-1)[support] for gradient, support in zip(gradients, supports, strict=True)])
    assert bitwise_equal(values, expected)
    assert nonzero.tolist() == [int(as_integers(gradient).count_nonzero()) for gradient in gradients]


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "expand_path", "every other", "all the same"])
def test_gather_goes_by_row_major_places(layout: str) -> None:
    gradient = {
        "every other": torch.randn(80)[::2], "all the same": torch.randn(1).expand(40),
        "transposed": torch.randn(7, 5).t(), "expand_path": torch.randn(4, 1).expand(4, 6),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }[layout]
    places, values, nonzero = torch.tensor([1, 8, 19]), torch.empty(3), torch.empty(1, dtype=torch.int64)
    gather_elements([gradient], places, [3], values, nonzero)
    assert torch.equal(values, gradient.flatten()[places]) and int(nonzero) == gradient.numel()


@pytest.mark.parametrize("place", [-1, 4, 2**40])
def test_gather_reads_nothing_else(place: int) -> None:
    places, values, nonzero = torch.tensor([0, place]), torch.empty(2), torch.empty(2, dtype=torch.int64)
    with pytest.raises(IndexError, match="gradient 1 of"):
        gather_elements([torch.ones(9), torch.ones(4)], places, [1, 1], values, nonzero)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1.0, 0.25, 0.3, 1e-30]))
def test_products_are_torch_s(dtype: torch.dtype, shapes: list[tuple[int, ...]], seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    factor = torch.tensor(scale)
    before = [make_gradient(shape, dtype, rng) for shape in shapes]
    after = [tensor * factor if dtype == torch.float32 else tensor.clone() for tensor in before]
    scales = [1.25, float(factor)]
    changeable = [tensor for tensor in after if tensor.numel()]
    if changeable and (dtype == torch.float32 or scale == 1.0):
        found_scale = find_scale(before, scales, after)
        assert found_scale in (scales if dtype == torch.float32 else [1.0])
        products = before if found_scale == 1.0 else [tensor * found_scale for tensor in before]
        assert all(bitwise_equal(one, other) for one, other in zip(products, after, strict=True))
        as_integers(changeable[-1]).view(-1)[-1] ^= 1  # the last bit
        assert find_scale(before, [float(factor)], after) is None
    elif changeable:
        assert find_scale(before, scales, after) is None


def test_products_of_other_layouts() -> None:
    before = torch.randn(2, 3, 4, 5)
    after = (before * 0.5).contiguous(memory_format=torch.channels_last)
    assert find_scale([before], [0.25, 0.5], [after]) == 0.5


@pytest.mark.parametrize("other", [torch.ones(8, dtype=torch.bfloat16), torch.ones(4), torch.ones(2, 4)])
def test_other_forms_are_no_products(other: torch.Tensor) -> None:
    """And nothing beyond their ends is read."""
    assert find_scale([torch.ones(8)], [1.0, 0.5], [other]) is None


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=8), runs=st.integers(1, 200))
def test_samples_are_of_every_tensor(sizes: list[int], runs: int) -> None:
    tensors = [torch.randn(size) for size in sizes]
    samples = Samples(tensors, runs)
    before = samples.take()
    assert np.array_equal(before, samples.take())
    for tensor in tensors:
        original = tensor.clone()
        tensor.numpy()[...] += 1.0
        assert np.array_equal(before, samples.take()) == (tensor.numel() == 0)
        tensor.numpy()[...] = original.numpy()


def test_samples_see_what_is_longer_than_the_gaps_between_them() -> None:
    tensor = torch.randn(100_000)
    samples = Samples([tensor], 100)
    before = samples.take()
    for start in range(0, 99_000, 250):
        tensor.numpy()[start : start + 1000] += 1.0
        assert not np.array_equal(before, samples.take()), start
        before = samples.take()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "channels_last", "scalar"])
def test_samples_are_of_any_layout_and_dtype(dtype: torch.dtype, layout: str) -> None:
    tensor = {
        "plain": torch.randn(50, 7), "transposed": torch.randn(50, 7).t(), "scalar": torch.randn(()),
        "channels_last": torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }[layout].to(dtype)
    samples = Samples([tensor], 4)
    before = samples.take()
    assert len(before)
    tensor.mul_(-1)
    assert not np.array_equal(before, samples.take())


def test_samples_leave_out_what_has_holes_or_is_elsewhere() -> None:
    holes = torch.randn(8, 8)[:, :3]
    empty = [torch.empty(0, 3), torch.empty(3, 0)]
    assert len(Samples([holes, torch.randn(3, 1).expand(3, 4), torch.empty(5, device="meta"), *empty], 9).take()) == 0
    assert len(Samples([torch.eye(3).to_sparse()], 9).take()) == 0
