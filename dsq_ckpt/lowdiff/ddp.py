"""DDP's communication hook. It can be registered once and never taken away, so those who use it take turns."""

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
    """Who uses the hook.

    Attributes:
        tenant: what it is, in words.
    """

    @property
    def tenant(self) -> str: ...

    def on_bucket(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> Synchronized:
        """Synchronize a bucket whose gradients are all there; the future is of its mean over the ranks, flat."""
        ...


class CommHookSlot:
    """The hook of one model; without a tenant it averages, as DDP does by itself.

    Attributes:
        tenant: who uses it.
        group: of the ranks of the model.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.tenant: HookOwner | None = None
        self.group = group

    def leave(self) -> None:
        """The tenant does not use it any more."""
        self.tenant = None

    def _run(self, bucket: dist.GradBucket) -> Synchronized:
        return allreduce_hook(self.group, bucket) if self.tenant is None else self.tenant.on_bucket(bucket, self.group)


_SEATS: WeakKeyDictionary[DistributedDataParallel, CommHookSlot] = WeakKeyDictionary()


def distributed(model: nn.Module, tenant: str) -> DistributedDataParallel | None:
    """A model that DDP synchronizes, out of torch.compile; None if it is none.

    Raises:
        ConfigError: it contains one.
    """
    inner = getattr(model, "_orig_mod", None)  # of torch.compile
    model = inner if isinstance(inner, nn.Module) else model
    if isinstance(model, DistributedDataParallel):
        return model
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(f"{type(model).__name__} contains a DistributedDataParallel: give that to {tenant}")
    return None


def take_seat(model: DistributedDataParallel, tenant: HookOwner, instead: str) -> CommHookSlot:
    """Have DDP call a tenant, until `CommHookSlot.leave`.

    Args:
        model: whose gradients are to be synchronized.
        tenant: to be called for every bucket.
        instead: what a user does who has a hook already.

    Raises:
        ConfigError: the model has another communication hook, or a tenant.
    """
    seat = _SEATS.get(model)
    if seat is None:
        seat = CommHookSlot(model.process_group)
        try:  # a lambda, since DDP does not understand annotations that are strings
            model.register_comm_hook(seat, lambda seat, bucket: seat._run(bucket))
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{tenant.tenant} cannot be the communication hook of this DistributedDataParallel; {instead}. "
                f"DDP says: {str(error).splitlines()[0]}"
            ) from error
        _SEATS[model] = seat
    elif seat.tenant is not None:
        raise ConfigError(f"this model has {seat.tenant.tenant} already; detach or close that first")
    seat.tenant = tenant
    return seat
