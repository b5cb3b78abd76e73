"""Chains of differences on several ranks: what the worker checks is written in its docstrings."""

from __future__ import annotations

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.lc import algorithm_1, make_walk
from tests.helpers.processes import torchrun


@pytest.mark.slow
def test_differences(tmp_path):
    assert torchrun("residual", 2, tmp_path, "save").count("ok ") == 5
    for ranks in (1, 3):
        assert torchrun("residual", ranks, tmp_path, "load").count("ok ") == 1
    merged = dsq_ckpt.merge(tmp_path / "sync" / "3", tmp_path / "merged").path
    assert Manifest.read(merged).ranks == 2 and Manifest.read(merged).depth == 1
    for fqn, shape, seed in (("rows.weight", (101, 64), 1), ("columns.weight", (96, 64), 2)):
        state = {fqn: torch.zeros(shape)}
        dsq_ckpt.load(state, merged)
        assert torch.equal(state[fqn], algorithm_1(make_walk(*shape, steps=4, seed=seed))[-1])
