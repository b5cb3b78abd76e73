"""What the workers share: a gloo world with a short timeout, the state dicts of all placements, and assertions."""

from __future__ import annotations

import datetime
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

HANG = 240.0
"""Seconds after which a collective counts as hanging, also on a busy machine."""


@contextmanager
def world() -> Iterator[tuple[int, int]]:
    """The default group; yields rank and size."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=HANG))
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # an ordinary end aborts now and then after collectives of DTensor, without this package too


def done(name: str) -> None:
    """A check passed on all ranks."""
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"ok {name}\n", end="", flush=True)  # in one write, between the lines of background processes


def normal(*shape: int, seed: int, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a flat state dict, DTensors gathered; collective."""
    tensors = {}
    for fqn, value in state.items():
        if isinstance(value, DTensor):
            tensors[fqn] = value.full_tensor().detach().clone()
        elif isinstance(value, torch.Tensor):
            tensors[fqn] = value.detach().clone()
    return tensors


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    """A flat state dict with the same placements, all zero."""
    return {fqn: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for fqn, value in state.items()}


def equal_everywhere(value: torch.Tensor) -> bool:
    """Whether all ranks hold the same bits; collective."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return all(entry == held[0] for entry in held)


def error_of(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-300))


def fails_everywhere(work: Callable[[], Any], says: str, culprit: int | None = None) -> None:
    """All ranks get an error, soon, and on at least one of them it says `says`; collective.

    `culprit`: all of them say it, and the others name this rank.
    """
    start, text = time.monotonic(), None
    try:
        work()
    except (Exception, dist.checkpoint.api.CheckpointException) as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, (text, seconds))
    assert all(message is not None for message, _ in texts), texts
    assert any(says in message for message, _ in texts), texts
    for rank, (message, _) in enumerate(texts):
        assert culprit is None or (says in message and (rank == culprit or f"rank {culprit}" in message.lower())), texts
    assert all(took < HANG / 2 for _, took in texts), texts


def depth(path: Any) -> int:
    from dsq_ckpt.storage.manifest import Manifest

    return Manifest.read(path).depth
