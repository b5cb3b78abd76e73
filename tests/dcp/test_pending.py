"""Asynchronous saves of tensors whose communication is under way, as of `redistribute(async_op=True)`."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import dsq_ckpt
from dsq_ckpt.dcp.copies import wait_for_collectives
from tests.dcp.test_distributed import checks
from tests.helpers.processes import torchrun

pytestmark = [
    pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.mark.parametrize("stage", ["auto", "copy", "quantize"])
def test_a_plain_tensor(stage, tmp_path):
    values = torch.arange(64.0)
    state = {"a": [AsyncCollectiveTensor(values), 1], "b": AsyncCollectiveTensor(values), "c": torch.ones(3)}
    dsq_ckpt.async_save(state, tmp_path / "a", config={"storage": {"stage": stage}}).result()
    target = {}
    dsq_ckpt.load(target, tmp_path / "a")
    assert torch.equal(target["a"][0], values) and torch.equal(target["b"], values) and target["a"][1] == 1
    assert type(state["b"]) is AsyncCollectiveTensor


def test_a_state_without_any_is_left_as_it_is():
    state = {"a": torch.ones(3), "b": [{"c": 1}]}
    assert wait_for_collectives(state) is state


@pytest.mark.slow
def test_ranks(tmp_path):
    assert checks(torchrun("pending", 2, tmp_path)) == 6
