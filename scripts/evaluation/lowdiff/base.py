"""What a system of checkpointing is to the training loop, and what all of them need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evaluation.lowdiff.durable import bytes_below, read_raw


class System(Protocol):
    """A system of checkpointing. Steps are counted from 1: a state of step n has n updates behind it.

    Attributes:
        bytes_written: Bytes that went to disk since `prepare`, of checkpoints that are complete.
        bytes_stored: Bytes on disk that recovery could use, or that are yet to be removed.
    """

    @property
    def bytes_written(self) -> int: ...

    @property
    def bytes_stored(self) -> int: ...

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Begin with a model (wrapped by DDP or not) that has `step` updates behind it.

        After a recovery it is called on the object that recovered, with the step it gave.
        """

    def after_step(self, step: int) -> None:
        """Process step `step`, after the optimizer's update."""

    def wait(self) -> None:
        """Return when nothing is under way: what `after_step` was told of is as safe as it will ever be."""

    def finish(self) -> None:
        """Wait, and end all threads and processes."""

    def recover(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore the newest state; return its step, 0 if there is none and nothing was changed."""


class Without:
    """Training without checkpoints."""

    bytes_written = 0
    bytes_stored = 0

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Do nothing."""

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def recover(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Return 0: there is no state."""
        return 0


class OnDisk:
    """The base of systems whose checkpoints are files below a directory.

    Args:
        directory: Directory of the checkpoints.
        every: Iterations between checkpoints.
        core: CPU for what runs beside training.
    """

    def __init__(self, directory: Path, every: int = 1, core: int | None = None) -> None:
        self._directory = directory
        self._every = every
        self._core = core
        self._written = 0

    @property
    def bytes_written(self) -> int:
        return self._written

    @property
    def bytes_stored(self) -> int:
        return bytes_below(self._directory)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def live_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors that a step changes, always in the same order: weights, buffers, the optimizer's state.

    They are the ones in use, not copies. The rest of a run's state, learning rates and batches, is a function of the
    step in this harness.

    Raises:
        ValueError: The optimizer has no state yet: it could not be restored in place.
    """
    plain = unwrapped(model)
    tensors: dict[str, Tensor] = {f"model.{name}": tensor.detach() for name, tensor in plain.named_parameters()}
    tensors |= {f"buffer.{name}": tensor for name, tensor in plain.named_buffers()}
    for name, parameter in plain.named_parameters():
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        if parameter.requires_grad and not state:
            raise ValueError(f"the optimizer has no state of {name} yet")
        tensors |= {f"{kind}.{name}": value for kind, value in sorted(state.items()) if isinstance(value, Tensor)}
    return tensors


class Layout:
    """Where each of some tensors lies in one piece of memory.

    Attributes:
        size: Bytes in all.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._offsets: list[int] = []
        self.size = 0
        for tensor in self._tensors:
            self._offsets.append(self.size)
            self.size += -(-tensor.nbytes // 64) * 64

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return views like the given tensors in a uint8 tensor of `size` elements."""
        return [
            memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(self._offsets, self._tensors, strict=True)
        ]


@torch.no_grad()
def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shapes."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def read_state(path: Path, tensors: Sequence[Tensor]) -> int:
    """Read a file of raw state into the tensors that it was made of; returns its step.

    Raises:
        ValueError: It is not such a file, or was made of others.
    """
    layout = Layout(tensors)
    memory = torch.empty(layout.size, dtype=torch.uint8)
    step = read_raw(path, memory.numpy().data)
    copy_all(layout.views(memory), tensors)
    return step


def keep_to(core: int | None) -> None:
    """Bind this thread, and threads that it starts, to one CPU; None: to any."""
    if core is not None:
        os.sched_setaffinity(0, {core})
