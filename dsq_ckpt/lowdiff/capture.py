"""Capture of the gradients that the optimizer is about to use, into shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.kernels.scan import gather_elements
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.compressors import GradientInfo
from dsq_ckpt.lowdiff.encoding import scales_from_probes
from dsq_ckpt.lowdiff.train_state import ParameterEntry, TrainState, dtype_name
from dsq_ckpt.lowdiff.worker_client import ArenaLayout, WorkerClient, nbytes


class CapturedStep(NamedTuple):
    """A step whose gradients are in shared memory; states and buffers after the step are added later.

    Attributes:
        message: message to the checkpointing process that describes the gradients.
        slot: number of the slot that holds the gradients.
        buffers_at: offset of the model's buffers in the slot, in bytes.
        needs_mapping: True if the checkpointing process has not mapped the slot's memory yet.
        copy_event: event after the copies from a GPU into the slot; None without such copies.
    """

    message: dict[str, Any]
    slot: int
    buffers_at: int
    needs_mapping: bool
    copy_event: torch.cuda.Event | None = None


def capture_gradients(
    train_state: TrainState, entries: Sequence[ParameterEntry], infos: Mapping[nn.Parameter, GradientInfo],
    dense_only: bool, buffer_bytes: int, client: WorkerClient,
) -> CapturedStep:
    """Copy this rank's share of the gradients into a free slot. Wait for a slot if none is free.

    Args:
        train_state: model and optimizer.
        entries: parameters that this rank logs.
        infos: properties of the gradients after compression.
        dense_only: log dense gradients, even where `infos` has a support.
        buffer_bytes: bytes to reserve for buffers of the model.
        client: client of the checkpointing process.

    Raises:
        ConfigError: a gradient is sparse.
        ProcessGone: the checkpointing process ended or failed.
    """
    layout = ArenaLayout()
    sparse: dict[torch.dtype, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
    dense: list[tuple[dict[str, Any], torch.Tensor]] = []
    probes = []
    halves = set()
    for number, entry in enumerate(entries):
        parameter = train_state.parameters[entry.name]
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of '{entry.name}' is sparse ({gradient.layout}), which is not logged; make the layer "
                "with sparse=False"
            )
        gradient = gradient.detach()
        info = infos.get(parameter)
        if info is not None and info.support is not None and not dense_only:
            sparse.setdefault(gradient.dtype, []).append((number, gradient, info.support))
            continue
        dense_fields: dict[str, Any] = {"param": number, "dtype": dtype_name(gradient.dtype)}
        if info is not None and info.levels is not None:
            dense_fields["levels"] = info.levels.tolist()
        if info is not None and info.probe is not None:
            indices, before = info.probe
            probes.append((before, gradient.reshape(-1).index_select(0, indices.to(gradient.device))))
        if info is not None and info.dtype is not None:
            halves.add(dtype_name(info.dtype))
        dense.append((dense_fields | {"at": layout.add(nbytes(gradient))}, gradient))
    reserved = [(_reserve_sparse(layout, dtype, gradients), gradients) for dtype, gradients in sparse.items()]
    buffers_at = layout.add(buffer_bytes)
    slot = client.acquire_slot()
    arena, needs_mapping = client.ensure_arena(slot, layout.size)
    devices = {parameter.device for parameter in train_state.parameters.values() if parameter.device.type == "cuda"}
    # Gradients on a GPU are packed there and copied to the host asynchronously, in one copy. An IPC handle would need a
    # CUDA context in the checkpointing process, which takes some hundred MB of the GPU's memory on every rank.
    # Buffers are written into the slot later, behind the range of this copy.
    target = _allocate_staging(buffers_at, devices.pop()) if len(devices) == 1 else None
    for fields, gradients in reserved:
        _gather_sparse(target or arena, fields, gradients)
    for dense_fields, gradient in dense:
        (target or arena).view(dense_fields["at"], tuple(gradient.shape), gradient.dtype).copy_(gradient)
    hints = {
        "scales": scales_from_probes((before.cpu().float(), after.cpu().float()) for before, after in probes),
        "half": halves.pop() if len(halves) == 1 else None,
    }
    copy_event = None if target is None else target.copy_to(arena)
    message = {"sparse": [fields for fields, _ in reserved], "dense": [fields for fields, _ in dense], "hints": hints}
    return CapturedStep(message, slot, buffers_at, needs_mapping, copy_event)


def _reserve_sparse(
    layout: ArenaLayout, dtype: torch.dtype, gradients: Sequence[tuple[int, torch.Tensor, torch.Tensor]]
) -> dict[str, Any]:
    """Reserve memory for sparse gradients of one dtype; return their description for the checkpointing process.

    Args:
        layout: layout of the slot.
        dtype: dtype of the gradients.
        gradients: number of the parameter, gradient and support of each.
    """
    counts = [support.numel() for _, _, support in gradients]
    return {
        "dtype": dtype_name(dtype), "params": [number for number, _, _ in gradients], "counts": counts,
        "places": layout.add(8 * sum(counts)), "nonzero": layout.add(8 * len(gradients)),
        "values": layout.add(dtype.itemsize * sum(counts)),
    }


def _gather_sparse(
    target: _TensorMemory, fields: Mapping[str, Any], gradients: Sequence[tuple[int, torch.Tensor, torch.Tensor]]
) -> None:
    """Copy supports, values and numbers of non-zero elements into the memory reserved by `_reserve_sparse`."""
    counts: list[int] = fields["counts"]
    indices = target.view(fields["places"], (sum(counts),), torch.int64)
    torch.cat([support.to(indices.device) for _, _, support in gradients], out=indices)
    values = target.view(fields["values"], (sum(counts),), gradients[0][1].dtype)
    nonzero = target.view(fields["nonzero"], (len(gradients),), torch.int64)
    gather_elements([gradient for _, gradient, _ in gradients], indices, counts, values, nonzero)


class _TensorMemory(Protocol):
    """Memory in which tensors are placed at byte offsets."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


