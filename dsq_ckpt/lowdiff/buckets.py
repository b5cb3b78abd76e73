"""Flat gradient buckets for compressors, from DDP's communication hook or from hooks of parameters.

State is kept by parameter and in memory order. DDP rebuilds its buckets after the first iteration, so no state may
depend on a bucket's index. A bucket holds a gradient in the memory format of its parameter, so a channels_last
parameter needs no copy. Only `GradientInfo` has row-major indices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.base_compressor import GradientCompressor, GradientInfo
from dsq_ckpt.lowdiff.ddp_hook import CommHookSlot, claim_hook_slot, find_ddp

Group = dist.ProcessGroup
_BATCH_ELEMENTS = 1 << 23
"""Largest number of elements that `synchronize` compresses together. A larger parameter has its own bucket."""


class BucketSlice(NamedTuple):
    """The elements of a bucket that hold one parameter's gradient."""

    parameter: nn.Parameter
    start: int
    stop: int
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; may be 0."""
        return self.stop - self.start

    def to_row_major(self, memory_indices: Tensor) -> Tensor:
        """Convert int64 indices into the parameter's memory to int64 row-major indices."""
        sizes = self.parameter.shape
        row_major = row_major_strides(sizes)
        if self.strides == row_major:
            return memory_indices
        indices = torch.zeros_like(memory_indices)
        for size, stride, row_stride in zip(sizes, self.strides, row_major, strict=True):
            if size > 1:  # a dimension of size 1 may have any stride, even 0
                indices += memory_indices // stride % size * row_stride
        return indices


@dataclass(frozen=True)
class Bucket:
    """Gradients that are compressed together.

    Attributes:
        flat: 1-D tensor of the gradients' dtype, overwritten with the synchronized gradient.
        slices: slice of each parameter.
        grad_bucket: bucket of DDP; None outside of DDP.
    """

    flat: Tensor
    slices: Sequence[BucketSlice]
    grad_bucket: dist.GradBucket | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """Key of the bucket's parameters and their order."""
        return tuple(id(slice_.parameter) for slice_ in self.slices)

    def gradient(self, slice_: BucketSlice) -> Tensor:
        """Return the flat gradient of one parameter."""
        return self.flat[slice_.start : slice_.stop]


InfoFactory = Callable[[], GradientInfo | None]
"""A function that builds a `GradientInfo` on demand. With gradient accumulation, few backward passes need one."""


