"""Which values of one name count as different on two ranks."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from dsq_ckpt.dcp.rank_differences import compute_digests, find_differing_names


@pytest.mark.parametrize(("one", "other"), [
    (1, 2), (1, 1.0), (True, 1), (0.1, 0.2), ("a", "b"), (b"a", "a"), (None, 0), ("a", None), (1j, 2j), ("\ud800", "a"),
    ((1, 2), [1, 2]), ([1, [2]], [[1], 2]), ([], ()), ({"a": 1}, {"a": 2}), ({1: "a"}, {"1": "a"}), ("ab", ["a", "b"]),
    (random.Random(1).getstate(), random.Random(2).getstate()),
    (np.random.RandomState(1).get_state(), np.random.RandomState(2).get_state()),
    (torch.Generator().manual_seed(1).get_state(), torch.Generator().manual_seed(2).get_state()),
    (torch.tensor(3), torch.tensor(4)), (torch.tensor([True, False]), torch.tensor([True, True])),
    ([torch.tensor(3)], [torch.tensor(4)]), (np.float64(0.1), 0.2), (np.int64(1), np.int64(2)),
    (b"ab" * 50_000, b"ac" * 50_000), ("ab" * 50_000, "ac" * 50_000), (bytes(100_000), bytes(100_001)),
    (list(range(50_000)), list(range(1, 50_001))), (torch.tensor(0.1), torch.tensor(0.2)),
])
def test_different_values(one: Any, other: Any) -> None:
    assert find_differing_names([compute_digests({"x": one}), compute_digests({"x": other})]) == ["x"]
    for value in (one, other):
        assert find_differing_names([compute_digests({"x": value}), compute_digests({"x": value})]) == []


@pytest.mark.parametrize("shape", [(2, 2), (64, 300), (1, 1000), (1000, 1), (8, 4, 3, 3), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_matrices_are_told_apart_by_a_few_elements(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whatever the strides; as an average that one rank updates, or experts that have the names of other ranks'."""
    one, other = (torch.randn(*shape).to(dtype) for _ in range(2))
    values = one, other, torch.nn.Parameter(one.float())
    told = [compute_digests({"x": value, "b": torch.rand(9)}) for value in values]
    assert find_differing_names(told[:2]) == (["x"] if one.numel() else [])
    assert told[0] == told[2] == compute_digests({"x": one.mT.contiguous().mT})
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_digests({"x": one}) == told[0]


