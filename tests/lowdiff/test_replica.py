"""The replica is what training is, bit for bit, after every step: whatever the optimizer, the model, and what happens
to gradients between the backward pass and the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RAdam, RMSprop, lr_scheduler

from dsq_ckpt.lowdiff import Replica
from dsq_ckpt.lowdiff.replica_server import ReplicaServer
from tests.lowdiff.loops import Case, Loop, Sometimes, normalized, perceptron, seeded
from tests.lowdiff.workers.replica import check_same, known_holders, replica_of, restored, until

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 4
"""The third one is skipped, or uses a layer that others do not; slots are used again from it on, as there are two."""
holders = pytest.fixture(known_holders)


class Watched(Replica):
    """Remembers what gradients had been multiplied by since they were handed over, step by step."""

    def __init__(self, *args, **options) -> None:
        self.scales: list[float | None] = []
        super().__init__(*args, **options)

    def _gradient_factor(self) -> float | None:
        self.scales.append(super()._gradient_factor())
        return self.scales[-1]


def watched(loop: Loop, run: Path, **options) -> Watched:
    return Watched(run, loop.model, loop.optimizer, state=loop.states, **{**loop.case.log, **options})


def follow(loop: Loop, replica: Replica, holders: list[ReplicaServer], steps: int) -> None:
    """Train, and compare after every step."""
    for _ in range(steps):
        loop.step(replica.steps_done)
        replica.step()
        until(lambda: holders[-1].applied == replica.steps_done, f"step {replica.steps_done}")
        check_same(restored(loop.case, replica.run, holders[-1]), loop, f"after step {replica.steps_done}")


def follow_to_the_end(
    loop: Loop, run: Path, holders: list[ReplicaServer], steps: int = STEPS, **options
) -> list[float | None]:
    """All of a run; then its last state is on disk. What gradients were multiplied by."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        with watched(loop, run, **{"queue": 2, **options}) as replica:
            follow(loop, replica, holders, steps)
            assert replica.logging
    again = Loop(loop.case, seed=1)
    recovery = again.recover(run)
    assert (recovery.step, recovery.exact, recovery.closed, recovery.from_memory) == (steps, True, True, False)
    check_same(again, loop, "on disk")
    return replica.scales


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return SGD([{"params": [first], "lr": 0.2, "momentum": 0.5}, {"params": rest}], 0.1, momentum=0.9, nesterov=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), 0.1),
    "momentum": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "dampened": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.3, maximize=True),
    "groups": two_groups,
    "adam": lambda m: Adam(m.parameters(), 0.01, weight_decay=0.1),
    "adam-single": lambda m: Adam(m.parameters(), 0.01, foreach=False),
    "adam-tensor-lr": lambda m: Adam(m.parameters(), torch.tensor(0.01)),
    "adamw": lambda m: AdamW(m.parameters(), 0.01),
    "adamw-foreach": lambda m: AdamW(m.parameters(), 0.01, foreach=True),
    "adamw-fused": lambda m: AdamW(m.parameters(), 0.01, fused=True),
    "sgd-fused": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, fused=True),
    "amsgrad": lambda m: AdamW(m.parameters(), 0.01, amsgrad=True, foreach=True),
    "amsgrad-fused": lambda m: Adam(m.parameters(), 0.01, amsgrad=True, fused=True),
    "rmsprop": lambda m: RMSprop(m.parameters(), 0.01, momentum=0.9, centered=True),
    "rmsprop-foreach": lambda m: RMSprop(m.parameters(), 0.01, foreach=True),
    "adagrad": lambda m: Adagrad(m.parameters(), 0.05),
    "nadam": lambda m: NAdam(m.parameters(), 0.01),
    "radam": lambda m: RAdam(m.parameters(), 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(tmp_path, holders, name):
    steps = 6 if name == "radam" else STEPS  # RAdam rectifies its steps from the sixth on
    follow_to_the_end(Loop(Case(OPTIMIZERS[name])), tmp_path, holders, steps)


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=7)  # changes betas, too; no loop is longer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW((p for p in model.parameters() if p.requires_grad), 0.01)


def noisy(parameters: list[nn.Parameter]) -> None:
    for seed, parameter in enumerate(parameters):
        if parameter.grad is not None:
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


def of_one(parameters: list[nn.Parameter]) -> None:
    """All but one are as they were."""
    parameters[1].grad[-1] += 1.0


