"""Codes of a chunk, quantized on its device and copied to the host in the background."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import F32, I64, Array, Bits, Codes
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.kernels.backend import Backend, Refinement
from dsq_ckpt.kernels.changed_codes import apply_changes
from dsq_ckpt.kernels.dispatch import backend_for
from dsq_ckpt.quantization.chunk import BlockData, Chunk, CodeSource
from dsq_ckpt.quantization.codebook import GroupFit
from dsq_ckpt.quantization.dequantizer import Dequantizer, scale_of
from dsq_ckpt.quantization.device.passes import parent_on_device
from dsq_ckpt.quantization.device.transfer import Transfer, transfer_from
from dsq_ckpt.quantization.step_lengths import StepLengths, sum_step_lengths_on_device, unpack_sums

_PIECE = 1 << 25  # codes packed at a time, to bound the memory of packed codes
_CHANGED = 5 * 8  # bits of an element that is copied by itself: position and code
_PROTECTED = 4  # bytes of a protected value
_SPARE = 1 << 20  # protected values of a chunk for which memory is allocated before their number is known


class _HostResults(NamedTuple):
    """Results on the host; codes are either the changed codes alone, or all codes, packed."""

    changed: tuple[Array, Codes] | None
    packed: Codes
    protected: Bits
    refinement: Codes
    steps: StepLengths | None


class DeviceTables:
    """Tables with which kernels quantize a group, in device memory.

    Args:
        fitted: fit of the group.
        device: device of the tables.
    """

    def __init__(self, fitted: GroupFit, device: torch.device) -> None:
        self.fitted = fitted
        book = fitted.codebook
        self.table = torch.from_numpy(fitted.table).to(device)
        self.low, self.inverse = (torch.from_numpy(array).to(device) for array in fitted.cells)
        self.width = max(1, int(np.flatnonzero(fitted.counts.sum(0)).max(initial=0)).bit_length())
        """Width of the largest code in use, in bits."""
        self._protected = int(fitted.counts[:, book.protected].sum())
        counts = fitted.counts[:-1]  # the last row counts elements without a previous code
        self._changing = 1.0 - float(np.trace(counts)) / max(1, int(counts.sum()))

    def protected_capacity(self, n: int) -> int | None:
        """Return the capacity for protected values of n elements; one chunk may have all those of the group.

        None if there may be so many that it is better to wait for their number.
        """
        max_count = min(n, self._protected)
        return max_count if max_count <= _SPARE else None

    def change_capacity(self, n: int) -> int:
        """Return the capacity for changed codes of n elements; 0 if copying changed codes alone does not pay.

        The capacity is twice the average of the group. If a chunk has more, all its codes are copied.
        """
        max_bytes = n * self.width // _CHANGED
        return min(max_bytes, int(2 * self._changing * n) + 1) if self._changing * n < max_bytes else 0

    def quantize(
        self, backend: Backend, x: torch.Tensor, parent: torch.Tensor | None, exponent: float, bits: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return codes, refinement symbols (with `bits`), uint8[n] each, and the tally for `gather_protected`."""
        fitted, window = self.fitted, self.fitted.window
        codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
        symbols = torch.empty_like(codes) if bits else None
        refinement = None
        if symbols is not None:
            refinement = Refinement(self.low, self.inverse, bits, fitted.codebook.domain == "log", symbols)
        tally = backend.quantize(
            x, parent, fitted.table.shape[0] - 1, window.lo, window.hi, 1.0 / scale_of(exponent), self.table, codes,
            refinement, fitted.codebook.protected,
        )
        return codes, symbols, tally


