"""Warnings of a save that no other test names."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

import dsq_ckpt


def net(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in itertools.pairwise(sizes)))


@pytest.mark.parametrize("state, model, warned", [
    ({"encoder": net(128, 128, 128).state_dict()}, nn.ModuleDict({"decoder": net(128, 128)}), True),
    ({"table": torch.randn(64, 128)}, net(128, 128), True),
    ({"a": {"b": net(128, 128).state_dict()}}, net(128, 128), False),  # below other keys
    ({"average": net(128, 128).state_dict(), "table": torch.randn(64, 128)}, net(128, 128), False),
    ({"0.lora_A.weight": torch.randn(64, 128)}, nn.ModuleList([nn.ModuleDict(
        {"base": nn.Linear(128, 128), "lora_A": nn.ModuleDict({"default": nn.Linear(128, 64)})}
    )]), False),  # as PEFT names adapters in their state dict
    ({"net": net(8, 8).state_dict(), "table": torch.randn(64, 128)}, net(8, 8), False),  # small, and so exact
    ({"net": net(8, 8).state_dict()}, nn.ModuleDict({"other": net(8, 8)}), False),  # nothing is lossy
])
def test_a_model_of_other_names_is_told_of(tmp_path, state, model, warned):
    """Its frozen weights and buffers were lossy, without a word."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(2):  # a delta has nothing to add
            dsq_ckpt.save({**state, "step": number}, tmp_path / str(number), model=model)
    found = [str(one.message) for one in told if "has nothing of what is saved" in str(one.message)]
    assert len(found) == warned


def test_it_names_both(tmp_path):
    model = nn.ModuleDict({"decoder": net(128, 128)})
    with pytest.warns(UserWarning, match=r"decoder\.0\.bias, decoder\.0\.weight there, encoder\.w in the state dict"):
        dsq_ckpt.save({"encoder": {"w": torch.randn(128, 128)}}, tmp_path / "a", model=model)
