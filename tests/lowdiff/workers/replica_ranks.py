"""Replicas of models that two ranks train; prints "[ok] name" for each check. Processes are forks of this one, which
imports everything once and starts no thread: two ranks for all checks, one after the other, and each replica's.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

from dsq_ckpt.lowdiff import Replica
from tests.helpers.checkpointing_processes import Nursery, alive
from tests.lowdiff.loops import Case, Loop, Sometimes, differences, normalized, perceptron, seeded
from tests.lowdiff.uninterrupted import forked
from tests.lowdiff.workers.replica import check_same, replica_of, until

STEPS = 5
SMALL = 0.0005
"""MB: many buckets."""
CHECKS: dict[str, Callable[[Path, int], None]] = {}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW((p for p in model.parameters() if p.requires_grad), 0.01)


def clipped(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.2)


def noisy(parameters: list[nn.Parameter]) -> None:
    for seed, parameter in enumerate(parameters):
        if parameter.grad is not None:
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


def ddp(case: Case, seed: int = 0, **options: Any) -> Loop:
    loop = Loop(case, seed)
    loop.model = DistributedDataParallel(loop.model, **{"bucket_cap_mb": SMALL, **options})
    return loop


def train(loop: Loop, replica: Replica, rank: int, steps: int) -> None:
    for _ in range(steps):
        loop.step(replica.steps_done, rank)
        replica.step()


def recovered_from_memory(loop: Loop, replica: Replica, run: Path) -> Loop:
    """What is recovered once the training processes left, which is what they had."""
    assert isinstance(loop.model, DistributedDataParallel)
    replica._leave_process()
    for buffer in loop.model.buffers():
        dist.broadcast(buffer, 0)  # as DDP does before each forward pass: they are those of rank 0
    again = Loop(loop.case, seed=1)
    recovery = again.recover(run)
    assert recovery is not None and (recovery.step, recovery.from_memory, recovery.exact) == (
        replica.steps_done, True, True
    ), recovery
    check_same(again, loop)
    return again


def check(name: str, case: Case, hook: Callable[[], Any] = lambda: None, **options: Any) -> None:
    """Train with DDP's options under a replica, and once more without one: the same, and so is the replica."""

    def work(run: Path, rank: int) -> None:
        loop = ddp(case, **options)
        replica = replica_of(loop, run, hook=hook(), queue=2, timeout=60.0)
        train(loop, replica, rank, STEPS)
        recovered_from_memory(loop, replica, run)
        alone = ddp(case, **options)
        if (own := hook()) is not None:
            alone.model.register_comm_hook(*own)
        for number in range(STEPS):
            alone.step(number, rank)
        for buffer in alone.model.buffers():
            dist.broadcast(buffer, 0)
        check_same(alone, loop)

    CHECKS[name] = work


CLIPPED = Case(adamw, clip=clipped)
CONVOLUTIONS = Case(lambda m: Adam(m.parameters(), 0.01, fused=True), model=lambda s: seeded(s, normalized))
SOMETIMES = Case(adamw, model=lambda s: seeded(s, Sometimes), clip=clipped)
for view in (False, True):
    check(f"many buckets, view {view}", CLIPPED, gradient_as_bucket_view=view)
    check(f"channels last and buffers, view {view}", CONVOLUTIONS, gradient_as_bucket_view=view)
    check(f"unused, frozen and tied, view {view}", SOMETIMES, gradient_as_bucket_view=view, find_unused_parameters=True)
check("noise is added", Case(adamw, clip=noisy))
check("accumulated", Case(adamw, accumulate=3))
check("bf16", Case(adamw, model=lambda s: perceptron(s).bfloat16()))
check("skipped steps, two slots", Case(lambda m: SGD(m.parameters(), 0.1, momentum=0.9), scaler=True))
check("static graph", CLIPPED, static_graph=True)
check("fp16 hook", CLIPPED, hook=lambda: (dist.group.WORLD, default_hooks.fp16_compress_hook))
check(
    "powersgd", CLIPPED, bucket_cap_mb=25,  # which waits for ever with several buckets under gloo
    hook=lambda: (powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=3), powerSGD_hook.powerSGD_hook),
)


