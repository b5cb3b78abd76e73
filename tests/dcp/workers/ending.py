"""Nothing is left that gloo's threads would free while the interpreter exits: no tensors, and no groups.

What they free then aborts the process. It is a race that is seldom lost, so the test looks for what is left.
"""

from __future__ import annotations

import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dsq_ckpt
from dsq_ckpt.api import background
from dsq_ckpt.distributed.comm import TorchCommunicator

lent: list[torch.Tensor] = []


def recorded(collective: Any) -> Any:
    """Return a collective that notes its tensors."""

    def call(*args: Any, **keywords: Any) -> Any:
        for arg in args:
            lent.extend(arg if isinstance(arg, list) else [arg])
        return collective(*args, **keywords)

    return call


def counts() -> list[int]:
    """Return the references to each tensor."""
    return [sys.getrefcount(tensor) for tensor in lent]


dist.init_process_group("gloo")
dist.all_gather, dist.all_reduce = recorded(dist.all_gather), recorded(dist.all_reduce)
comm = TorchCommunicator()
at_once, later = [], []
for _ in range(200):
    comm.gather(dist.get_rank())
    comm.sum(np.ones(8, np.int64))
    at_once.append(counts())
    time.sleep(0.002)
    later.append(counts())
    lent.clear()
assert at_once == later and len(at_once[0]) == 1 + dist.get_world_size() + 1, (at_once, later)
print("ok tensors", flush=True)

dsq_ckpt.async_save({"weight": torch.randn(200, 64)}, Path(sys.argv[1]) / "step").result()
made = background.group(None)
assert made is not None and made is background.group(None)
left = weakref.ref(made)
del made
dist.destroy_process_group()
assert left() is None
print("ok groups", flush=True)
