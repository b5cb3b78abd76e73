"""Tensors on their way to the host: the only code here that knows of CUDA streams, and the arithmetic after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

BLOCK_ELEMENTS = 1 << 17
"""Elements worked on at a time: several passes find them in the cache, and temporaries cost no new pages."""

Arrivals = tuple[tuple[torch.device, torch.cuda.Event], ...]
"""What to wait for before copies are read; empty where they were made at once."""
NOTHING: Arrivals = ()
Streams = dict[torch.device, torch.cuda.Stream]
"""One stream for copies per CUDA device, made on first use."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, detached: of a DTensor the local shard. No communication is started."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # then it takes no part in autograd and costs next to nothing
            tensor = tensor.to_local()
    pending = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor, whose communication is under way
    return (tensor if pending is None else pending()).detach()


def laid_out_alike(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the local parts of both are the same part of the whole; a partial gradient is part of nothing."""
    if not isinstance(gradient, DTensor):
        return True
    theirs = gradient.placements
    ours = parameter.placements if isinstance(parameter, DTensor) else theirs
    sizes = gradient.device_mesh.shape
    return len(ours) == len(theirs) and all(
        size == 1 or (one == other and not other.is_partial())
        for size, one, other in zip(sizes, ours, theirs, strict=True)
    )


def host_like(source: torch.Tensor) -> torch.Tensor:
    """Room for a copy: shape, dtype and, where dense, strides of `source`; pinned if `source` is on CUDA.

    Other strides would make CUDA gather the elements in a buffer of its own first.
    """
    return torch.empty_like(source, device="cpu", pin_memory=source.device.type == "cuda")


def copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: Streams) -> Arrivals:
    """Copy each (source, target on the host). From CUDA: after what the current stream has queued, on another one.

    Sources may be freed at once, but must not be written to until `wait` or the events say so.
    """
    devices = {source.device: None for source, _ in pairs}
    arrivals = []
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
                source.record_stream(stream)  # the allocator does not give its memory away before the copy
            arrivals.append((device, stream.record_event()))
    return tuple(arrivals)


def wait_on_device(arrivals: Iterable[tuple[torch.device, torch.cuda.Event]]) -> None:
    """Make what is queued on the current streams from now on wait for the copies; the host goes on."""
    for device, event in arrivals:
        torch.cuda.current_stream(device).wait_event(event)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor as a dense one in float32 on the host (waits for CUDA); others as they are."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor.to(device="cpu", dtype=torch.float32).to_dense()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite in float32; host tensors of any float dtype."""
    for block in tensor.contiguous().view(-1).split(BLOCK_ELEMENTS):
        values = block.float()
        # A finite sum has finite terms; that of large terms may overflow.
        if not math.isfinite(float(values.sum())) and not bool(values.isfinite().all()):
            return False
    return True


def blend(average: torch.Tensor, new: torch.Tensor, weight: float) -> None:
    """``average = weight * new + (1 - weight) * average``, in place.

    Args:
        average: float32, host, contiguous.
        new: host, any float dtype and strides, the same shape.
        weight: in [0, 1].
    """
    blocks = zip(average.view(-1).split(BLOCK_ELEMENTS), new.contiguous().view(-1).split(BLOCK_ELEMENTS), strict=True)
    for old, block in blocks:
        old.mul_(1.0 - weight).add_(block.float(), alpha=weight)


def sum_of_squares(tensor: torch.Tensor) -> float:
    """In float64, of a contiguous host tensor."""
    return sum((float(block.double().square().sum()) for block in tensor.view(-1).split(BLOCK_ELEMENTS)), 0.0)
