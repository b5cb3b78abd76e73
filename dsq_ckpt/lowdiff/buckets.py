"""Gradients as compressors see them: flat buckets, from DDP's communication hook or from hooks of parameters.

Everything is kept by parameter and in memory order. DDP rebuilds its buckets after the first iteration, so nothing may
depend on a bucket's index; and a bucket holds a gradient in the memory format of its parameter, so a channels_last
parameter needs no copy. Row-major indices are made for traces alone.
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

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.contract import Compressor, GradientInfo
from dsq_ckpt.lowdiff.ddp import CommHookSlot, distributed, take_seat
from dsq_ckpt.quantization.groups import unwrapped

Group = dist.ProcessGroup
_BUCKET = 1 << 23
"""Elements that `synchronize` compresses together, but for larger parameters."""


class Part(NamedTuple):
    """The place of one parameter's gradient in a bucket."""

    parameter: nn.Parameter
    start: int
    stop: int
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many there are; none is possible."""
        return self.stop - self.start

    def row_major(self, places: Tensor) -> Tensor:
        """Row-major indices of elements of the parameter, from their places in its memory; both int64."""
        sizes = self.parameter.shape
        standard = row_major_strides(sizes)
        if self.strides == standard:
            return places
        indices = torch.zeros_like(places)
        for size, stride, row in zip(sizes, self.strides, standard, strict=True):
            if size > 1:  # any stride is allowed for one element, 0 too
                indices += places // stride % size * row
        return indices


@dataclass(frozen=True)
class Bucket:
    """Gradients to be compressed together.

    Attributes:
        flat: 1-D, of the gradients' dtype; to be overwritten with the synchronized gradient.
        parts: where the parameters lie in it.
        source: what DDP gave, None outside of DDP.
    """

    flat: Tensor
    parts: Sequence[Part]
    source: dist.GradBucket | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for buckets of the same parameters in the same order."""
        return tuple(id(part.parameter) for part in self.parts)

    def of(self, part: Part) -> Tensor:
        """The gradient of one parameter, flat."""
        return self.flat[part.start : part.stop]


Left = Callable[[], GradientInfo | None]
"""Makes a trace when it is asked for: few steps of a run that accumulates gradients need one."""