def replaced(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = parameter.grad.sign()


def without_sign_of_zero(parameters: list[nn.Parameter]) -> None:
    """What torch.equal does not see, and momentum does."""
    for parameter in parameters:
        parameter.grad = torch.where(parameter.grad == 0, -parameter.grad, parameter.grad)


class Dead(nn.Module):
    """Has gradients that are zeros, of both signs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x) - 100.0)) + x


class Tied(nn.Sequential):
    def __init__(self) -> None:
        first, second = nn.Linear(12, 12), nn.Linear(12, 12)
        second.weight = first.weight
        super().__init__(first, nn.Tanh(), second)


class Holed(nn.Module):
    """Its weight is every other column of a larger tensor; one layer works in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 24)[:, ::2])
        self.turned = nn.Parameter(torch.randn(12, 12).t())
        self.wide = nn.Linear(12, 12, dtype=torch.float64)
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide((x @ self.weight @ self.turned).tanh().double()).float() + self.none.sum()


def clipped(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.2)


MODELS: dict[str, Case] = {
    "clipped by norm, one cycle": Case(adamw, schedule=one_cycle, clip=clipped),
    "clipped by value": Case(adamw, clip=lambda p: nn.utils.clip_grad_value_(p, 0.01)),
    "plateau": Case(adamw, schedule=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)),
    "noise is added": Case(adamw, clip=noisy),
    "one element is edited": Case(adamw, clip=of_one),
    "gradients are replaced": Case(adamw, clip=replaced),
    "signs of zeros": Case(
        lambda m: SGD(m.parameters(), 0.1, momentum=0.9), model=lambda s: seeded(s, Dead), clip=without_sign_of_zero
    ),
    "unused, frozen and tied": Case(adamw, model=lambda s: seeded(s, Sometimes), clip=clipped),
    "tied": Case(adamw, model=lambda s: seeded(s, Tied)),
    "batch norm, channels last": Case(adamw, model=lambda s: seeded(s, normalized), clip=clipped),
    "channels last, fused": Case(
        lambda m: Adam(m.parameters(), 0.01, fused=True), model=lambda s: seeded(s, normalized)
    ),
    "bf16": Case(adamw, model=lambda s: perceptron(s).bfloat16(), clip=clipped),
    "bf16, fused": Case(lambda m: AdamW(m.parameters(), 0.01, fused=True), model=lambda s: perceptron(s).bfloat16()),
    "holes, float64, empty": Case(adamw, model=lambda s: seeded(s, Holed), clip=clipped),
    "accumulated": Case(adamw, accumulate=3, clip=clipped),
    "scaled": Case(adamw, scaler=True, clip=clipped),
    "scaled, accumulated": Case(adamw, scaler=True, accumulate=2, schedule=one_cycle),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path, holders, name):
    case = MODELS[name]
    scales = follow_to_the_end(Loop(case), tmp_path, holders)
    if name in ("noise is added", "one element is edited", "gradients are replaced"):
        assert scales == [None] * STEPS, "handed over again"
    elif name == "clipped by norm, one cycle":
        assert None not in scales and min(scales) < 1.0, "not handed over again"
    elif name in ("accumulated", "tied", "plateau", "bf16, fused"):
        assert None not in scales


def ddp(loop: Loop, **options) -> Loop:
    loop.model = DistributedDataParallel(loop.model, **{"bucket_cap_mb": 0.0005, **options})
    return loop


@pytest.mark.usefixtures("alone_under_ddp")
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("name", [
    "clipped by norm, one cycle", "noise is added", "batch norm, channels last", "unused, frozen and tied",
    "holes, float64, empty", "accumulated", "scaled", "bf16",
])
def test_ddp(tmp_path, holders, name, as_view):
    unused = name.startswith("unused")
    loop = ddp(Loop(MODELS[name]), gradient_as_bucket_view=as_view, find_unused_parameters=unused)
    scales = follow_to_the_end(loop, tmp_path, holders)
    if name in ("clipped by norm, one cycle", "accumulated"):
        assert None not in scales


