"""Training loops to be logged: models, optimizers, schedulers, and how states are compared, bit for bit."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

from dsq_ckpt.lowdiff import GradientLog, Recovered, recover, segments

State = dict[str, Any]


def perceptron(seed: int = 0) -> nn.Module:
    return seeded(seed, lambda: nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, 12)))


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


class Sometimes(nn.Module):
    """One layer is used in every third step, one is frozen, and one is tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.tied = nn.Linear(12, 12, bias=False)
        self.tied.weight = self.second.weight
        self.frozen.requires_grad_(False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.tied(torch.tanh(self.frozen(self.second(x))))
        return self.first(x) if self.calls % 3 == 0 else x


def normalized() -> nn.Module:
    """Convolutions in channels_last memory, and buffers that change in every step."""
    model = nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 4, 2), nn.Flatten(), nn.Linear(16, 12),
    )
    return model.to(memory_format=torch.channels_last)


Schedule = Callable[[torch.optim.Optimizer], Any]


@dataclass
class Case:
    """A way to train.

    Attributes:
        optimizer: made from a model.
        model: made from a seed.
        schedule: made from an optimizer.
        clip: called with parameters before each step.
        accumulate: backward passes in a step.
        scaler: whether the loss is scaled, and overflows in some steps.
        log: options of the log.
    """

    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    model: Callable[[int], nn.Module] = perceptron
    schedule: Schedule | None = None
    clip: Callable[[Any], Any] | None = None
    accumulate: int = 1
    scaler: bool = False
    log: dict[str, Any] = field(default_factory=dict)


class Loop:
    """Training of a case: model, optimizer and states from a seed, and steps whose data depends on their number."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self.model = case.model(seed)
        self.optimizer = case.optimizer(self.model)
        self.states: dict[str, Any] = {}
        if case.schedule is not None:
            self.states["scheduler"] = case.schedule(self.optimizer)
        if case.scaler:
            self.states["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def step(self, number: int, rank: int = 0) -> float:
        """The iteration after `number` steps; returns its loss."""
        scaler, loss = self.states.get("scaler"), torch.zeros(())
        self.optimizer.zero_grad()
        for part in range(self.case.accumulate):
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * rank + 10 * number + part))
            x = x.to(next(self.model.parameters()))  # its dtype and device
            loss = (self.model(x) - x.roll(1, 1)).square().mean()
            if scaler is not None and number % 4 == 2:
                loss = loss * float("inf")
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.case.clip is not None:
            self.case.clip(list(self.model.parameters()))
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        scheduler = self.states.get("scheduler")
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.detach())
        elif scheduler is not None:
            scheduler.step()
        return loss.item()

    def state(self) -> State:
        """All of it, copied."""
        model = self.model.module if hasattr(self.model, "module") else self.model
        return copy.deepcopy({
            "model": dict(model.state_dict()), "optimizer": self.optimizer.state_dict(),
            **{name: state.state_dict() for name, state in self.states.items()},
        })

    def log(self, run: Path, **options: Any) -> GradientLog:
        options = {"batch": 1, "snapshot_every": 1000, **self.case.log, **options}
        return GradientLog(run, self.model, self.optimizer, state=self.states, **options)

    def recover(self, run: Path, **options: Any) -> Recovered | None:
        return recover(run, self.model, self.optimizer, state=self.states, **options)


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two states are not the same, bit for bit."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        same = one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
        return [] if same else [f"{where}: {one} is not {other}"]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        lines = [] if set(one) == set(other) else [f"{where}: {sorted(map(str, one))} and {sorted(map(str, other))}"]
        return lines + [d for key in one if key in other for d in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return [d for n, pair in enumerate(zip(one, other, strict=True)) for d in differences(*pair, f"{where}[{n}]")]
    same = type(one) is type(other) and (one == other or repr(one) == repr(other))
    return [] if same else [f"{where}: {one!r} is not {other!r}"]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def digest(state: State) -> str:
    """The same for states that are the same, bit for bit."""
    hasher = hashlib.sha256()

    def add(value: Any) -> None:
        if torch.is_tensor(value):
            hasher.update(f"{value.dtype}{tuple(value.shape)}".encode() + bits(value))
        elif isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                hasher.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            hasher.update(repr(value).encode())

    add(state)
    return hasher.hexdigest()


def recorded(case: Case, run: Path, steps: int, **options: Any) -> list[State]:
    """Train under a log, to its end; the state after each number of steps."""
    loop = Loop(case)
    table = [loop.state()]
    with loop.log(run, **options) as log:
        for number in range(steps):
            loop.step(number)
            log.step()
            assert log.logging
            table.append(loop.state())
    return table


def cut(run: Path, after: int) -> None:
    """Remove the segments of all steps after one, as if training had been killed there; each has one of its own."""
    for note in (run / segments.LOG).glob("*.closed"):
        note.unlink()
    for name, path in segments.list_segments(run):
        if name.last > after:
            assert name.first == name.last
            path.unlink()


def check_every_step(case: Case, run: Path, table: list[State], first: int = 0) -> None:
    """Recovery gives each logged step, from the last one to the snapshot."""
    for step in range(len(table) - 1, first - 1, -1):
        loop = Loop(case, seed=1)
        recovered = loop.recover(run)
        assert recovered is not None and recovered.exact
        assert (recovered.step, recovered.ended) == (step, None)
        assert differences(loop.state(), table[step]) == []
        cut(run, step - 1)


ADAM = Case(lambda m: Adam(m.parameters(), 0.01))
SCHEDULED = Case(lambda m: Adam(m.parameters(), 0.01), schedule=lambda o: lr_scheduler.ExponentialLR(o, 0.9))
TOPK = Case(lambda m: SGD(m.parameters(), 0.1, momentum=0.9), log={"compressor": "topk:0.05"})


def until(log: GradientLog, loop: Loop, condition: Callable[[], bool], most: int = 400) -> list[float]:
    """Train under a log until something is true; the losses."""
    losses = []
    for _ in range(most):
        losses.append(loop.step(log.steps_done))
        log.step()
        if condition():
            return losses
    raise AssertionError(f"not within {most} steps")


def check_recovers(case: Case, run: Path, truth: State, step: int) -> Recovered:
    """The log gives this state, after this step."""
    loop = Loop(case, seed=5)
    recovered = loop.recover(run)
    assert recovered is not None and (recovered.step, recovered.exact, recovered.ended) == (step, True, None)
    assert differences(loop.state(), truth) == []
    return recovered
