"""A rank that is not in the process group is told so, in place of an error of torch; the ranks of the group save."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from harness import done, world

import dsq_ckpt
from dsq_ckpt import ConfigError
from dsq_ckpt.lowdiff import recover

with world() as (rank, _):
    group = dist.new_group([1])
    state, path = {"w": torch.ones(3)}, sys.argv[1]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for name, call in {
        "save": lambda: dsq_ckpt.save(state, f"{path}/save", process_group=group),
        "load": lambda: dsq_ckpt.load(dict(state), f"{path}/save", process_group=group),
        "async_save": lambda: dsq_ckpt.async_save(state, f"{path}/async", process_group=group).result(),
        "compressor": lambda: dsq_ckpt.Compressor(model, process_group=group).save(f"{path}/compressor"),
        "recover": lambda: recover(f"{path}/none", model, optimizer, process_group=group),
    }.items():
        if rank == 1:
            call()
        else:
            with pytest.raises(ConfigError, match=r"^rank 0 is not in process_group: save and load with that group on"):
                call()
        done(name)
