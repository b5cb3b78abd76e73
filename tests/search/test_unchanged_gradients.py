"""Gradients that are there at a save and that `evaluate` adds to are named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsq_ckpt
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.storage.manifest import is_complete


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_that_evaluate_adds_to_are_named(tmp_path, sharded):
    """FSDP2 adds to the tensor inside of a DTensor, whose own version stays: the next step was another one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model, data = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), torch.randn(32, 64)
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())

        def loss():
            return (model(data) - data).square().mean()

        def evaluate():
            result = loss()
            result.backward()
            return result.item()

        loss().backward()
        optimizer.step()
        with pytest.raises(SaveFailed, match=r"`evaluate` changed '0.weight.grad'"):
            dsq_ckpt.Compressor(model, optimizer, evaluate=evaluate).save(tmp_path / "a")
        assert not is_complete(tmp_path / "a")
    finally:
        dist.destroy_process_group()
