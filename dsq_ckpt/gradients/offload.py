"""Asynchronous copies of tensors to the host by CUDA streams, and arithmetic on the copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

BLOCK_ELEMENTS = 1 << 17
"""Elements per block, such that several passes stay in the cache and temporaries need no new pages."""

CopyEvents = tuple[tuple[torch.device, torch.cuda.Event], ...]
"""Events to wait for before copies are read; empty for synchronous copies."""
NO_EVENTS: CopyEvents = ()
Streams = dict[torch.device, torch.cuda.Stream]
"""One stream for copies per CUDA device, made on first use."""


def get_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's detached part of a tensor, the local shard of a DTensor, without starting communication."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # outside of autograd the call is cheap
            tensor = tensor.to_local()
    pending = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor, whose communication is under way
    return (tensor if pending is None else pending()).detach()


def has_same_layout(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether the local shards of both tensors cover the same elements; False for a partial gradient."""
    if not isinstance(gradient, DTensor):
        return True
    of_gradient = gradient.placements
    of_parameter = parameter.placements if isinstance(parameter, DTensor) else of_gradient
    sizes = gradient.device_mesh.shape
    return len(of_parameter) == len(of_gradient) and all(
        size == 1 or (one == other and not other.is_partial())
        for size, one, other in zip(sizes, of_parameter, of_gradient, strict=True)
    )


def allocate_host_like(source: torch.Tensor) -> torch.Tensor:
    """Allocate a host tensor with the shape, dtype and, if dense, strides of `source`, pinned if `source` is on CUDA.

    Other strides would make CUDA gather the elements in a buffer of its own first.
    """
    return torch.empty_like(source, device="cpu", pin_memory=source.device.type == "cuda")


def copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: Streams) -> CopyEvents:
    """Copy each source to its host target; from CUDA on a separate stream, after the current stream's queued work.

    Sources may be freed at once, but must not be written until the events have completed.
    """
    devices = {source.device: None for source, _ in pairs}
    events = []
    for device in devices:
        of_device = [pair for pair in pairs if pair[0].device == device]
        if device.type != "cuda":
            for source, target in of_device:
                target.copy_(source)
            continue
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        stream = streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for source, target in of_device:
                target.copy_(source, non_blocking=True)
                source.record_stream(stream)  # the allocator keeps the memory until the copy is done
            events.append((device, stream.record_event()))
    return tuple(events)


def wait_on_device(events: Iterable[tuple[torch.device, torch.cuda.Event]]) -> None:
    """Make later work on the current streams wait for the copies, without blocking the host."""
    for device, event in events:
        torch.cuda.current_stream(device).wait_event(event)


def to_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a sparse tensor to a dense float32 host tensor (waits for CUDA); return others unchanged."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor.to(device="cpu", dtype=torch.float32).to_dense()


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements of a host tensor of any float dtype are finite in float32."""
    for block in tensor.contiguous().view(-1).split(BLOCK_ELEMENTS):
        values = block.float()
        # A finite sum has finite terms; a sum of large terms may overflow.
        if not math.isfinite(float(values.sum())) and not bool(values.isfinite().all()):
            return False
    return True


def update_average(average: torch.Tensor, new: torch.Tensor, weight: float) -> None:
    """Set `average = weight * new + (1 - weight) * average`, in place.

    Args:
        average: float32, host, contiguous.
        new: host, any float dtype and strides, the same shape.
        weight: in [0, 1].
    """
    blocks = zip(average.view(-1).split(BLOCK_ELEMENTS), new.contiguous().view(-1).split(BLOCK_ELEMENTS), strict=True)
    for old, block in blocks:
        old.mul_(1.0 - weight).add_(block.float(), alpha=weight)


def sum_of_squares(tensor: torch.Tensor) -> float:
    """Return the sum of squares of a contiguous host tensor, in float64."""
    return sum((float(block.double().square().sum()) for block in tensor.view(-1).split(BLOCK_ELEMENTS)), 0.0)
