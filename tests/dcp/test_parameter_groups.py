"""Lists of parameters of several ranks, brought together by the places of their groups."""

from __future__ import annotations

import warnings

import pytest
import torch

from dsq_ckpt.dcp.parameter_groups import find_parameter_lists, merge_parameter_lists
from dsq_ckpt.dcp.rank_differences import compute_digests, find_differing_names

A, B, OTHER = "o.param_groups.0.params", "o.param_groups.1.params", "critic.param_groups.0.params"


@pytest.mark.parametrize(("ranks", "together"), [
    ([{A: ["a", "b"]}] * 3, {}), ([{A: ["a"]}, {A: ["b"]}, {A: ["a"]}], {A: ["a", "b"]}),
    ([{A: ["s"], B: ["e0"]}, {A: ["s"], B: ["e1"]}], {A: ["s"], B: ["e0", "e1"]}),
    ([{A: ["s"]}, {A: ["s"], B: ["e"]}], {A: ["s"], B: ["e"]}), ([{A: []}, {A: ["b"]}], {A: ["b"]}),
    ([{A: ["a"], OTHER: ["b"]}, {A: ["b"], OTHER: ["a"]}], {A: ["a", "b"], OTHER: ["b", "a"]}), ([{}, {}], {}),
])
def test_lists_of_all_ranks_without_a_warning(
    ranks: list[dict[str, list[str]]], together: dict[str, list[str]]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert merge_parameter_lists(ranks) == together


def test_a_parameter_is_in_one_list() -> None:
    """Otherwise a load would take it for two parameters."""
    with pytest.warns(UserWarning, match="'s' is in another parameter group of the optimizer on some ranks"):
        assert merge_parameter_lists([{A: ["s"], B: ["e"]}, {A: ["f"], B: ["s"]}]) == {A: ["s", "f"], B: ["e"]}


@pytest.mark.parametrize("state", [
    {A: [0, 1]}, {A: ("a",)}, {"params": ["a"]}, {"o.param_groups.0.names": ["a"]}, {"my_param_groups.0.params": ["a"]},
])
def test_lists_that_are_compared_as_other_values(state: dict[str, object]) -> None:
    assert not find_parameter_lists(state) and set(state) <= compute_digests(state).keys()
    assert find_parameter_lists({A: ["a"], "param_groups.3.params": []}) == {A: ["a"], "param_groups.3.params": []}


@pytest.mark.parametrize(("more", "name"), [
    ({"o.param_groups.0.lr": 0.2}, "o.param_groups.0.lr"), ({"o.param_groups.0.nesterov": True}, "o.param_groups.0"),
    ({"o.param_groups.0.lr": torch.tensor(0.2)}, "o.param_groups.0.lr"),
    ({"o.param_groups.0.betas": torch.tensor([0.9, 0.2])}, "o.param_groups.0.betas"), ({A: ["b"]}, None),
])
def test_options_of_groups_are_compared(more: dict[str, object], name: str | None) -> None:
    """Tensors of floats too, and which options there are."""
    own = {A: ["a"], "o.param_groups.0.lr": 0.1, "o.param_groups.0.betas": torch.tensor([0.9, 0.1])}
    ranks = [compute_digests(own), compute_digests({**own, **more})]
    assert find_differing_names(ranks) == ([] if name is None else [name])
