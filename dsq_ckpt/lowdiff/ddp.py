"""The communication hook of DDP, which can be registered once and never removed, and is therefore shared in turns."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dsq_ckpt.errors import ConfigError

Synchronized = torch.futures.Future[torch.Tensor]


class HookOwner(Protocol):
    """An object that synchronizes the gradients of a model in DDP's place.

    Attributes:
        description: name of the owner in error messages.
    """

    @property
    def description(self) -> str: ...

    def on_bucket(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> Synchronized:
        """Synchronize a bucket of complete gradients; return a future of its flat mean over the ranks."""
        ...


class CommHookSlot:
    """The communication hook of one model. Without an owner it averages gradients, as DDP does by default.

    Attributes:
        owner: object that the hook calls; None if the slot is free.
        group: process group of the model.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.owner: HookOwner | None = None
        self.group = group

    def leave(self) -> None:
        """Free the slot."""
        self.owner = None

    def _run(self, bucket: dist.GradBucket) -> Synchronized:
        return allreduce_hook(self.group, bucket) if self.owner is None else self.owner.on_bucket(bucket, self.group)


_SLOTS: WeakKeyDictionary[DistributedDataParallel, CommHookSlot] = WeakKeyDictionary()


def distributed(model: nn.Module, description: str) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` module under torch.compile, or None if DDP does not wrap the model.

    Raises:
        ConfigError: DDP wraps a submodule of the model.
    """
    inner = getattr(model, "_orig_mod", None)  # of torch.compile
    model = inner if isinstance(inner, nn.Module) else model
    if isinstance(model, DistributedDataParallel):
        return model
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(f"{type(model).__name__} contains a DistributedDataParallel: give that to {description}")
    return None


def claim_hook_slot(model: DistributedDataParallel, owner: HookOwner, instead: str) -> CommHookSlot:
    """Let DDP call an owner for every bucket, until `CommHookSlot.leave`.

    Args:
        model: model whose gradients the owner synchronizes.
        owner: object to be called for every bucket.
        instead: advice for users whose model has a communication hook already.

    Raises:
        ConfigError: the model has another communication hook, or another owner.
    """
    slot = _SLOTS.get(model)
    if slot is None:
        slot = CommHookSlot(model.process_group)
        try:  # a lambda, since DDP does not understand annotations that are strings
            model.register_comm_hook(slot, lambda slot, bucket: slot._run(bucket))
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{owner.description} cannot be the communication hook of this DistributedDataParallel; {instead}. "
                f"DDP says: {str(error).splitlines()[0]}"
            ) from error
        _SLOTS[model] = slot
    elif slot.owner is not None:
        raise ConfigError(f"this model has {slot.owner.description} already; detach or close that first")
    slot.owner = owner
    return slot
