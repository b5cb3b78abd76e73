"""Gradients are handed over layer by layer while the backward pass goes on, all of them when it is done, and no more of
them than there are slots.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from dsq_ckpt.lowdiff import streamer
from tests.lowdiff.loops import Case, Loop, seeded
from tests.lowdiff.workers.replica import check_same, known_holders, replica_of, restored, until

pytestmark = pytest.mark.usefixtures("one_thread")
holders = pytest.fixture(known_holders)
STACK = Case(
    lambda m: Adam(m.parameters(), 0.01),
    model=lambda s: seeded(s, lambda: nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)])),
)


class Gate(torch.autograd.Function):
    """Does something in the backward pass, between that of what comes after it and that of what came before."""

    @staticmethod
    def forward(ctx, x, action):
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.action()
        return gradient, None


def backward_through(loop: Loop, action, after: int = 1) -> None:
    """A backward pass that stops after the last layers, before the first `after` ones."""
    inner = getattr(loop.model, "module", loop.model)
    handle = inner[after].register_forward_pre_hook(lambda _, args: (Gate.apply(args[0], action),))
    try:
        loop.model(torch.ones(2, 12)).square().sum().backward()
    finally:
        handle.remove()


def train(loop, replica, steps):
    for _ in range(steps):
        loop.step(replica.steps_done)
        replica.step()


def free(replica):
    """Slots that nothing is on its way in."""
    replica._require_client().poll()
    return len(replica._require_client()._free)


def wrapped(loop: Loop, kind: str) -> Loop:
    if kind == "ddp":
        loop.model = DistributedDataParallel(loop.model, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    return loop


@pytest.mark.usefixtures("alone_under_ddp")
@pytest.mark.parametrize("kind", ["alone", "ddp"])
def test_copies_are_made_during_the_backward_pass(tmp_path, holders, kind, monkeypatch):
    """The backward pass does not go on before the gradient of the last layer is in shared memory."""
    loop, copied, done = wrapped(Loop(STACK), kind), streamer._copy_to_host, {}

    def noted(target, *args):
        copied(target, *args)
        done[target.data_ptr()] = threading.current_thread()

    monkeypatch.setattr(streamer, "_copy_to_host", noted)
    with replica_of(loop, tmp_path) as replica:
        train(loop, replica, 3)  # DDP makes its buckets anew after the first step
        handed, last = replica._streamer, loop.optimizer.param_groups[0]["params"][-2:]
        loop.optimizer.zero_grad()
        there, first_gradients = [], []

        def wait_for_the_last():
            until(lambda: all(parameter in handed.streamed_parameters for parameter in last))
            until(lambda: all(handed.view(parameter).data_ptr() in done for parameter in last))
            first_gradients.append(loop.optimizer.param_groups[0]["params"][0] in handed.streamed_parameters)
            there.extend(handed.view(parameter).clone() for parameter in last)

        done.clear()
        backward_through(loop, wait_for_the_last)
        assert first_gradients == [False], "and the first layer was not reached yet"
        for parameter, gradient in zip(last, there, strict=True):
            assert torch.equal(parameter.grad, gradient)
        assert len(done) == 8 and threading.main_thread() not in done.values()
        loop.optimizer.step()
        replica.step()
        until(lambda: holders[-1].applied == 4)
        check_same(restored(STACK, tmp_path, holders[-1]), loop)


@pytest.mark.usefixtures("alone_under_ddp")
@pytest.mark.parametrize("kind", ["alone", "ddp"])
def test_all_is_copied_when_the_backward_pass_is_done(tmp_path, holders, kind, monkeypatch):
    loop = wrapped(Loop(STACK), kind)
    copied, done = streamer._copy_to_host, []

    def slow(*args):
        time.sleep(0.05)
        copied(*args)
        done.append(1)

    with replica_of(loop, tmp_path) as replica:
        train(loop, replica, 2)
        monkeypatch.setattr(streamer, "_copy_to_host", slow)
        for step in range(3):
            loop.optimizer.zero_grad()
            done.clear()
            loop.model(torch.full((2, 12), step + 1.0)).square().sum().backward()
            assert len(done) == 8 and not replica._streamer._copies
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)  # in place, as soon as it may
            loop.optimizer.step()
            replica.step()
        until(lambda: holders[-1].applied == 5)
        check_same(restored(STACK, tmp_path, holders[-1]), loop)


@pytest.mark.parametrize("late", [False, True])
def test_a_backward_pass_that_fails(tmp_path, holders, late, monkeypatch):
    """A batch that is too large for memory, say, which is left out: later ones are handed over as always."""
    loop = Loop(STACK)
    copied = streamer._copy_to_host
    release = threading.Event()

    def fails():
        raise MemoryError("too large")

    def waits(*args):
        release.wait(600)
        copied(*args)

    with replica_of(loop, tmp_path) as replica:
        train(loop, replica, 2)
        if late:  # copies of the pass that failed are still under way
            monkeypatch.setattr(streamer, "_copy_to_host", waits)
        with pytest.raises(MemoryError):
            backward_through(loop, fails)
        monkeypatch.setattr(streamer, "_copy_to_host", copied)
        release.set()
        done = []
        monkeypatch.setattr(streamer, "_copy_to_host", lambda *args: (time.sleep(0.05), copied(*args), done.append(1)))
        loop.optimizer.zero_grad()
        loop.model(torch.ones(2, 12)).square().sum().backward()
        assert len(done) == 8, "waited for, though the pass before did not end"
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
        loop.optimizer.step()
        replica.step()
        train(loop, replica, 2)
        until(lambda: holders[-1].applied == 5)
        check_same(restored(STACK, tmp_path, holders[-1]), loop)


def test_gradients_of_a_pass_that_was_left_out(tmp_path, holders):
    """Two backward passes and one step, the gradients of the first thrown away; then a step without any."""
    loop = Loop(STACK)
    with replica_of(loop, tmp_path) as replica:
        train(loop, replica, 1)
        loop.model(torch.ones(2, 12)).sum().backward()
        loop.optimizer.zero_grad()
        train(loop, replica, 2)
        loop.optimizer.zero_grad()
        loop.optimizer.step()
        replica.step()
        replica.step()  # and an iteration without a step
        until(lambda: holders[-1].applied == 5)
        check_same(restored(STACK, tmp_path, holders[-1]), loop)


def test_reentrant_checkpoints(tmp_path, holders):
    """A backward pass in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(12, 12) for _ in range(3))

        def forward(self, x):
            return self.third(checkpoint(self.second, self.first(x), use_reentrant=True))

    case = Case(STACK.optimizer, model=lambda s: seeded(s, Recomputed))
    loop = Loop(case)
    with replica_of(loop, tmp_path) as replica:
        train(loop, replica, 4)
        until(lambda: holders[-1].applied == 4)
        check_same(restored(case, tmp_path, holders[-1]), loop)


