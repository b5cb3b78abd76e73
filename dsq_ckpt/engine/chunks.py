"""Conversion of a `SaveItem` to a chunk, and of a chunk to its codes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from dsq_ckpt.core.arrays import F32
from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.engine.chain import ParentCheckpoint, ParentRecord
from dsq_ckpt.engine.history import ChunkCache
from dsq_ckpt.engine.local_state import SaveItem
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.quantization import device
from dsq_ckpt.quantization.analysis import Analysis, GlobalSketch
from dsq_ckpt.quantization.chunk import (
    Chunk,
    ChunkKey,
    CodeSource,
    QuantizingChunk,
    all_finite,
    flat_values,
    is_near_parent,
)
from dsq_ckpt.quantization.device import transfer
from dsq_ckpt.quantization.device.coding import DeviceChunk, DeviceTableCache
from dsq_ckpt.quantization.device.passes import parent_on_device
from dsq_ckpt.quantization.layout import Layout
from dsq_ckpt.quantization.matrix_scales import MatrixScales
from dsq_ckpt.quantization.moments import Frame, ScaledFrame, UpdateFrame
from dsq_ckpt.quantization.plan import QuantizationPlan

_Load = Callable[[], torch.Tensor]


@dataclass
class QuantizedChunk:
    """A chunk ready to be entropy-coded: its codes, and the record of the parent that they are coded against."""

    codes: CodeSource
    parent_record: ParentRecord | None


class ChunkLoader:
    """A loader of the chunks of one rank, each with its codes or values in the parent checkpoint.

    Args:
        parent: the parent checkpoint; None for a keyframe.
        gradients: averaged gradients of weights, by chunk.
        residual: whether differences to the parent's values are coded.
        workers: threads.

    Attributes:
        parent_records: the record of the parent that a chunk is coded against, by chunk loaded so far.
    """

    def __init__(
        self, parent: ParentCheckpoint | None, gradients: Mapping[ChunkKey, torch.Tensor], residual: bool,
        workers: Workers,
    ) -> None:
        self._parent, self._gradients, self._residual, self._workers = parent, gradients, residual, workers
        self.parent_records: dict[ChunkKey, ParentRecord] = {}

    def load(self, item: SaveItem) -> Chunk | None:
        """Return the chunk of an item.

        Return None if differences are coded and the chunk is stored exactly, because the parent has no values for it or
        its values are too far off.
        """
        assert item.config is not None
        tensor = item.load()
        chunk = Chunk(
            item.key, tensor, item.group, item.config.refinement_bits, gradient=self._gradients.get(item.key),
            on_device=item.on_device, frame=_make_frame(item, tensor, self._workers),
        )
        return self._attach_parent_values(chunk) if self._residual else self._attach_parent_codes(chunk)

    def _attach_parent_codes(self, chunk: Chunk) -> Chunk:
        parent = self._parent
        previous = None if parent is None else parent.read_codes(chunk.key, chunk.group)
        if parent is None or previous is None:
            return chunk
        self.parent_records[chunk.key] = previous[0]
        if device.is_supported(chunk):
            with_parent = replace(chunk, parent=previous[1], device_codes=parent.get_device_codes(chunk.key))
            with suppress(torch.OutOfMemoryError):
                return replace(with_parent, device_codes=parent_on_device(with_parent))
        return replace(chunk, parent=previous[1], on_device=False)

    def _attach_parent_values(self, chunk: Chunk) -> Chunk | None:
        parent_values = None if self._parent is None else self._parent.read_values(chunk.key)
        if parent_values is not None:
            difference = replace(chunk, base_values=parent_values[1])
            if is_near_parent(difference):
                self.parent_records[chunk.key] = parent_values[0]
                return difference
        return None if all_finite(chunk) else chunk  # the global sketch reports NaN and Inf


def copy_small_to_host(items: Iterable[SaveItem]) -> list[SaveItem]:
    """Return items with small chunks copied from device memory to the host, with a single synchronization.

    Launching kernels for a small chunk takes longer than quantizing it on the host. At most `QUEUED_TOGETHER` bytes are
    copied; the other chunks stay on the device.
    """
    items, room = list(items), transfer.QUEUED_TOGETHER
    if not device.may_hold_tensors():
        return items
    loaded: dict[_Load, torch.Tensor] = {}
    small: dict[_Load, None] = {}
    for item in items:
        if 0 < item.key.elements < device.HOST_BELOW:
            tensor = loaded[item.load] = item.load().detach()
            if tensor.device.type in device.DEVICES and tensor.nbytes <= room:
                small[item.load] = None
                room -= tensor.nbytes
    loaded |= zip(small, transfer.host_copies([loaded[load] for load in small]), strict=True)
    loads: dict[_Load, _Load] = {load: partial(_return, tensor) for load, tensor in loaded.items()}
    return [_replace_loads(item, loads, item.load in small) for item in items]


def _replace_loads(item: SaveItem, loads: Mapping[_Load, _Load], on_host: bool) -> SaveItem:
    second = item.second_moment
    if second is not None:
        second = replace(second, load=loads.get(second.load, second.load))
    on_device = item.on_device and not on_host  # tests use the host as a device
    return replace(item, load=loads.get(item.load, item.load), on_device=on_device, second_moment=second)


def _return(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _make_frame(item: SaveItem, tensor: torch.Tensor, workers: Workers) -> Frame | None:
    """Return the coordinates in which an item is quantized; None: its own values.

    Raises:
        SaveFailed: the chunk of its second moments has another shape.
    """
    if item.config is not None and item.config.codebook.coordinates == "octaves":
        return ScaledFrame(MatrixScales.fit(tensor, workers))
    if item.second_moment is None:
        return None
    squares = item.second_moment.load().detach()
    if squares.shape != tensor.shape:
        raise SaveFailed(
            f"'{item.key.fqn}' has a chunk of shape {tuple(tensor.shape)}, and '{item.second_moment.fqn}', which "
            f"measures it, one of {tuple(squares.shape)}; save both in the same layout, or store exp_avg exactly"
        )
    squares = squares.to(tensor.device).contiguous().view(-1)
    return UpdateFrame(item.second_moment.fqn, squares)


def quantize_lazily(sketches: GlobalSketch, loader: ChunkLoader, plan: QuantizationPlan) -> Iterator[QuantizedChunk]:
    """Yield quantized chunks one by one; each chunk and its previous codes on a device are released afterwards."""
    fitted = plan.analysis.fitted
    chunks = deque(chunk for chunk in sketches.chunks if chunk.group in fitted)
    parent_records, tables = loader.parent_records, DeviceTableCache()

    def generate() -> Iterator[QuantizedChunk]:
        while chunks:
            run_pending_handlers()
            chunk = chunks.popleft()
            bits, compensation = fitted[chunk.group].refinement_bits, plan.compensations.get(chunk.key)
            if bits != chunk.refinement_bits or compensation is not None:
                chunk = replace(chunk, refinement_bits=bits, compensation=compensation)
            yield _quantize_chunk(chunk, parent_records, plan.analysis, tables)

    return generate()


def _quantize_chunk(
    chunk: Chunk, parent_records: Mapping[ChunkKey, ParentRecord], analysis: Analysis, tables: DeviceTableCache
) -> QuantizedChunk:
    """Return the codes of a chunk: computed on its device, or lazily as they are written."""
    fitted = analysis.fitted[chunk.group]
    source: CodeSource | None = None
    if device.is_supported(chunk) and fitted.partition_turn is None:
        with suppress(torch.OutOfMemoryError):
            source = DeviceChunk(chunk, tables.get(fitted, chunk.tensor.device))
    source = source or QuantizingChunk(chunk, fitted)
    coded = source.parent is not None or chunk.base_values is not None
    return QuantizedChunk(source, parent_records.get(chunk.key) if coded else None)


def cache_chunk(cache: ChunkCache, source: CodeSource, deltas: bool) -> None:
    """Cache the codes or values of a chunk for the next save. Call it once all its blocks are written.

    Args:
        cache: cache of the checkpoint.
        source: codes of the chunk.
        deltas: whether the next save may be a delta.
    """
    if source.values is None:
        cache.codes[source.key] = source.codes
    else:
        cache.values[source.key] = source.values
    if isinstance(source, DeviceChunk) and source.device_codes is not None and deltas:
        cache.device_codes[source.key] = source.device_codes


def copy_exact_values(exact: Iterable[SaveItem], layout: Layout) -> dict[ChunkKey, F32]:
    """Return copies of the values of exact chunks to which the next save takes differences; float32, flat.

    Copies are needed since training changes the tensors, and staged ones may move to shared memory under a view.
    """
    selected = (item for item in exact if layout.residual and item.key.fqn in layout.tensors)
    return {item.key: flat_values(item.load()).copy() for item in selected}
