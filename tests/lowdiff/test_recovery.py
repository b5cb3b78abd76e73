"""Recovery gives what training had, bit for bit, at every logged step: every optimizer, scheduler and way to train."""

from __future__ import annotations

import copy
import signal
import time

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop, lr_scheduler

import dsq_ckpt
from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.distributed.comm import SingleProcess
from dsq_ckpt.errors import LoadFailed
from dsq_ckpt.lowdiff import recovery, replay, server
from dsq_ckpt.lowdiff.train_state import TrainState
from tests.lowdiff.loops import (
    ADAM,
    Case,
    Loop,
    Sometimes,
    check_every_step,
    cut,
    differences,
    normalized,
    recorded,
    seeded,
)

pytestmark = pytest.mark.usefixtures("in_thread", "one_thread")
STEPS = 5
"""Schedules change rates after four."""


def adam(model, **options):
    return Adam(model.parameters(), 0.01, **options)


def grouped(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return AdamW([
        {"params": vectors, "weight_decay": 0.0, "lr": 0.02}, {"params": matrices, "betas": (0.8, 0.95)},
    ], lr=0.01)


def in_bfloat16(seed):
    return seeded(seed, lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12)).bfloat16())


def in_float64(seed):
    return seeded(seed, lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12)).double())


CASES = {
    "SGD": Case(lambda m: SGD(m.parameters(), 0.1, weight_decay=0.01)),
    "SGD, momentum": Case(lambda m: SGD(m.parameters(), 0.1, momentum=0.9)),
    "SGD, Nesterov": Case(lambda m: SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True, maximize=True)),
    "SGD, dampening": Case(lambda m: SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.3, foreach=True)),
    "SGD, fused": Case(lambda m: SGD(m.parameters(), 0.1, momentum=0.9, fused=True)),
    "Adam": Case(adam),
    "Adam, AMSGrad": Case(lambda m: adam(m, amsgrad=True, weight_decay=0.1)),
    "Adam, foreach": Case(lambda m: adam(m, foreach=True)),
    "Adam, fused": Case(lambda m: adam(m, fused=True, amsgrad=True)),
    "Adam, maximize": Case(lambda m: adam(m, maximize=True)),
    "AdamW": Case(lambda m: AdamW(m.parameters(), 0.01)),
    "AdamW, foreach": Case(lambda m: AdamW(m.parameters(), 0.01, foreach=True, amsgrad=True)),
    "AdamW, fused": Case(lambda m: AdamW(m.parameters(), 0.01, fused=True)),
    "RMSprop": Case(lambda m: RMSprop(m.parameters(), 0.01, momentum=0.5, centered=True)),
    "Adagrad": Case(lambda m: Adagrad(m.parameters(), 0.1, lr_decay=0.1)),
    "OneCycleLR": Case(adam, schedule=lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20)),
    "CosineAnnealingLR": Case(adam, schedule=lambda o: lr_scheduler.CosineAnnealingLR(o, 7)),
    "MultiStepLR": Case(grouped, schedule=lambda o: lr_scheduler.MultiStepLR(o, [2, 4])),
    "LambdaLR": Case(adam, schedule=lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n))),
    "ReduceLROnPlateau": Case(
        adam, schedule=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5, min_lr=1e-4)
    ),
    "SequentialLR": Case(adam, schedule=lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    )),
    "clipped by norm": Case(adam, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.05)),
    "clipped by norm, topk": Case(
        grouped, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.05), log={"compressor": "topk:0.1"}
    ),
    "clipped by value": Case(adam, clip=lambda p: nn.utils.clip_grad_value_(p, 0.003)),
    "groups": Case(grouped),
    "tensor learning rate": Case(
        lambda m: Adam(m.parameters(), torch.tensor(0.01), foreach=False),
        schedule=lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    ),
    "used sometimes, frozen, tied": Case(adam, lambda seed: seeded(seed, Sometimes)),
    "frozen ones left out": Case(
        lambda m: SGD([p for p in m.parameters() if p.requires_grad], 0.1, momentum=0.9),
        lambda seed: seeded(seed, Sometimes), log={"compressor": "topk:0.1"},
    ),
    "channels_last, batch norm": Case(adam, lambda seed: seeded(seed, normalized)),
    "channels_last, topk": Case(
        lambda m: SGD(m.parameters(), 0.1, momentum=0.9), lambda seed: seeded(seed, normalized),
        log={"compressor": "topk:0.1"},
    ),
    "bfloat16": Case(adam, in_bfloat16, log={"compressor": "topk:0.1"}),
    "bfloat16, whole": Case(adam, in_bfloat16),
    "float64": Case(adam, in_float64),
    "GradScaler": Case(adam, scaler=True, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.05)),
    "RMSprop, foreach": Case(lambda m: RMSprop(m.parameters(), 0.01, foreach=True, weight_decay=0.1)),
    "accumulation": Case(adam, accumulate=3),
    "accumulation, topk": Case(adam, accumulate=3, log={"compressor": "topk:0.1"}),
    "fp16": Case(adam, log={"compressor": "fp16"}),
    "fp16, clipped": Case(adam, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.05), log={"compressor": "fp16"}),
    "bf16": Case(adam, log={"compressor": "bf16"}),
    "kmeans": Case(adam, log={"compressor": "kmeans:16"}),
    "kmeans, clipped": Case(
        adam, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.05), log={"compressor": "kmeans:16,feedback=off"}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_step(tmp_path, name):
    case = copy.copy(CASES[name])
    case.log = {"compressor": "none", **case.log}
    check_every_step(case, tmp_path, recorded(case, tmp_path, STEPS))