@pytest.mark.parametrize("dtype", [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint64, torch.complex64, torch.complex128,
])
@pytest.mark.parametrize("shape", [(70_000,), (512, 512), (40, 50, 60)])
def test_integers_and_complex_matrices_are_told_apart_by_a_few_elements(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """As packed experts that have the names of other ranks', or a permutation of a data set; in tuples as well."""
    one, other = (torch.randn(shape).mul(100).to(torch.int64 if dtype == torch.uint64 else dtype) for _ in range(2))
    if dtype == torch.bool:
        one, other = torch.randn(shape) > 0, torch.randn(shape) > 0
    again = one.mT.contiguous().mT if one.ndim > 1 else one.clone()
    for form in (torch.Tensor.clone, lambda value: (value,), lambda value: torch.nn.Parameter(value, False)):
        digests = [compute_digests({"x": form(value.to(dtype))}) for value in (one, again, other)]
        compared = not (dtype.is_complex and one.ndim == 1)
        assert find_differing_names(digests[:2]) == [] and find_differing_names(digests) == (["x"] if compared else [])


def test_large_integers_are_compared_to_the_last_bit() -> None:
    numbers = torch.full((20_000,), 1 << 62)
    assert find_differing_names([compute_digests({"x": numbers}), compute_digests({"x": numbers + 1})]) == ["x"]


def test_conjugates_are_the_values_that_they_stand_for() -> None:
    numbers = torch.randn(8, 8, dtype=torch.complex64)
    plain, lazy, resolved = (
        compute_digests({"x": value}) for value in (numbers, numbers.conj(), numbers.conj().resolve_conj())
    )
    assert lazy == resolved != plain


@pytest.mark.parametrize("shape", [(), (64, 64)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble, np.complex64])
def test_numpy_matrices_and_numbers(shape: tuple[int, ...], dtype: Any) -> None:
    one, other = (np.random.default_rng(seed).normal(size=shape).astype(dtype) for seed in range(2))
    again = [compute_digests({"x": value}) for value in (one, np.array(one, order="F"))]
    assert find_differing_names(again) == [] and find_differing_names([*again, compute_digests({"x": other})]) == ["x"]


def test_numbers_of_numpy_are_compared_as_they_are_stored() -> None:
    assert compute_digests({"x": np.float64(0.1), "y": np.int8(3)}) == compute_digests({"x": 0.1, "y": 3})


def test_single_floats_of_a_model_are_not_compared() -> None:
    """Each rank's observers keep the range of its own activations so, and DDP makes them equal in the next step."""
    for value in (torch.tensor(0.1), torch.tensor(0.1).bfloat16()):
        compared = {"metrics.model", "loss", "optimizer.state.0.step"}
        state = dict.fromkeys([*compared, "model.act.max_val", "module.act.max_val"], value)
        assert compute_digests(state).keys() == compared
    assert compute_digests({"model.bn.num_batches_tracked": torch.tensor(3)}) != {}


class Own:
    """An object that may be pickled to other bytes on each rank."""


@pytest.mark.parametrize("value", [
    torch.rand(3), torch.rand(3).bfloat16(), torch.rand(1 << 20), torch.randn(2, dtype=torch.complex64), Own(),
    {1, 2}, [1, Own()], {"a": Own()}, np.random.rand(3), torch.arange(3).to_sparse(), torch.nn.Parameter(torch.rand(3)),
    torch.empty(8, 8, device="meta"), (torch.rand(3), 1), np.array(["a"]), np.datetime64("2026-01-01"),
])
def test_values_that_are_not_compared(value: Any) -> None:
    """Vectors of floats, as of reductions, and objects of which nothing is known."""
    assert compute_digests({"x": value}) == {}


def test_large_and_endless_values_take_no_time() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(10_000):
        deep = [deep]
    assert compute_digests({"a": endless, "b": deep, "e": [endless] * 3}) == {}
    large = {"c": list(range(1 << 20)), "d": "x" * (1 << 20), "f": [b"x" * (1 << 28)] * 100}
    began = time.process_time()
    assert compute_digests(large).keys() == {"c", "d", "f"}
    assert time.process_time() - began < 5


def test_parameters_of_a_group_are_not_compared() -> None:
    """With experts, each rank's optimizer has parameters of its own."""
    own = [compute_digests({"param_groups.0.params": [name], "param_groups.0.lr": 0.1}) for name in ("a", "b")]
    assert find_differing_names(own) == [] and "param_groups.0.lr" in own[0]


def test_equal_values_made_otherwise() -> None:
    """Tensors of other strides, and names that are one object on one rank and two on another."""
    name = "ab" * 20
    again = "".join(list(name))
    assert find_differing_names([compute_digests({"x": [name, name]}), compute_digests({"x": [name, again]})]) == []
    grid = torch.arange(12).view(3, 4)
    for view in (grid.t(), grid[:, ::2], grid.view(-1)[::2], grid[:1].expand(3, 4)):
        assert find_differing_names([compute_digests({"x": view}), compute_digests({"x": view.contiguous()})]) == []


def test_numbers_of_thousands_of_digits() -> None:
    assert find_differing_names([compute_digests({"x": 10**5000}), compute_digests({"x": 10**5000 + 1})]) == ["x"]


def test_names_that_one_rank_has() -> None:
    ranks = [compute_digests({"a": 1, "b": 1}), compute_digests({"b": 2, "c": 3}), {}]
    assert find_differing_names(ranks) == ["b"]
