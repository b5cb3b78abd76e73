"""A short real training run with three checkpoints, for tests of what looks at checkpoints from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import dsq_ckpt

NAMES = ("step-000005", "step-000010", "step-000015")


def small_run(run: Path, **config: Any) -> dict[str, Any]:
    """Train a small model with AdamW, save a checkpoint every five steps; returns the last state dict.

    `config` has sections of the configuration.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {}
    for number, name in enumerate(NAMES, 1):
        for _ in range(5):
            tokens = torch.randint(0, 128, (64,), generator=generator)
            nn.functional.cross_entropy(model(tokens), (tokens * 7 + 1) % 128).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights, moments = get_state_dict(model, optimizer)
        extra = {"step": 5 * number, "name": "small", "seen": [torch.arange(3), {"last": tokens}]}
        state = {"model": weights, "optimizer": moments, "extra": extra}
        dsq_ckpt.save(state, run / name, model=model, config={"refinement": {"keep_last": 1}, **config})
    return state
