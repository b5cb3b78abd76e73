"""What tests of replicas share: waiting, and what a replica is, as its process would give it away."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.lowdiff import Replica, process
from dsq_ckpt.lowdiff.recovery import _load_snapshot
from dsq_ckpt.lowdiff.replica_server import ReplicaServer
from dsq_ckpt.lowdiff.replica_transfer import MemorySnapshot, ReplicaHolder
from dsq_ckpt.lowdiff.train_state import TrainState
from tests.lowdiff.loops import Case, Loop, differences


def until(condition: Callable[[], Any], what: str = "", seconds: float = 60.0) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what or condition} did not happen within {seconds:.0f} s"
        time.sleep(0.005)


def known_holders(monkeypatch, in_thread) -> list[ReplicaServer]:
    """A fixture: checkpointing processes that were started, in threads, the last one last."""
    servers: list[ReplicaServer] = []

    class Known(ReplicaServer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            servers.append(self)

    monkeypatch.setattr(process, "ReplicaServer", Known)
    return servers


def replica_of(loop: Loop, run: Path, **options: Any) -> Replica:
    """A replica of a loop, with the options of its case; what a failed test leaves is gone after a minute."""
    options = {"linger": 60.0, **loop.case.log, **options}
    return Replica(run, loop.model, loop.optimizer, state=loop.states, **options)


def restored(case: Case, run: Path, holder: ReplicaHolder) -> Loop:
    """Another loop of the case, which was given what the process of a replica holds."""
    shard = holder.shard_after(holder.newest_step)
    assert shard is not None
    tensors = {piece.name: piece.tensor for piece in shard.snapshot_tensors()}
    assert len(tensors) == len(shard.tensors), "a name twice"
    loop = Loop(case, seed=1)
    train_state = TrainState(loop.model, loop.optimizer, loop.states)
    recovered = _load_snapshot(train_state, MemorySnapshot(run, shard.meta, tensors), SingleProcess(), False)
    assert (recovered.step, recovered.from_memory) == (holder.newest_step, True)
    return loop


def key_order(loop: Loop) -> list[list[str]]:
    """Keys of the optimizer's state, parameter by parameter."""
    return [list(loop.optimizer.state[p]) for group in loop.optimizer.param_groups for p in group["params"]
            if p in loop.optimizer.state]


def check_same(one: Loop, other: Loop, where: str = "") -> None:
    """Both are the same, bit for bit, and their optimizers' states are in the same order."""
    assert differences(one.state(), other.state()) == [], where
    assert key_order(one) == key_order(other), where
