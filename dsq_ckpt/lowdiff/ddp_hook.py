"""The communication hook of a DDP model, shared by successive owners: DDP cannot remove or replace a hook."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dsq_ckpt.errors import ConfigError

BucketFuture = torch.futures.Future[torch.Tensor]


class HookOwner(Protocol):
    """An object that synchronizes the gradients of a model in place of DDP.

    Attributes:
        description: name of the owner in error messages.
    """

    @property
    def description(self) -> str: ...

    def on_bucket(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> BucketFuture:
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

    def release(self) -> None:
        """Free the slot."""
        self.owner = None

    def _run(self, bucket: dist.GradBucket) -> BucketFuture:
        return allreduce_hook(self.group, bucket) if self.owner is None else self.owner.on_bucket(bucket, self.group)


_SLOTS: WeakKeyDictionary[DistributedDataParallel, CommHookSlot] = WeakKeyDictionary()


def find_ddp(model: nn.Module, description: str) -> DistributedDataParallel | None:
    """Return the model, without torch.compile's wrapper, if it is a `DistributedDataParallel`; else None.

    Args:
        model: model, possibly compiled.
        description: name of the caller in error messages.

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


def claim_hook_slot(model: DistributedDataParallel, owner: HookOwner, advice: str) -> CommHookSlot:
    """Let DDP call an owner for every bucket, until `CommHookSlot.release`.

    Args:
        model: model whose gradients the owner synchronizes.
        owner: object to be called for every bucket.
        advice: advice for users whose model has a communication hook already.

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
                f"{owner.description} cannot be the communication hook of this DistributedDataParallel; {advice}. "
                f"DDP says: {str(error).splitlines()[0]}"
            ) from error
        _SLOTS[model] = slot
    elif slot.owner is not None:
        raise ConfigError(f"this model has {slot.owner.description} already; detach or close that first")
    slot.owner = owner
    return slot