class _DeviceStaging:
    """A staging buffer for a slot in the memory of a GPU."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor at `offset` bytes; it shares the memory."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[offset : offset + size].view(dtype).view(shape)

    def copy_to(self, arena: Arena) -> torch.cuda.Event:
        """Copy the memory to the host on a separate stream, after the current stream's work; return the end event."""
        device = self._memory.device
        arena.pin(device)
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            arena.tensor[: self._memory.numel()].copy_(self._memory, non_blocking=True)
            copy_event = torch.cuda.Event()
            copy_event.record(stream)
        self._memory.record_stream(stream)
        return copy_event


def _allocate_staging(size: int, device: torch.device) -> _DeviceStaging | None:
    """Allocate memory of a GPU; return None if there is not enough. Gradients are then copied one by one."""
    try:
        return _DeviceStaging(size, device)
    except torch.cuda.OutOfMemoryError:
        return None


def copy_buffers(
    buffers: Iterable[tuple[str, torch.Tensor]], client: WorkerClient, slot: int, start: int
) -> tuple[list[list[Any]], bool] | None:
    """Copy buffers of the model into a slot, behind the gradients.

    Returns:
        Name, dtype, shape and offset of each buffer, and whether the checkpointing process must map the slot's memory;
        None if the buffers have grown and do not fit beside the gradients.
    """
    layout = ArenaLayout()
    layout.size = start
    placed = [(name, buffer, layout.add(nbytes(buffer))) for name, buffer in buffers]
    if start and layout.size > client.arena(slot).size:
        return None
    arena, needs_mapping = client.ensure_arena(slot, layout.size)
    for _, buffer, offset in placed:
        arena.view(offset, tuple(buffer.shape), buffer.dtype).copy_(buffer.detach())
    described = [[name, dtype_name(buffer.dtype), list(buffer.shape), offset] for name, buffer, offset in placed]
    return described, needs_mapping