def anywhere(condition: bool) -> bool:
    """Whether it holds on any rank."""
    told = torch.tensor(float(condition))
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def edited(run: Path, rank: int) -> None:
    """Parameters are edited, on all ranks; the state is sent again, each time, though there are two slots only."""
    loop = ddp(CLIPPED)
    replica = replica_of(loop, run, queue=2, timeout=60.0)
    for _ in range(3):
        train(loop, replica, rank, 3)
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(0.9)
        loop.step(replica.steps_done, rank)
        replica.step()
        while anywhere(not replica.logging):
            time.sleep(0.01)
            loop.step(replica.steps_done, rank)
            replica.step()
    train(loop, replica, rank, 2)
    recovered_from_memory(loop, replica, run)


def goes_on(run: Path, rank: int) -> None:
    """After a failure, training goes on as it would have without; then it is closed."""
    loop = ddp(CLIPPED)
    replica = replica_of(loop, run)
    train(loop, replica, rank, 4)
    replica._leave_process()
    dist.barrier()
    again = ddp(CLIPPED, seed=1)
    recovery = again.recover(run)
    assert recovery is not None and (recovery.step, recovery.from_memory) == (4, True)
    with replica_of(again, run, resume=recovery) as replica:
        train(again, replica, rank, 4)
    alone = ddp(CLIPPED)
    for number in range(8):
        alone.step(number, rank)
    check_same(again, alone)
    dist.barrier()
    last = Loop(CLIPPED, seed=2)
    recovery = last.recover(run)
    assert recovery is not None and (recovery.step, recovery.from_memory, recovery.closed) == (8, False, True)
    check_same(last, alone)


def a_step_earlier(run: Path, rank: int) -> None:
    """One rank is gone when the other has begun to save a state that it did not come to; what they have in common is
    saved all the same, by the time that nobody holds it any more.
    """
    loop = ddp(CLIPPED)
    replica = replica_of(loop, run, persist_every=5, linger=1.0)
    train(loop, replica, rank, 5)
    there, pid = copy.deepcopy(loop.state()), replica._require_client().pid
    loop.step(5, rank)
    if rank == 0:
        replica.step()  # which lets its process do the fifth step, and begin to save
    replica._leave_process()
    until(lambda: not alive(pid))
    dist.barrier()
    again = Loop(CLIPPED, seed=1)
    recovery = again.recover(run)
    assert recovery is not None and (recovery.step, recovery.from_memory) == (5, False), recovery
    assert differences(again.state(), there) == []


def other_world(run: Path, rank: int) -> None:
    """A process alone recovers what two ranks left: from disk, where their last state is."""
    loop = ddp(CLIPPED)
    replica = replica_of(loop, run, persist_every=1000, linger=2.0)
    train(loop, replica, rank, 5)
    replica._leave_process()
    dist.barrier()
    group = dist.new_group([0])
    if rank == 0:
        again = Loop(CLIPPED, seed=1)
        recovery = again.recover(run, process_group=group)
        assert recovery is not None and (recovery.step, recovery.from_memory) == (5, False)
        check_same(again, loop)
    dist.barrier()


CHECKS |= {
    "edited": edited, "goes on": goes_on, "a step earlier": a_step_earlier, "another number of ranks": other_world,
}


def main(names: list[str]) -> int:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    Nursery()
    with tempfile.TemporaryDirectory() as directory:

        def rank_of(rank: int) -> None:
            dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
            for number, (name, work) in enumerate(CHECKS.items()):
                if not names or name in names:
                    signal.alarm(60)  # whoever waits for ever
                    work(Path(directory) / f"run-{number}", rank)
                    dist.barrier()
                    if rank == 0:
                        print("[ok]", name, flush=True)

        children = [forked(lambda rank=rank: rank_of(rank)) for rank in range(2)]
        return int(any([os.waitpid(child, 0)[1] for child in children]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
