"""Gradients as the optimizer is about to use them, put into shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.kernels.scan import gather
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.compressors import GradientInfo
from dsq_ckpt.lowdiff.encoding import scales_from
from dsq_ckpt.lowdiff.train_state import Entry, TrainState, dtype_name
from dsq_ckpt.lowdiff.worker_client import Layout, WorkerClient, nbytes


class Captured(NamedTuple):
    """A step that is in shared memory, but for what it leaves behind.

    Attributes:
        message: for the checkpointing process, with what was captured.
        slot: where it is.
        buffers_at: where buffers of the model go in it.
        new: the slot's memory is new to the process.
        copied: what a GPU still has to write into the slot is there when this has happened.
    """

    message: dict[str, Any]
    slot: int
    buffers_at: int
    new: bool
    copied: torch.cuda.Event | None = None


def capture(
    subject: TrainState, own: Sequence[Entry], traces: Mapping[nn.Parameter, GradientInfo], whole: bool,
    room: int, handle: WorkerClient,
) -> Captured:
    """Put this rank's share of the gradients into a free slot, waiting for one.

    Args:
        subject: whose parameters have the gradients.
        own: the parameters that this rank logs.
        traces: what compression knows of them.
        whole: log gradients whole, whatever compression knows.
        room: bytes for buffers of the model.
        handle: of the checkpointing process.

    Raises:
        ConfigError: a gradient is sparse.
        ProcessGone: the checkpointing process is.
    """
    layout = Layout()
    sparse: dict[torch.dtype, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
    dense: list[tuple[dict[str, Any], torch.Tensor]] = []
    witnesses = []
    halves = set()
    for place, entry in enumerate(own):
        parameter = subject.parameters[entry.name]
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of '{entry.name}' is sparse ({gradient.layout}), which is not logged; make the layer "
                "with sparse=False"
            )
        gradient = gradient.detach()
        trace = traces.get(parameter)
        if trace is not None and trace.support is not None and not whole:
            sparse.setdefault(gradient.dtype, []).append((place, gradient, trace.support))
            continue
        part: dict[str, Any] = {"param": place, "dtype": dtype_name(gradient.dtype)}
        if trace is not None and trace.levels is not None:
            part["levels"] = trace.levels.tolist()
        if trace is not None and trace.witness is not None:
            places, before = trace.witness
            witnesses.append((before, gradient.reshape(-1).index_select(0, places.to(gradient.device))))
        if trace is not None and trace.dtype is not None:
            halves.add(dtype_name(trace.dtype))
        dense.append((part | {"at": layout.add(nbytes(gradient))}, gradient))
    supported = [(_supported(layout, dtype, found), found) for dtype, found in sparse.items()]
    buffers_at = layout.add(room)
    slot = handle.slot()
    arena, new = handle.room(slot, layout.size)
    devices = {parameter.device for parameter in subject.parameters.values() if parameter.device.type == "cuda"}
    # On a GPU the pieces are put together there, and cross to the host in one copy that nobody waits for here. The
    # checkpointing process could fetch them by an IPC handle; it would need a CUDA context of its own for that, which
    # takes some hundred megabytes of the GPU's memory on every rank.
    # Buffers are put into the slot behind them later, which that copy must not touch.
    target = _on_device(buffers_at, devices.pop()) if len(devices) == 1 else None
    for told, found in supported:
        _gather(target or arena, told, found)
    for part, gradient in dense:
        (target or arena).view(part["at"], tuple(gradient.shape), gradient.dtype).copy_(gradient)
    hints = {
        "scales": scales_from((before.cpu().float(), after.cpu().float()) for before, after in witnesses),
        "half": halves.pop() if len(halves) == 1 else None,
    }
    copied = None if target is None else target.copy_to(arena)
    message = {"sparse": [told for told, _ in supported], "dense": [part for part, _ in dense], "hints": hints}
    return Captured(message, slot, buffers_at, new, copied)


def _supported(
    layout: Layout, dtype: torch.dtype, found: Sequence[tuple[int, torch.Tensor, torch.Tensor]]
) -> dict[str, Any]:
    """Room for gradients of one dtype whose places are known, end to end; what the process is told of it."""
    counts = [support.numel() for _, _, support in found]
    return {
        "dtype": dtype_name(dtype), "params": [place for place, _, _ in found], "counts": counts,
        "places": layout.add(8 * sum(counts)), "nonzero": layout.add(8 * len(found)),
        "values": layout.add(dtype.itemsize * sum(counts)),
    }


def _gather(
    target: _Room, told: Mapping[str, Any], found: Sequence[tuple[int, torch.Tensor, torch.Tensor]]
) -> None:
    counts: list[int] = told["counts"]
    places = target.view(told["places"], (sum(counts),), torch.int64)
    torch.cat([support.to(places.device) for _, _, support in found], out=places)
    values = target.view(told["values"], (sum(counts),), found[0][1].dtype)
    nonzero = target.view(told["nonzero"], (len(found),), torch.int64)
    gather([gradient for _, gradient, _ in found], places, counts, values, nonzero)


class _Room(Protocol):
    """Memory that is filled piece by piece."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


class _OnDevice:
    """What a slot will have, in the memory of a GPU."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in it, at `offset` bytes."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[offset : offset + size].view(dtype).view(shape)

    def copy_to(self, arena: Arena) -> torch.cuda.Event:
        """Copy it to the host on a stream of its own, behind what fills it."""
        arena.pin()
        device = self._memory.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            arena.tensor[: self._memory.numel()].copy_(self._memory, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
        self._memory.record_stream(stream)
        return copied


def _on_device(size: int, device: torch.device) -> _OnDevice | None:
    """Memory of a GPU; None where there is not enough of it, so that pieces go to the host one by one."""
    try:
        return _OnDevice(size, device)
    except torch.cuda.OutOfMemoryError:
        return None


def put_buffers(
    buffers: Iterable[tuple[str, torch.Tensor]], handle: WorkerClient, slot: int, at: int
) -> tuple[list[list[Any]], bool] | None:
    """Put buffers of the model into a slot, behind the gradients, if there are any.

    Returns:
        What the process needs to find them, and whether the slot's memory is new to it. None: they have grown, and do
        not fit beside the gradients.
    """
    layout = Layout()
    layout.size = at
    found = [(name, buffer, layout.add(nbytes(buffer))) for name, buffer in buffers]
    if at and layout.size > handle.arena(slot).size:
        return None
    arena, new = handle.room(slot, layout.size)
    for _, buffer, place in found:
        arena.view(place, tuple(buffer.shape), buffer.dtype).copy_(buffer.detach())
    return [[name, dtype_name(buffer.dtype), list(buffer.shape), place] for name, buffer, place in found], new

