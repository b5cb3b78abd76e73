"""Logs under DDP, on as many ranks as there are; prints "[ok] name" for each check. argv = a directory, checks."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.lowdiff import GradientLog, segments
from tests.helpers.checkpointing_processes import Nursery
from tests.lowdiff.loops import Case, Loop, State, cut, differences, normalized, seeded

STEPS = 4
"""Twice as many as slots, so that each is used again."""
CHECKS: dict[str, Callable[[Path], None]] = {}
CLIPPED = Case(
    lambda model: AdamW([
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ], lr=0.01),
    schedule=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10_000),
    clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05),
)
PLAIN = Case(lambda model: SGD(model.parameters(), 0.1, momentum=0.9))
IMAGES = Case(lambda model: Adam(model.parameters(), 0.01), lambda seed: seeded(seed, normalized))


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


def loop_of(case: Case, seed: int = 0) -> Loop:
    loop = Loop(case, seed)
    loop.model = DDP(loop.model)
    return loop


def train(loop: Loop, log: GradientLog, steps: int) -> list[State]:
    states = []
    for _ in range(steps):
        loop.step(log.steps_done, dist.get_rank())
        log.step()
        states.append(loop.state())
    return states


def recovered(case: Case, run: Path, step: int, truth: State) -> None:
    loop = loop_of(case, 1)
    recovery = loop.recover(run)
    assert recovery is not None and recovery.exact
    assert (recovery.step, recovery.ended) == (step, None), recovery
    assert not different(loop.state(), truth)


def different(state: State, truth: State) -> list[str]:
    """Buffers are those of rank 0, which DDP gives to all in each forward pass."""
    own = {*dict(state["model"])} if dist.get_rank() == 0 else {n for n in state["model"] if "running" not in n}
    model = {name: tensor for name, tensor in state["model"].items() if name in own}
    return differences({**state, "model": model}, {**truth, "model": {n: truth["model"][n] for n in model}})


def every_step(case: Case, run: Path, spec: str, hook: Callable[[DDP], None] | None = None) -> None:
    loop = loop_of(case)
    if hook is not None:
        hook(loop.model)
    table = [loop.state()]
    with loop.log(run, compressor=spec, queue=STEPS // 2) as log:
        table += train(loop, log, STEPS)
        assert log.logging
    dist.barrier()  # every rank has closed its log
    owners = {name.rank for name, _ in segments.list_segments(run)}
    assert owners == set(range(dist.get_world_size())), "every rank writes its share"
    for step in range(STEPS, -1, -1):
        recovered(case, run, step, table[step])
        dist.barrier()
        if dist.get_rank() == 0:
            cut(run, step - 1)
        dist.barrier()


@check
def topk(run: Path) -> None:
    every_step(CLIPPED, run, "topk:0.05")


@check
def topk_of_images(run: Path) -> None:
    every_step(IMAGES, run, "topk:0.1,feedback=off")


@check
def fp16(run: Path) -> None:
    every_step(CLIPPED, run, "fp16")


@check
def bf16(run: Path) -> None:
    every_step(PLAIN, run, "bf16")


@check
def kmeans(run: Path) -> None:
    every_step(CLIPPED, run, "kmeans:16")


@check
def nothing(run: Path) -> None:
    every_step(IMAGES, run, "none")


@check
def power_sgd(run: Path) -> None:
    """A communication hook that the job has already."""
    def hook(model: DDP) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    every_step(CLIPPED, run, "none", hook)


@check
def fp16_hook(run: Path) -> None:
    every_step(PLAIN, run, "none", lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook))


@check
def on_from_a_snapshot(run: Path) -> None:
    """Each rank goes on with what its own error feedback holds back; another number of ranks cannot."""
    loop = loop_of(PLAIN)
    with loop.log(run, compressor="topk:0.05", snapshot_every=4) as log:
        table = train(loop, log, 4)
        log._require_client().wait("saved", 60)
        table += train(loop, log, 3)
    again = loop_of(PLAIN, 1)
    recovery = again.recover(run, replay_log=False)
    assert recovery is not None and (recovery.step, recovery.continues_exactly) == (4, True)
    with again.log(run, resume=recovery, compressor="topk:0.05") as log:
        assert not differences(train(again, log, 3), table[4:])
    if dist.get_rank() == 0:
        alone = Loop(PLAIN, 1)
        before = alone.state()
        group = GROUPS[0]
        try:
            alone.recover(run, process_group=group)
            raise AssertionError("one rank recovered")
        except LoadFailed as error:
            assert "ranks were logged, 1 recover" in str(error)
        assert not differences(alone.state(), before)
        recovery = alone.recover(run, process_group=group, partial=True)
        assert recovery.step == 7 and recovery.residual is None and not differences(alone.state(), table[6])


@check
def one_process_dies(run: Path) -> None:
    """That of one rank: all ranks stop together and go on together, with a snapshot."""
    loop = loop_of(CLIPPED)
    with warnings.catch_warnings(record=True) as caught, loop.log(run, compressor="topk:0.05", batch=2) as log:
        warnings.simplefilter("always", UserWarning)
        train(loop, log, 5)
        last = dist.get_rank() == dist.get_world_size() - 1
        if last:
            os.kill(log._require_client().pid, signal.SIGKILL)
        stopped = started = 0
        deadline = time.monotonic() + 60
        while not started:
            assert time.monotonic() < deadline
            train(loop, log, 1)
            time.sleep(0.01)
            if log._state == "waiting" and not stopped:
                stopped = log.steps_done
            if log._state == "running" and stopped:
                started = log.steps_done
        both = [None] * dist.get_world_size()
        dist.all_gather_object(both, (stopped, started))
        assert len(set(both)) == 1, both
        both = [False]
        while not all(both):  # until the snapshot is on disk, which not all ranks hear of at the same step
            assert time.monotonic() < deadline
            both = [None] * dist.get_world_size()
            dist.all_gather_object(both, log.logging)
            state = train(loop, log, 1)[-1]
        steps = log.steps_done
    texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert len(texts) == int(last) and all("was killed by signal 9" in text for text in texts), texts
    recovered(CLIPPED, run, steps, state)


@check
def a_share_is_lost(run: Path) -> None:
    loop = loop_of(PLAIN)
    with loop.log(run, compressor="topk:0.05") as log:
        table = train(loop, log, 5)
    dist.barrier()
    if dist.get_rank() == 0:
        for name, path in segments.list_segments(run):
            if (name.first, name.rank) == (4, 1):
                path.unlink()
    dist.barrier()
    loop = loop_of(PLAIN, 1)
    recovery = loop.recover(run)
    assert (
        recovery.step == 3 and recovery.ended == "step 4 is not complete: the share of rank(s) 1 is missing"
    ), recovery
    assert not differences(loop.state(), table[2])


@check
def an_edit_in_the_last_step(run: Path) -> None:
    """The log of several ranks ends with a snapshot of it, as that of one does, if one rank sees it or all do."""
    for own, sees in ((run / "all", lambda rank: True), (run / "one", lambda rank: rank == 0)):
        loop = loop_of(PLAIN)
        with warnings.catch_warnings(record=True) as caught, loop.log(own, compressor="none") as log:
            warnings.simplefilter("always", UserWarning)
            train(loop, log, 2)
            loop.step(2, dist.get_rank())
            if sees(dist.get_rank()):
                with torch.no_grad():
                    next(loop.model.parameters()).mul_(1.0)  # a version, not another value
            log.step()
        texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
        assert len(texts) == sees(dist.get_rank()) and all("by something other" in text for text in texts), texts
        dist.barrier()
        recovered(PLAIN, own, 3, loop.state())


@check
def an_edit_in_the_last_step_of_a_rank_that_fails(run: Path) -> None:
    """The others wait for no rank that does not close its log, and each says which step is missing."""
    loop, last = loop_of(PLAIN), dist.get_rank() == dist.get_world_size() - 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        log = loop.log(run, compressor="none")
        train(loop, log, 2)
        state_before = loop.state()
        loop.step(2, dist.get_rank())
        with torch.no_grad():
            next(loop.model.parameters()).clamp_(-0.01, 0.01)
        log.step()
        started = time.monotonic()
        log.__exit__(*((ValueError, ValueError(), None) if last else (None, None, None)))
        assert time.monotonic() - started < 60
    text = str(caught[-1].message)
    assert ("step 3 is not in the log" if last else "step 3 may not be in the log") in text, text
    dist.barrier()
    recovered(PLAIN, run, 2, state_before)


@check
def parameters_are_added(run: Path) -> None:
    """All ranks take them up in the same snapshot, and share them anew."""
    def few(model: nn.Module) -> Adam:
        return Adam(model.module[0].parameters() if isinstance(model, DDP) else model[0].parameters(), 0.01)

    def all_of_them(model: DDP) -> Adam:
        optimizer = few(model)
        optimizer.add_param_group({"params": list(model.module[3].parameters()), "lr": 0.1})
        return optimizer

    loop = Loop(Case(few))
    loop.model = DDP(loop.model)
    with warnings.catch_warnings(record=True) as caught, loop.log(run, compressor="topk:0.05", batch=4) as log:
        warnings.simplefilter("always", UserWarning)
        train(loop, log, 2)
        loop.optimizer.add_param_group({"params": list(loop.model.module[3].parameters()), "lr": 0.1})
        train(loop, log, 2)
        log._require_client().wait("saved", 60)
        state = train(loop, log, 3)[-1]
    texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert len(texts) == 1 and "steps from 3 on are not logged until" in texts[0], texts
    dist.barrier()
    again = Loop(Case(few), 1)
    again.model = DDP(again.model)
    again.optimizer = all_of_them(again.model)
    recovery = again.recover(run)
    assert (recovery.step, recovery.snapshot, recovery.exact, recovery.ended) == (7, 4, True, None), recovery
    assert not different(again.state(), state)


GROUPS: list[dist.ProcessGroup] = []


def main() -> None:
    Nursery()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    GROUPS.append(dist.new_group([0]))
    for name in sys.argv[2:] or CHECKS:
        started = time.monotonic()
        run = Path(sys.argv[1]) / name
        CHECKS[name](run)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(run)
            print(f"[ok] {name} ({time.monotonic() - started:.1f} s)", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