class DeviceTableCache:
    """Device tables of one save, made on first use."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], DeviceTables] = {}

    def get(self, fitted: GroupFit, device: torch.device) -> DeviceTables:
        """Return the tables of a group on a device."""
        key = id(fitted), device  # DeviceTables keeps `fitted` alive, so that its id is unique
        if key not in self._made:
            self._made[key] = DeviceTables(fitted, device)
        return self._made[key]


class DeviceChunk:
    """A chunk that is quantized on its device; its codes arrive on the host in the background.

    The constructor queues everything that reads the tensor on the current stream. Work queued after it, such as an
    optimizer step, may write to the tensor.

    Attributes:
        device_codes: uint8[n], the codes on the device, as previous codes of the next save.
    """

    def __init__(self, chunk: Chunk, tables: DeviceTables) -> None:
        fitted = tables.fitted
        self.key, self.group, self.exponent = chunk.key, chunk.group, chunk.exponent
        self.refinement_bits = chunk.refinement_bits
        self.parent: Codes | None = chunk.parent if fitted.uses_parent else None
        self.values: F32 | None = None
        self.second_moment = None if chunk.frame is None else chunk.frame.second_moment
        self.scales = None if chunk.frame is None else chunk.frame.scales
        self.codes: Codes = np.empty(chunk.key.elements, np.uint8)
        self._width, self._protected = tables.width, fitted.codebook.protected
        device, x = chunk.tensor.device, chunk.coded_flat()
        backend, transfer, n = backend_for(device), transfer_from(device), chunk.key.elements
        previous = None if self.parent is None else parent_on_device(chunk)
        limit, changes = tables.protected_capacity(n), 0 if previous is None else tables.change_capacity(n)
        size = (n * self.refinement_bits + 7) // 8 + _PROTECTED * (limit or 0) + changes * _CHANGED // 8
        transfer.reserve(size)
        try:
            codes, symbols, tally = tables.quantize(backend, x, previous, self.exponent, self.refinement_bits)
            packed = None if symbols is None else backend.pack(symbols, self.refinement_bits)
            scales, levels = self.scales, fitted.codebook.levels
            lengths = None if scales is None else sum_step_lengths_on_device(x, codes, levels, scales)
            # Allocated before the numbers of elements are known, so that the host does not wait for the device here.
            protected = backend.gather_protected(x, codes, self._protected, tally, capacity=limit)
            # Here and not in the background, so that the previous codes can be freed at once.
            changed = backend.find_changes(codes, previous, changes) if previous is not None and changes else None
        except BaseException:
            transfer.release(size)
            raise
        self.device_codes: torch.Tensor | None = codes

        def bring() -> _HostResults:
            count = int(protected[1])
            if limit is not None and count > limit:
                raise SaveFailed(
                    f"'{self.key.fqn}': {count} elements are protected, but at most {limit} were counted; did it "
                    "change while it was saved?"
                )
            values = transfer.fetch(protected[0][:count]).view(np.uint32)
            result: tuple[Array, Codes] | None = None
            all_codes = np.empty(0, np.uint8)
            if changed is None or (count := int(changed[2])) > changes:
                all_codes = self._fetch_packed(backend, transfer, codes)
            else:
                kind = np.int64 if changed[0].dtype == torch.int64 else np.int32
                result = transfer.fetch(changed[0][:count]).view(kind), transfer.fetch(changed[1][:count])
            refinement = transfer.fetch(packed) if packed is not None else np.empty(0, np.uint8)
            backend.check()
            steps = None if lengths is None or scales is None else unpack_sums(lengths.cpu().numpy(), scales)
            return _HostResults(result, all_codes, values, refinement, steps)

        self._lock = threading.Lock()
        self._positions: I64 | None = None
        self._arrival: Future[_HostResults] | _HostResults | Exception = transfer.submit(size, bring)

    def _fetch_packed(self, backend: Backend, transfer: Transfer, codes: torch.Tensor) -> Codes:
        if self._width == 8:
            return transfer.fetch(codes)
        pieces = (codes[start : start + _PIECE] for start in range(0, codes.numel(), _PIECE))
        return np.concatenate([transfer.fetch(backend.pack(piece, self._width)) for piece in pieces])

    def _arrived(self) -> tuple[_HostResults, I64]:
        """Return the results and the positions of protected elements; the first call fills `codes`."""
        with self._lock:
            arrived = self._arrival.result() if isinstance(self._arrival, Future) else self._arrival
            if isinstance(arrived, Exception):
                raise arrived
            if self._positions is None:
                if arrived.changed is not None and self.parent is not None:
                    apply_changes(self.parent, *arrived.changed, self.codes)
                elif self._width == 8:
                    self.codes[:] = arrived.packed
                else:
                    kernels.unpack(arrived.packed, self._width, self.codes)
                count = len(arrived.protected)
                positions = np.flatnonzero(self.codes == self._protected) if count else np.empty(0, np.int64)
                if len(positions) != count:
                    raise SaveFailed(f"'{self.key.fqn}': {len(positions)} codes are protected, {count} values arrived")
                self._arrival, self._positions = arrived._replace(changed=None, packed=self.codes[:0]), positions
            assert isinstance(self._arrival, _HostResults)
            return self._arrival, self._positions

    def block(self, span: slice) -> BlockData:
        """Wait for the results and return the other data of a block; `span` starts at a multiple of 8 elements."""
        arrived, positions = self._arrived()
        first, last = np.searchsorted(positions, [span.start, span.stop])
        bits = self.refinement_bits
        packed = arrived.refinement[span.start * bits // 8 : (span.stop * bits + 7) // 8]
        return BlockData(arrived.protected[first:last], packed.data, None if span.start else arrived.steps)

    def staged(self, workers: Workers) -> CodeSource:
        """Return self, which no longer depends on the tensor."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without device memory.

        A failure of the transfer is raised later, where the other ranks are notified.
        """
        arrival: _HostResults | Exception
        try:
            arrival, _ = self._arrived()
        except Exception as error:
            arrival = SaveFailed(f"'{self.key.fqn}' did not arrive on the host: {type(error).__name__}: {error}")
        return {**self.__dict__, "_arrival": arrival, "_lock": None, "device_codes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def decode_chunk(chunk: Chunk, tables: DeviceTables, bits: int) -> torch.Tensor:
    """Return a chunk as a reader decodes it, float32[n], on its device; with `bits` 0, from the base layer."""
    backend, book, x = backend_for(chunk.tensor.device), tables.fitted.codebook, chunk.coded_flat()
    parent = parent_on_device(chunk) if chunk.parent is not None and tables.fitted.uses_parent else None
    codes, symbols, tally = tables.quantize(backend, x, parent, chunk.exponent, bits)
    exact, _ = backend.gather_protected(x, codes, book.protected, tally, bf16=not bits)
    values = exact.view(torch.float32) if bits else exact.view(torch.bfloat16).float()
    out = Dequantizer(book, chunk.exponent, bits).on_device(codes, values, symbols)
    backend.check()
    return out