class Langevin(torch.optim.Optimizer):
    """Gradient descent with noise."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.05 * parameter.grad + 0.01 * torch.randn_like(parameter))


def test_an_optimizer_that_draws_random_numbers(tmp_path):
    """The replay draws others, so `exact` is False; it was True. The snapshot alone is exact."""
    case = Case(lambda model: Langevin(model.parameters()), log={"compressor": "none"})
    table = recorded(case, tmp_path, 3)
    loop = Loop(case, seed=1)
    with pytest.warns(UserWarning, match=r"not exactly that of step 3: Langevin draws random numbers in its steps"):
        recovered = loop.recover(tmp_path)
    assert recovered.step == 3 and not recovered.exact and not recovered.continues_exactly
    assert loop.recover(tmp_path, replay_log=False).exact and differences(loop.state(), table[0]) == []


class Shared(nn.Module):
    """Two parameters in one memory: a matrix, and some of its rows, which come first."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(400, 12) * 0.1
        self.rows, self.matrix = nn.Parameter(memory[:12]), nn.Parameter(memory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.rows + (x @ self.matrix.t()) @ self.matrix


SHARED = Case(
    lambda model: SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.3),
    lambda seed: seeded(seed, Shared), log={"compressor": "none"},
)


def test_parameters_that_share_memory(tmp_path):
    """They were replayed at the same time in two threads, and `exact` was True."""
    check_every_step(SHARED, tmp_path, recorded(SHARED, tmp_path, STEPS))


def test_steps_of_parameters_that_share_memory_are_not_merged(tmp_path):
    recorded(SHARED, tmp_path, 2)
    loop = Loop(SHARED, seed=1)
    before = loop.state()
    with pytest.raises(dsq_ckpt.ConfigError, match=r"share memory.*merge=False"):
        loop.recover(tmp_path, merge=True)
    assert differences(loop.state(), before) == []


def wide(seed):
    """Parameters that torch deals to threads in pieces, of sizes that no vector divides."""
    return seeded(seed, lambda: nn.Sequential(nn.Linear(12, 7001), nn.Tanh(), nn.Linear(7001, 12)))


@pytest.mark.parametrize("fused", [False, True])
def test_threads(tmp_path, fused):
    """Training had two threads for each parameter; replay has one for each, and gives the same."""
    case = Case(lambda m: AdamW(m.parameters(), 0.01, fused=fused), wide, log={"compressor": "topk:0.05"})
    torch.set_num_threads(2)
    table = recorded(case, tmp_path, 3)
    torch.set_num_threads(1)
    check_every_step(case, tmp_path, table, 2)
    torch.set_num_threads(3)
    cut(tmp_path, 1)
    check_every_step(case, tmp_path, table[:2])


def test_states_are_in_the_order_of_training(tmp_path, monkeypatch):
    """However fast the threads are that replay."""
    loop = Loop(ADAM)
    with loop.log(tmp_path, compressor="none") as log:
        for number in range(2):
            loop.step(number)
            log.step()
    own = replay._ShardedOptimizer._step

    def late(shards, names, optimizer, gradients):
        time.sleep(0.1 * ("0.weight" in names))
        own(shards, names, optimizer, gradients)

    monkeypatch.setattr(replay._ShardedOptimizer, "_step", late)
    monkeypatch.setattr(StorageConfig, "thread_count", lambda _: 2)
    other = Loop(ADAM, seed=1)
    assert other.recover(tmp_path).replayed == 2
    expected, restored = (
        [name for key in loop.optimizer.state for name, parameter in loop.model.named_parameters() if parameter is key]
        for loop in (loop, other)
    )
    assert restored == expected and len(restored) > 2


def test_an_interrupt_reaches_the_other_ranks(tmp_path, monkeypatch):
    """One that comes between two collectives waits for the next, where the others learn of it."""
    recorded(ADAM, tmp_path, 2)
    monkeypatch.undo()  # signals are signals again
    told = []

    class Recording(SingleProcess):
        def gather(self, value):
            told.append(value)
            return [value]

    def interrupted(train_state):
        signal.raise_signal(signal.SIGINT)
        return unchanged(train_state)

    loop, unchanged = Loop(ADAM, seed=1), recovery.rollback_on_failure
    before = loop.state()
    monkeypatch.setattr(recovery, "rollback_on_failure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recovery.recover_train_state(tmp_path, TrainState(loop.model, loop.optimizer, loop.states), Recording())
    assert (told[-1].is_secondary, told[-1].error) == (False, "KeyboardInterrupt")
    assert differences(loop.state(), before) == []


def test_whatever_ends_the_thread_of_a_snapshot_is_reported(tmp_path, monkeypatch):
    def ends(*args):
        raise SystemExit("the end")

    monkeypatch.setattr(server.snapshots, "save_snapshot", ends)
    with pytest.raises(dsq_ckpt.SaveFailed, match="SystemExit: the end"):
        Loop(ADAM).log(tmp_path)


def test_a_state_that_does_not_take_its_own_back(tmp_path):
    """The failure is told as one of the load, and the rest is as it was."""

    class Picky:
        fails = False

        def state_dict(self):
            return {"count": 3}

        def load_state_dict(self, state):
            if self.fails:
                raise RuntimeError("takes nothing")

    model, picky = nn.Linear(16, 4), Picky()
    optimizer = Adam(model.parameters())
    dsq_ckpt.lowdiff.GradientLog(tmp_path, model, optimizer, state={"picky": picky}).close()
    with torch.no_grad():
        model.weight.zero_()
    picky.fails = True
    with pytest.raises(LoadFailed, match="RuntimeError: takes nothing"):
        dsq_ckpt.lowdiff.recover(tmp_path, model, optimizer, state={"picky": picky})
    assert not model.weight.any()
