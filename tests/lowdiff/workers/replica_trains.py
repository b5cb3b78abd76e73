"""Trains under a replica from where a run was left, and ends in some way: run, way, steps to do. It says what it
recovered, and the pid of its checkpointing process, which is a fork.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from tests.helpers.checkpointing_processes import Nursery
from tests.lowdiff.loops import Loop, digest
from tests.lowdiff.uninterrupted import CASE
from tests.lowdiff.workers.replica import replica_of


def main(run: Path, way: str, steps: int) -> None:
    torch.set_num_threads(1)
    Nursery()
    loop = Loop(CASE, seed=3 if run.exists() else 0)
    recovery = loop.recover(run)
    if recovery is not None:
        print("recovered", recovery.step, recovery.from_memory, digest(loop.state()), flush=True)
    replica = replica_of(loop, run, resume=recovery, persist_every=1000)
    print("process", replica._require_client().pid, flush=True)
    for _ in range(steps):
        loop.step(replica.steps_done)
        replica.step()
    loop.step(replica.steps_done)  # of a step that is not handed over as a whole
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "exit":
        os._exit(3)
    elif way == "raise":
        raise FloatingPointError("loss is NaN")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