def test_memory_of_skipped_steps(tmp_path, holders):
    """Skipped steps take no slots, and leave none behind."""
    case = Case(lambda m: SGD(m.parameters(), 0.1, momentum=0.9), scaler=True)
    loop = Loop(case)
    with replica_of(loop, tmp_path, queue=2) as replica:
        train(loop, replica, 16)  # every fourth overflows
        until(lambda: holders[-1].applied == 16)
        check_same(restored(case, tmp_path, holders[-1]), loop)
        until(lambda: free(replica) == 2)


def test_waits_for_a_slot(tmp_path):
    """The checkpointing process stands still: training goes on for as many steps as there are slots, then waits; when
    the process goes on, so does training, and no step is lost.
    """
    loop, queue = Loop(STACK), 3
    reached = []
    with replica_of(loop, tmp_path, queue=queue, persist_every=1000) as replica:
        train(loop, replica, 2)
        pid = replica._require_client().pid
        until(lambda: free(replica) == queue)
        os.kill(pid, signal.SIGSTOP)
        client, waits = replica._require_client(), threading.Event()
        poll = client.poll
        client.poll = lambda timeout=0.0: (timeout and not client._free and waits.set(), poll(timeout))[1]
        with ThreadPoolExecutor(1) as pool:
            try:
                training = pool.submit(lambda: [(train(loop, replica, 1), reached.append(1)) for _ in range(10)])
                assert waits.wait(60)
                time.sleep(2.0)
                assert len(reached) == queue and not training.done()
            finally:
                os.kill(pid, signal.SIGCONT)
            training.result(60)
        assert replica.steps_done == 12 and replica.logging
        assert replica._require_client().waited > 1.5
    again = Loop(STACK, seed=1)
    assert again.recover(tmp_path).step == 12
    check_same(again, loop)
