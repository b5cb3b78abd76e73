"""A model small enough to train in a test, large enough to be quantized: shared by the tests of `Compressor`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(128, 64)
            self.hidden = nn.Linear(64, 160)
            self.norm = nn.BatchNorm1d(160)
            self.drop = nn.Dropout(0.1)
            self.head = nn.Linear(160, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.hidden(self.embed(tokens))))))


def make_batch(step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(0, 128, (256,), generator=generator)
    noise = torch.rand(256, generator=generator) < 0.4  # so that the loss stays well above zero
    return tokens, torch.where(noise, torch.randint(0, 128, (256,), generator=generator), (tokens * 7 + 1) % 128)


def compute_loss(model: nn.Module, step: int = 10_000) -> float:
    """Loss on a fixed batch; it leaves the model in evaluation mode, as careless users do."""
    model.eval()
    with torch.no_grad():
        tokens, targets = make_batch(step)
        return float(nn.functional.cross_entropy(model(tokens), targets))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, rank: int = 0,
    after: Callable[[], None] | None = None,
) -> None:
    model.train()
    for step in range(first, last):
        tokens, targets = make_batch(step, rank)
        nn.functional.cross_entropy(model(tokens), targets).backward()
        if after is not None:
            after()
        optimizer.step()
        optimizer.zero_grad()


def train_model(
    steps: int = 40, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: object
) -> tuple[Net, torch.optim.Optimizer]:
    """Return a model after some steps, the same each time, and its optimizer."""
    weights, state, drawn = _train_once(steps, kind, tuple(options.items()))
    model = Net()
    optimizer = kind(model.parameters(), **{"lr": 1e-2, **options})
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))  # which it takes over
    torch.set_rng_state(drawn)
    return model, optimizer


@functools.cache
def _train_once(steps: int, kind: Callable[..., torch.optim.Optimizer], options: tuple[tuple[str, object], ...]) -> Any:
    """Train, and return the states of both and of the random numbers."""
    torch.manual_seed(0)  # of dropout
    model = Net()
    optimizer = kind(model.parameters(), **{"lr": 1e-2, **dict(options)})
    train(model, optimizer, 0, steps)
    return model.state_dict(), optimizer.state_dict(), torch.get_rng_state()


class Tied(nn.Module):
    def __init__(self, seed=0, tied=True):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed, self.hidden = nn.Embedding(128, 96), nn.Linear(96, 96)
            self.head = nn.Linear(96, 128, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.hidden(self.embed(tokens))))
