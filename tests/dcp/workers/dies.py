"""A rank dies by SIGKILL in the middle of a save; a new launch goes on: argv = run directory, moment or again."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import depth, done, error_of, normal, whole, world, zeros
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dsq_ckpt
from dsq_ckpt.storage.container import ContainerWriter
from dsq_ckpt.storage.manifest import Manifest


def state_at(step: int, size: int) -> dict[str, Any]:
    value = normal(200, 64, seed=1) + 0.001 * step * normal(200, 64, seed=2, scale=1.0)
    return {"w": distribute_tensor(value, init_device_mesh("cpu", (size,)), [Shard(0)]), "step": step}


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save(run: Path, moment: str, rank: int, size: int) -> None:
    for step in range(2):
        dsq_ckpt.save(state_at(step, size), run / str(step))
    done("before")
    # the coordinator is the one that commits
    target, name, culprit = (ContainerWriter, "finish", 1) if moment == "writing" else (Manifest, "write", 0)
    with mock.patch.object(target, name, die if rank == culprit else getattr(target, name)):
        dsq_ckpt.save(state_at(2, size), run / "2")


def again(run: Path, size: int) -> None:
    assert dsq_ckpt.latest(run) == str(run / "1") and not (run / "2" / "manifest.json").exists()
    for step in range(2):
        state = zeros(state_at(0, size))
        dsq_ckpt.load(state, run / str(step), refinement=step == 1)
        assert error_of(whole(state_at(step, size))["w"], whole(state)["w"]) < (0.02 if step else 0.3)
    dsq_ckpt.save(state_at(2, size), run / "2")  # over what the dead save left
    assert depth(run / "2") == 2
    dsq_ckpt.load(state, run / "2")
    assert error_of(whole(state_at(2, size))["w"], whole(state)["w"]) < 0.02
    done("after")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as (me, ranks):
        if sys.argv[2] == "again":
            again(Path(sys.argv[1]), ranks)
        else:
            save(Path(sys.argv[1]), sys.argv[2], me, ranks)
