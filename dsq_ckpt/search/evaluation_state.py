"""State of a model and of random generators that an evaluation may change, and that is put back after it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dsq_ckpt.core.tensor_subclasses import get_inner_tensors

_T = TypeVar("_T")


class EvaluationState:
    """Buffers, training flags, flags and gradients of parameters, and the random state of torch, NumPy and Python.

    Includes whether the next forward pass of DDP copies the buffers of rank 0 to the other ranks.

    Args:
        model: the model; a copy of its local buffers is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = get_storage_addresses(*model.parameters())  # these are put back themselves
        self._buffers = [
            (buffer, clone(get_local_tensors(buffer))) for module in model.modules()
            for buffer in module._buffers.values()
            if buffer is not None and not (get_storage_addresses(buffer) or {0}) <= parameters
        ]
        self._registered_buffers = [
            (m, dict(m._buffers.items()), set(m._non_persistent_buffers_set)) for m in model.modules()  # of scripts too
        ]
        self._flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
        self._training = [(module, module.training) for module in model.modules()]
        self._synchronizing = [(module, module.require_forward_param_sync) for module in _find_ddp(model)]
        self._random = torch.get_rng_state()
        self._random_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._random_others = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Undo the changes of an evaluation."""
        with torch.no_grad():
            for module, buffers, caches in self._registered_buffers:
                _restore_buffers(module, buffers, caches)
            for buffer, originals in self._buffers:
                for local_tensor, original in zip(get_local_tensors(buffer), originals, strict=True):
                    write(local_tensor, original)
        for parameter, requires_grad, gradient in self._flags:
            parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for module, training in self._training:
            module.training = training
        for ddp, synchronizes in self._synchronizing:
            ddp.require_forward_param_sync = synchronizes
        torch.set_rng_state(self._random)
        if self._random_cuda:
            torch.cuda.set_rng_state_all(self._random_cuda)
        random.setstate(self._random_others[0])
        np.random.set_state(self._random_others[1])

    def reseed(self) -> None:
        """Reseed all generators from their own numbers, so that equal generators on several ranks stay equal."""
        torch.default_generator.manual_seed(int(torch.randint(1 << 32, (), device="cpu")))
        if self._random_cuda:
            torch.cuda.manual_seed_all(int(torch.randint(1 << 32, (), device="cuda")))
        random.seed(random.getrandbits(32))
        np.random.seed(np.random.randint(1 << 32, dtype=np.uint32))


def synchronize_buffers(model: nn.Module, ranks: int) -> bool:
    """Copy the buffers that DDP's next forward pass would copy from rank 0, which then does not; collective.

    Without gradients DDP copies them in the first forward pass only, so that later ones would evaluate other buffers.

    Args:
        model: the model.
        ranks: number of ranks that evaluate; modules on more ranks are left as they are.

    Returns:
        Whether there were any.
    """
    modules = [
        module for module in _find_ddp(model)
        if module._check_sync_bufs_pre_fwd() and module.process_group.size() <= ranks
    ]
    for module in modules:
        with torch.no_grad():
            module._sync_buffers()
        module.require_forward_param_sync = False
    return bool(modules)


def _find_ddp(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def restore_registry(registry: dict[str, _T], entries: dict[str, _T]) -> None:
    """Restore the same objects of a module, in their order; the optimizer refers to them."""
    if list(registry.keys()) != list(entries):
        registry.clear()
        registry.update(entries)
    for name, entry in entries.items():
        if registry[name] is not entry:
            registry[name] = entry


def _restore_buffers(module: nn.Module, buffers: dict[str, torch.Tensor | None], caches: set[str]) -> None:
    """Restore the buffers of a module, without those that are not persistent: they are caches, may grow and be new."""
    present = dict(module._buffers.items())
    new_caches = {name for name in present if name in module._non_persistent_buffers_set and name not in buffers}
    entries = {name: present.get(name, buffer) if name in caches else buffer for name, buffer in buffers.items()}
    restore_registry(module._buffers, {**entries, **{name: present[name] for name in present if name in new_caches}})
    if module._non_persistent_buffers_set != caches | new_caches:
        module._non_persistent_buffers_set = caches | new_caches


def clone(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


def get_local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a tensor's values on this rank.

    Of a packed tensor these are copied, not the tensor: a clone of NF4 quantizes the decoded values anew.
    """
    return get_inner_tensors(getattr(tensor, "_local_tensor", tensor))  # of a DTensor


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to a tensor. Write memory repeated by `expand` once, which `copy_` does not support."""
    strides = target.stride() if target.layout is torch.strided else ()
    for dim, stride in enumerate(strides):
        if target.shape[dim] > 1 and not stride:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)


def get_versions(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the versions of a tensor and of the tensors that hold its values; FSDP2 adds gradients to these alone."""
    return tensor._version, *(inner._version for inner in get_local_tensors(tensor))


def get_storage_addresses(*tensors: torch.Tensor) -> set[int]:
    """Return the addresses of the storages of tensors, without sparse ones."""
    strided = (local for tensor in tensors for local in get_local_tensors(tensor) if local.layout is torch.strided)
    return {int(local.untyped_storage().data_ptr()) for local in strided} - {0}


def get_place(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return the address and the number of elements of each strided tensor that holds a tensor's values."""
    return tuple((t.data_ptr(), t.numel()) for t in get_local_tensors(tensor) if t.layout is torch.strided)