class HookedCompressor(GradientCompressor):
    """A base class for compressors that registers their hooks; a subclass implements `_synchronize`."""

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self._names: dict[nn.Parameter, str] = {}
        self._info_factories: dict[nn.Parameter, InfoFactory] = {}
        self._handles: list[RemovableHandle] = []
        self._hook_slot: CommHookSlot | None = None
        self._ddp_may_drop = False
        """True if DDP may drop the gradients of parameters that no rank used, and the residuals added to them."""

    @abstractmethod
    def _synchronize(self, bucket: Bucket, group: Group | None) -> Future[Tensor]:
        """Overwrite `bucket.flat` with the mean of the compressed gradients over the group.

        All ranks call this method in the same order. `_info_factories` must be filled when the future is done.

        Args:
            bucket: gradients of this rank, not divided by the world size.
            group: process group; None for a single process.
        """

    def attach(self, model: nn.Module) -> None:
        """See `GradientCompressor.attach`."""
        if self._hook_slot is not None or self._handles:
            raise ConfigError(f"compressor '{self.spec}' is attached to a model already; call detach() first")
        ddp_model = find_ddp(model, "the compressor")
        names = self._register_parameters(model if ddp_model is None else ddp_model)
        if ddp_model is None:
            self._handles = [p.register_post_accumulate_grad_hook(self._compress_parameter) for p in names]
        else:
            self._hook_slot = claim_hook_slot(ddp_model, self, "leave out the other one")
            self._ddp_may_drop = bool(ddp_model.find_unused_parameters or ddp_model.static_graph)

    @property
    def description(self) -> str:
        """See `ddp_hook.HookOwner`."""
        return f"compressor '{self.spec}'"

    def on_bucket(self, bucket: dist.GradBucket, group: Group) -> Future[Tensor]:
        """See `ddp_hook.HookOwner`."""
        flat = bucket.buffer()
        parameters = [cast(nn.Parameter, p) for p in bucket.parameters()]
        if flat.layout != torch.strided:
            names = ", ".join(self._names[p] for p in parameters)
            raise ConfigError(f"{names} has sparse gradients, which compressors do not understand")
        slices, start = [], 0
        for p in parameters:  # not bucket.gradients(), which are row-major for any memory format
            slices.append(BucketSlice(p, start, start + p.numel(), memory_strides(p)))
            start += p.numel()
        with torch.no_grad():
            return self._synchronize(Bucket(flat, slices, bucket), group if group.size() > 1 else None)

    def attach_without_hooks(self, model: nn.Module) -> None:
        """Attach to a model without hooks, for callers that average gradients by `synchronize`."""
        if self._hook_slot is not None or self._handles:
            raise ConfigError(f"compressor '{self.spec}' is attached to a model already; call detach() first")
        self._register_parameters(model)

    def synchronize(self, group: Group | None) -> None:
        """Overwrite the model's gradients with the mean of the compressed gradients over a group; collective.

        The model must be attached by `attach_without_hooks`. A missing gradient counts as zeros, so that all ranks send
        messages of the same sizes.
        """
        batches: list[list[nn.Parameter]] = []
        capacity, dtype = 0, None
        for parameter in self._names:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.layout != torch.strided:
                raise ConfigError(f"{self._names[parameter]} has sparse gradients, which compressors do not understand")
            if parameter.numel() > capacity or parameter.grad.dtype != dtype:
                batches.append([])
                capacity, dtype = _BATCH_ELEMENTS, parameter.grad.dtype
            batches[-1].append(parameter)
            capacity -= parameter.numel()
        with torch.no_grad():
            for parameters in batches:
                gradients = [p.grad.reshape(-1) for p in parameters if p.grad is not None]
                slices, start = [], 0
                for p in parameters:
                    slices.append(BucketSlice(p, start, start + p.numel(), row_major_strides(p.shape)))
                    start += p.numel()
                mean = self._synchronize(Bucket(torch.cat(gradients), slices), group).wait()
                for p, slice_ in zip(parameters, slices, strict=True):
                    assert p.grad is not None
                    p.grad.copy_(mean[slice_.start : slice_.stop].view(p.shape))

    def _register_parameters(self, model: nn.Module) -> dict[nn.Parameter, str]:
        """Check the model's trainable parameters, reset the state, and return their names."""
        names = {p: strip_wrappers(name) for name, p in model.named_parameters() if p.requires_grad}
        self._check_parameters(names)
        self._ddp_may_drop = False
        self._names = names
        self._reset()
        return names

    def _reset(self) -> None:
        """Clear the state of the previous model."""
        self._info_factories.clear()

    def detach(self) -> None:
        """See `GradientCompressor.detach`."""
        if self._hook_slot is not None:
            self._hook_slot.release()
        for handle in self._handles:
            handle.remove()
        self._hook_slot, self._handles = None, []
        self._info_factories.clear()

    def take(self) -> dict[nn.Parameter, GradientInfo]:
        """See `GradientCompressor.take`."""
        factories, self._info_factories = self._info_factories, {}
        infos = {parameter: create() for parameter, create in factories.items() if parameter.grad is not None}
        return {parameter: info for parameter, info in infos.items() if info is not None}

    def _check_parameters(self, names: dict[nn.Parameter, str]) -> None:
        """Raise a `ConfigError` that names the parameters whose gradients cannot be compressed."""
        unsupported = [
            f"{name} is {'a DTensor' if isinstance(p, DTensor) else p.dtype}" for p, name in names.items()
            if isinstance(p, DTensor) or not p.is_floating_point()
        ]
        if unsupported:
            raise ConfigError(
                f"compressor '{self.spec}' needs whole real floating-point parameters, but {'; '.join(unsupported[:8])}"
            )

    def _compress_parameter(self, parameter: nn.Parameter) -> None:
        """Compress the gradient of one parameter, without communication."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ConfigError(f"{self._names[parameter]} has sparse gradients, which compressors do not understand")
        strides = memory_strides(parameter)
        if gradient.stride() != strides:
            converted = torch.empty_strided(parameter.shape, strides, dtype=gradient.dtype, device=gradient.device)
            parameter.grad = gradient = converted.copy_(gradient)
        slice_ = BucketSlice(parameter, 0, gradient.numel(), strides)
        with torch.no_grad():
            self._synchronize(Bucket(flatten_in_memory_order(gradient), [slice_]), None).wait()


def completed_future(value: Tensor) -> Future[Tensor]:
    """Return a completed future."""
    future: Future[Tensor] = Future(devices=[value.device]) if value.is_cuda else Future()
    future.set_result(value)
    return future


def start_all_gather(out: Tensor, tensor: Tensor, group: Group) -> dist.Work:
    """Start to gather flat tensors of equal length into `out`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # by the version of torch
    return gather(out, tensor, group=group, async_op=True)


def record_current_stream(tensor: Tensor) -> Tensor:
    """Record the current stream for a tensor of a future's callback, so that its memory is not reused too early."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


@cache
def row_major_strides(sizes: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(sizes, device="meta").stride()


def memory_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides that DDP gives a gradient: the parameter's own if it is dense, else row-major strides."""
    return _memory_strides(parameter.shape, parameter.stride())


@cache
def _memory_strides(sizes: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    like = torch.empty_like(torch.empty_strided(sizes, strides, device="meta"))
    return strides if like.stride() == strides else row_major_strides(sizes)


def flatten_in_memory_order(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))
