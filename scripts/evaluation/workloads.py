"""What a workload is, and the registry that makes one by its name.

A workload is a model in training whose every batch and learning rate is a function of the step and the seed alone.
A run that is killed and restored therefore sees what the run without failures sees, and what differs at the end is
the degradation that its checkpoints caused.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

NOISE_FLOOR, NOISE = "noise", 1e-6
"""The system whose restores are exact but for a relative noise, about what a change in the order of sums does."""

NO_TARGET = -100
"""A target that is not to be predicted: what torch's cross-entropy ignores by default."""


@dataclass(frozen=True)
class Plan:
    """The numbers of a training run.

    Attributes:
        steps: Steps of the whole run; the learning rate ends with it.
        checkpoint_every: Steps between checkpoints; divides `steps`.
        batch_size: Rows of a batch.
        rate: Highest learning rate.
        warm_up: Steps of linear warm-up.
        floor: Learning rate at the end, as a share of `rate`; a cosine leads there, 1 keeps the rate constant.
        clip: Largest norm of the gradient, None for no clipping.
    """

    steps: int
    checkpoint_every: int
    batch_size: int
    rate: float
    warm_up: int = 0
    floor: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        """Reject a run that does not end in a checkpoint."""
        if self.steps % self.checkpoint_every:
            raise ValueError(f"steps {self.steps} is not a multiple of checkpoint_every {self.checkpoint_every}")

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.rate * min(1.0, (step + 1) / max(1, self.warm_up)) * (self.floor + (1 - self.floor) * cosine)


class Workload(ABC):
    """A model, its optimizer and its data; subclasses say what a batch and the held-out data are."""

    def __init__(self, name: str, plan: Plan, seed: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self.plan = plan
        self.seed = seed
        self.steps = plan.steps
        self.checkpoint_every = plan.checkpoint_every
        self.model = model
        self.optimizer = optimizer
        self._start_optimizer()

    @abstractmethod
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step: a function of the step and the seed alone."""

    @abstractmethod
    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets that are never trained on, the same each time."""

    @abstractmethod
    def data_checksum(self) -> int:
        """Return a checksum of the data: losses on other data do not compare."""

    def settings(self) -> dict[str, Any]:
        """Return what tells runs apart; equal settings mean the same run. Plain JSON values."""
        return {
            "workload": self.name, "seed": self.seed, **asdict(self.plan), "model": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "optimizer": type(self.optimizer).__name__, "data_checksum": self.data_checksum(),
            "held_out": sum(int((targets != NO_TARGET).sum()) for _, targets in self.held_out()),
        }

    def train(self, first: int, last: int, after_backward: Callable[[], None] | None = None) -> None:
        """Train steps `first` to `last`, exclusive.

        Args:
            first: First step.
            last: Step to stop before.
            after_backward: Called in each step when the gradients are final (clipped), before the optimizer's step.
        """
        self.model.train()
        for step in range(first, last):
            for group in self.optimizer.param_groups:
                group["lr"] = self.plan.rate_at(step)
            inputs, targets = self.batch(step)
            self.loss(self.model(inputs), targets).backward()
            if self.plan.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
            if after_backward is not None:
                after_backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return what is minimized: the cross-entropy of class logits in the last dimension, after any others."""
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction=reduction)

    def evaluate(self) -> float:
        """Return the mean held-out loss, in nats where it is a cross-entropy."""
        return self._mean_over_held_out(lambda outputs, targets: self.loss(outputs, targets, reduction="sum"))

    def accuracy(self) -> float:
        """Return the share of held-out targets that the model predicts, between 0 and 1."""
        return self._mean_over_held_out(lambda logits, targets: (logits.argmax(-1) == targets).sum())

    def state(self) -> dict[str, Any]:
        """Return the model's and the optimizer's state dict. The tensors are the live ones, not copies."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state()`, which is not changed."""
        # Optimizer.load_state_dict keeps the tensors it is given, and training would change the caller's.
        optimizer = copy.deepcopy(state["optimizer"])
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=optimizer)

    def _start_optimizer(self) -> None:
        """Make the optimizer's state now, all zeros, which is what a first step starts from.

        Else get_state_dict makes it by a step with gradients of zero, which leaves Adam's count at 1 and weight decay
        in SGD's momentum: a run whose first state was saved would differ from one whose was not.
        """
        self.state()
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    @torch.no_grad()
    def _mean_over_held_out(self, total: Callable[[Tensor, Tensor], Tensor]) -> float:
        training = self.model.training
        self.model.eval()
        try:
            value, count = 0.0, 0
            for inputs, targets in self.held_out():
                value += total(self.model(inputs), targets).item()
                count += int((targets != NO_TARGET).sum())
        finally:
            self.model.train(training)
        return value / count


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch for initial weights, and restore its generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def cache_directory() -> Path:
    """Return this project's directory in the user's cache; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dsq_ckpt"


Factory = Callable[[str, int], Workload]
_factories: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Let `create` make a workload by a function of its name and a seed."""

    def add(factory: Factory) -> Factory:
        _factories[name] = factory
        return factory

    return add


def names() -> list[str]:
    """Return the names that `create` knows."""
    return list(_factories)


def create(name: str, seed: int = 0) -> Workload:
    """Make a workload at its step 0.

    Args:
        name: One of `names()`.
        seed: Seed of the initial weights and of the batches.

    Raises:
        ValueError: There is no such workload.
    """
    if name not in _factories:
        raise ValueError(f"no workload is called {name!r}; there are {', '.join(names())}")
    return _factories[name](name, seed)


def with_noise(state: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a state in which every floating-point tensor but scalars has a relative noise of `NOISE`."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: noisy(part) for key, part in value.items()}
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
            return value * (1 + NOISE * torch.randn(value.shape, generator=generator)).to(value.device)
        return copy.deepcopy(value)

    noisy_state: dict[str, Any] = noisy(state)
    return noisy_state
