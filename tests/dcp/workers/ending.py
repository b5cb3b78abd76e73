"""Nothing is left that gloo's threads would free while the interpreter exits: no tensors, and no groups.

What they free then aborts the process, or DDP's reducer waits for them without end. It is a race that is seldom lost,
so the test looks for what is left at once.
"""

from __future__ import annotations

import sys
import time
import weakref
from concurrent.futures import thread as pools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import dsq_ckpt
from dsq_ckpt.api import background
from dsq_ckpt.distributed import comm as comms
from dsq_ckpt.distributed import gloo_lifetime

lent: list[weakref.ref[torch.Tensor]] = []


def recorded(collective: Any) -> Any:
    """Return a collective that notes its tensors, without keeping them: who counts references waits for these too."""

    def call(*args: Any, **keywords: Any) -> Any:
        for arg in args:
            lent.extend(map(weakref.ref, arg if isinstance(arg, list) else [arg]))
        return collective(*args, **keywords)

    return call


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for name in ("all_gather", "all_reduce", "broadcast"):
    setattr(dist, name, recorded(getattr(dist, name)))
comms._RELEASE_TIMEOUT = 300.0  # a machine may be busy
comm = comms.TorchCommunicator()
for _ in range(200):
    comm.gather(dist.get_rank())
    comm.sum(np.ones(8, np.int64))
    assert comm.broadcast(["of rank", dist.get_rank()]) == ["of rank", 0]
    assert [tensor() for tensor in lent] == [None] * (1 + dist.get_world_size() + 1 + 1)
    lent.clear()
print("ok tensors", flush=True)

dsq_ckpt.async_save({"weight": torch.randn(200, 64)}, Path(sys.argv[1]) / "step").result()
group = background.get_group(None)
assert group is not None and group is background.get_group(None)
left = weakref.ref(group)
del group
dist.destroy_process_group()
for thread in list(pools._threads_queues):  # type: ignore[attr-defined]  # an exit waits for the save's, which has it
    thread.join(comms._RELEASE_TIMEOUT)
assert left() is None
print("ok groups", flush=True)

# DDP drops the group last, while gloo's thread wants the lock: this one gives it to nobody, where it need not.
sys.setswitchinterval(1000)
state = {"weight": torch.randn(200, 64)}
for number in range(40):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{number}", rank=rank, world_size=size)
    other = dist.new_group()  # DCP does not tell which of both it works on
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=other if size == 1 else None)
    if number % 2:
        dcp.load(state, storage_reader=dsq_ckpt.DSQStorageReader(Path(sys.argv[1]) / "step"))
    else:
        comms.communicator(None).gather(None)
        dist.broadcast_object_list([number], src=0)  # as DCP ends a save
    assert dist.group.WORLD in gloo_lifetime._extended_groups and (size > 1 or other in gloo_lifetime._extended_groups)
    del other
    dist.destroy_process_group()
    del model
print("ok reducers", flush=True)
sys.setswitchinterval(0.005)
deadline = time.monotonic() + 300  # a machine may be busy
while gloo_lifetime._ended_backends and time.monotonic() < deadline:
    time.sleep(0.1)
assert not gloo_lifetime._ended_backends and not len(gloo_lifetime._extended_groups)
print("ok released", flush=True)
