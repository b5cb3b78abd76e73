"""Which values of one name count as different on two ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from dsq_ckpt.dcp.differing import differing, digests


@pytest.mark.parametrize(("one", "other"), [
    (1, 2), (1, 1.0), (True, 1), (0.1, 0.2), ("a", "b"), (b"a", "a"), (None, 0), ("a", None), (1j, 2j), ("\ud800", "a"),
    ((1, 2), [1, 2]), ([1, [2]], [[1], 2]), ([], ()), ({"a": 1}, {"a": 2}), ({1: "a"}, {"1": "a"}), ("ab", ["a", "b"]),
    (random.Random(1).getstate(), random.Random(2).getstate()),
    (np.random.RandomState(1).get_state(), np.random.RandomState(2).get_state()),
    (torch.Generator().manual_seed(1).get_state(), torch.Generator().manual_seed(2).get_state()),
    (torch.tensor(3), torch.tensor(4)), (torch.tensor([True, False]), torch.tensor([True, True])),
    ([torch.tensor(3)], [torch.tensor(4)]),
])
def test_different_values(one: Any, other: Any) -> None:
    assert differing([digests({"x": one}), digests({"x": other})]) == ["x"]
    for value in (one, other):
        assert differing([digests({"x": value}), digests({"x": value})]) == []


@pytest.mark.parametrize("shape", [(2, 2), (64, 300), (1, 1000), (1000, 1), (8, 4, 3, 3), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_matrices_are_told_apart_by_a_few_elements(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whatever the strides; as an average that one rank updates, or experts that have the names of other ranks'."""
    one, other = (torch.randn(*shape).to(dtype) for _ in range(2))
    told = [digests({"x": value, "b": torch.rand(9)}) for value in (one, other, torch.nn.Parameter(one.float()))]
    assert differing(told[:2]) == (["x"] if one.numel() else [])
    assert told[0] == told[2] == digests({"x": one.mT.contiguous().mT})
    with torch.autocast("cpu", torch.bfloat16):
        assert digests({"x": one}) == told[0]


class Own:
    """An object that may be pickled to other bytes on each rank."""


@pytest.mark.parametrize("value", [
    torch.rand(3), torch.rand(3).bfloat16(), torch.arange(1 << 14), torch.randn(2, dtype=torch.complex64), Own(),
    {1, 2}, [1, Own()], {"a": Own()}, np.random.rand(3), torch.arange(3).to_sparse(), torch.nn.Parameter(torch.rand(3)),
])
def test_values_that_are_not_compared(value: Any) -> None:
    """Floats of reductions, large tensors, and objects of which nothing is known."""
    assert digests({"x": value}) == {}


def test_large_and_endless_values_take_no_time() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(10_000):
        deep = [deep]
    assert digests({"a": endless, "b": deep, "c": list(range(1 << 20)), "d": "x" * (1 << 20), "e": [endless] * 3}) == {}


def test_parameters_of_a_group_are_not_compared() -> None:
    """With experts, each rank's optimizer has parameters of its own."""
    own = [digests({"param_groups.0.params": [name], "param_groups.0.lr": 0.1}) for name in ("a", "b")]
    assert differing(own) == [] and "param_groups.0.lr" in own[0]


def test_equal_values_made_otherwise() -> None:
    """Tensors of other strides, and names that are one object on one rank and two on another."""
    name = "ab" * 20
    again = "".join(list(name))
    assert differing([digests({"x": [name, name]}), digests({"x": [name, again]})]) == []
    grid = torch.arange(12).view(3, 4)
    assert differing([digests({"x": grid.t()}), digests({"x": grid.t().contiguous()})]) == []


def test_numbers_of_thousands_of_digits() -> None:
    assert differing([digests({"x": 10**5000}), digests({"x": 10**5000 + 1})]) == ["x"]


def test_names_that_one_rank_has() -> None:
    ranks = [digests({"a": 1, "b": 1}), digests({"b": 2, "c": 3}), {}]
    assert differing(ranks) == ["b"]