class Hooked(Compressor):
    """Registers the hooks and collects what they leave; `_synchronize` is left to the kinds."""

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self._names: dict[nn.Parameter, str] = {}
        self._left: dict[nn.Parameter, Left] = {}
        self._handles: list[RemovableHandle] = []
        self._seat: CommHookSlot | None = None
        self._skips = False
        """Whether DDP drops the gradients of parameters that no rank used, residuals that were sent included."""

    @abstractmethod
    def _synchronize(self, bucket: Bucket, group: Group | None) -> Future[Tensor]:
        """Overwrite `bucket.flat` with the mean over the group of what is left of it by compression.

        Called in the same order on all ranks. Entries of `_left` must be there when the future is done.

        Args:
            bucket: gradients of this rank, not divided by the world size.
            group: None where there is no other rank.
        """

    def attach(self, model: nn.Module) -> None:
        """See `Compressor.attach`."""
        if self._seat is not None or self._handles:
            raise ConfigError(f"compressor '{self.spec}' is attached to a model already; call detach() first")
        under = distributed(model, "the compressor")
        names = self._adopt(model if under is None else under)
        if under is None:
            self._handles = [p.register_post_accumulate_grad_hook(self._compress) for p in names]
        else:
            self._seat = take_seat(under, self, "leave out the other one")
            self._skips = bool(under.find_unused_parameters or under.static_graph)

    @property
    def tenant(self) -> str:
        """See `ddp.HookOwner`."""
        return f"compressor '{self.spec}'"

    def on_bucket(self, bucket: dist.GradBucket, group: Group) -> Future[Tensor]:
        """See `ddp.HookOwner`."""
        flat = bucket.buffer()
        parameters = [cast(nn.Parameter, p) for p in bucket.parameters()]
        if flat.layout != torch.strided:
            names = ", ".join(self._names[p] for p in parameters)
            raise ConfigError(f"{names} has sparse gradients, which compressors do not understand")
        parts, start = [], 0
        for p in parameters:  # bucket.gradients() are row-major whatever the memory format is
            parts.append(Part(p, start, start + p.numel(), memory_strides(p)))
            start += p.numel()
        with torch.no_grad():
            return self._synchronize(Bucket(flat, parts, bucket), group if group.size() > 1 else None)

    def adopt(self, model: nn.Module) -> None:
        """As `attach`, without hooks: who averages the gradients calls `synchronize` instead of averaging them."""
        if self._seat is not None or self._handles:
            raise ConfigError(f"compressor '{self.spec}' is attached to a model already; call detach() first")
        self._adopt(model)

    def synchronize(self, group: Group | None) -> None:
        """Overwrite the gradients of an adopted model with the mean over a group of what compression leaves of them.

        Parameters without a gradient count as zeros, so that all ranks send alike; collective.
        """
        dealt: list[list[nn.Parameter]] = []
        room, dtype = 0, None
        for parameter in self._names:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.layout != torch.strided:
                raise ConfigError(f"{self._names[parameter]} has sparse gradients, which compressors do not understand")
            if parameter.numel() > room or parameter.grad.dtype != dtype:
                dealt.append([])
                room, dtype = _BUCKET, parameter.grad.dtype
            dealt[-1].append(parameter)
            room -= parameter.numel()
        with torch.no_grad():
            for parameters in dealt:
                gradients = [p.grad.reshape(-1) for p in parameters if p.grad is not None]
                parts, start = [], 0
                for p in parameters:
                    parts.append(Part(p, start, start + p.numel(), row_major_strides(p.shape)))
                    start += p.numel()
                mean = self._synchronize(Bucket(torch.cat(gradients), parts), group).wait()
                for p, part in zip(parameters, parts, strict=True):
                    assert p.grad is not None
                    p.grad.copy_(mean[part.start : part.stop].view(p.shape))

    def _adopt(self, model: nn.Module) -> dict[nn.Parameter, str]:
        names = {p: unwrapped(name) for name, p in model.named_parameters() if p.requires_grad}
        self._check(names)
        self._skips = False
        self._names = names
        self._begin()
        return names

    def _begin(self) -> None:
        """Forget what belonged to an earlier model."""
        self._left.clear()

    def detach(self) -> None:
        """See `Compressor.detach`."""
        if self._seat is not None:
            self._seat.leave()
        for handle in self._handles:
            handle.remove()
        self._seat, self._handles = None, []
        self._left.clear()

    def take(self) -> dict[nn.Parameter, GradientInfo]:
        """See `Compressor.take`."""
        left, self._left = self._left, {}
        made = {parameter: make() for parameter, make in left.items() if parameter.grad is not None}
        return {parameter: trace for parameter, trace in made.items() if trace is not None}

    def _check(self, names: dict[nn.Parameter, str]) -> None:
        """Raise `ConfigError` with all parameters whose gradients cannot be compressed."""
        wrong = [
            f"{name} is {'a DTensor' if isinstance(p, DTensor) else p.dtype}" for p, name in names.items()
            if isinstance(p, DTensor) or not p.is_floating_point()
        ]
        if wrong:
            raise ConfigError(
                f"compressor '{self.spec}' needs whole real floating-point parameters, but {'; '.join(wrong[:8])}"
            )

    def _compress(self, parameter: nn.Parameter) -> None:
        """Compress a gradient where no other rank has a part in it."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ConfigError(f"{self._names[parameter]} has sparse gradients, which compressors do not understand")
        strides = memory_strides(parameter)
        if gradient.stride() != strides:
            laid_out = torch.empty_strided(parameter.shape, strides, dtype=gradient.dtype, device=gradient.device)
            parameter.grad = gradient = laid_out.copy_(gradient)
        part = Part(parameter, 0, gradient.numel(), strides)
        with torch.no_grad():
            self._synchronize(Bucket(in_memory(gradient), [part]), None).wait()


def ready(value: Tensor) -> Future[Tensor]:
    """A future that is done."""
    future: Future[Tensor] = Future(devices=[value.device]) if value.is_cuda else Future()
    future.set_result(value)
    return future


def all_gather(out: Tensor, mine: Tensor, group: Group) -> dist.Work:
    """Start to gather flat tensors of one length into `out`; the function's name depends on the version of torch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, mine, group=group, async_op=True)


def on_this_stream(tensor: Tensor) -> Tensor:
    """Tell the allocator that a tensor made in a future's callback is read on the caller's stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


@cache
def row_major_strides(sizes: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return torch.empty(sizes, device="meta").stride()


def memory_strides(parameter: Tensor) -> tuple[int, ...]:
    """Strides that DDP gives the gradient of a parameter: its own where it has no holes, else row-major ones."""
    return _memory_strides(parameter.shape, parameter.stride())


@cache
def _memory_strides(sizes: torch.Size, own: tuple[int, ...]) -> tuple[int, ...]:
    like = torch.empty_like(torch.empty_strided(sizes, own, device="meta"))
    return own if like.stride() == own else row_major_strides(sizes)


def in_memory(tensor: Tensor) -> Tensor:
    """A tensor without holes as it lies in memory, 1-D; shares it."""
    return tensor.as_strided((tensor.numel(),), (1,))