@pytest.mark.usefixtures("alone_under_ddp")
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("which", ["fp16", "bf16 around allreduce", "powersgd"])
def test_hooks_of_the_users(tmp_path, holders, which, as_view):
    """What they synchronize is what is handed over."""
    hook = {
        "fp16": (dist.group.WORLD, default_hooks.fp16_compress_hook),
        "bf16 around allreduce": (dist.group.WORLD, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        "powersgd": (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    }[which]
    # PowerSGD waits in gloo's threads for what gloo's threads do: with several buckets, for ever.
    buckets = {"bucket_cap_mb": 25} if which == "powersgd" else {}
    loop = ddp(Loop(MODELS["clipped by norm, one cycle"]), gradient_as_bucket_view=as_view, **buckets)
    scales = follow_to_the_end(loop, tmp_path, holders, hook=hook)
    assert None not in scales


@pytest.mark.usefixtures("alone_under_ddp")
def test_static_graphs(tmp_path, holders):
    """The first backward pass synchronizes all buckets when it is done."""
    loop = ddp(Loop(MODELS["clipped by norm, one cycle"]), static_graph=True)
    assert None not in follow_to_the_end(loop, tmp_path, holders)


def test_parameters_are_edited(tmp_path, holders):
    """The state is sent again, and the replica is right from then on."""
    loop = Loop(MODELS["batch norm, channels last"])
    with replica_of(loop, tmp_path) as replica:
        follow(loop, replica, holders, 3)
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(0.5)
        with pytest.warns(UserWarning, match="changed by something other"):
            loop.step(replica.steps_done)
        replica.step()

        def again():
            loop.step(replica.steps_done)
            replica.step()
            return holders[-1].newest_step == replica.steps_done

        until(again)
        follow(loop, replica, holders, 4)


def test_a_group_is_added(tmp_path, holders):
    """The same process goes on with the other parameters, from the state after a step or two; training never stops."""

    def make(model):
        return SGD(model[0].parameters(), 0.1, momentum=0.9)

    loop = Loop(Case(make))
    with replica_of(loop, tmp_path) as replica:
        follow(loop, replica, holders, 2)
        loop.optimizer.add_param_group({"params": list(loop.model[3].parameters()), "lr": 0.05})
        before = len(holders)

        def again():
            loop.step(replica.steps_done)
            replica.step()
            return replica.logging and holders[-1].newest_step == replica.steps_done

        with pytest.warns(UserWarning, match=r"moved \('3.weight', '3.bias'\).*steps from 3 on are not logged until"):
            until(again)
        assert len(holders) == before and len(holders[-1].entries) == 4
        case = Case(lambda m: SGD([
            {"params": m[0].parameters()}, {"params": m[3].parameters(), "lr": 0.05}
        ], 0.1, momentum=0.9))
        loop.case = case
        follow(loop, replica, holders, 4)


def test_a_buffer_grows(tmp_path, holders):
    """Beyond what was there for it when training began."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)
            self.register_buffer("cache", torch.zeros(1))

        def forward(self, x):
            self.cache = torch.arange(self.size, dtype=torch.float32) + x.mean().detach()
            return self.linear(x)

    Cached.size = 1
    loop = Loop(Case(adamw, model=lambda s: seeded(s, Cached)))
    with replica_of(loop, tmp_path) as replica:
        for size in (1, 3000, 3000, 9000, 20):
            Cached.size = size
            loop.step(replica.steps_done)
            replica.step()
            until(lambda: holders[-1].applied == replica.steps_done)
            other = holders[-1]._collect_tensors()
            names = {piece.name: piece.tensor for piece in other}
            assert torch.equal(names["model.cache"], loop.model.cache)
            assert torch.equal(names["model.linear.weight"], loop.model.linear.weight), size


def test_a_second_replica_after_training_began(tmp_path, holders):
    """The optimizer has been used, under a scheduler, and had a replica before."""
    loop = Loop(MODELS["clipped by norm, one cycle"])
    for number in range(2):
        loop.step(number)
    with replica_of(loop, tmp_path / "one") as replica:
        follow(loop, replica, holders, 2)
    with replica_of(loop, tmp_path / "two") as replica:
        follow(loop, replica, holders, 2)


def test_the_model_is_cast(tmp_path, holders):
    """The replica begins anew with what there is then."""
    loop = Loop(Case(lambda m: SGD(m.parameters(), 0.1)))
    with replica_of(loop, tmp_path) as replica:
        follow(loop, replica, holders, 3)
        loop.model.double()
        until(lambda: loop.step(replica.steps_done) is None or replica.step() or replica.logging)
        for _ in range(3):
            loop.step(replica.steps_done)
            replica.step()
            until(lambda: holders[-1].applied == replica.steps_done)
            names = {piece.name: piece.tensor for piece in holders[-1]._collect_tensors()}
            for name, parameter in loop.model.named_parameters():
                assert torch.equal(names[f"model.{name}"], parameter), name


def large(seed: int) -> nn.Module:
    return seeded(seed, lambda: nn.Sequential(nn.Linear(12, 400), nn.Tanh(), nn.Linear(400, 12)))


def test_a_lossy_base(tmp_path, holders):
    """Memory has the exact state all the same."""
    loop = Loop(Case(adamw, model=large))
    with replica_of(loop, tmp_path, base="dsq") as replica:
        follow(loop, replica, holders, 3)
        assert not holders[-1].shard_after(3).meta["lossy"]
    assert Loop(loop.case, seed=1).recover(tmp_path).lossy
