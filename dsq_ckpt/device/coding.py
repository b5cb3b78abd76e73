"""Codes of a chunk, made where it lies and brought to the host in the background."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dsq_ckpt import kernels
from dsq_ckpt.chunk import Bits, BlockData, Chunk, Codes, CodeSource, Dequantizer, Floats32, padded, scale_of
from dsq_ckpt.codebook import Fitted
from dsq_ckpt.device.passes import parent_on_device
from dsq_ckpt.device.transfer import Transfer, transfer_from
from dsq_ckpt.kernels.backend import Backend, Refinement
from dsq_ckpt.kernels.dispatch import backend_for
from dsq_ckpt.kernels.migrated import settle
from dsq_ckpt.workers import Workers

_PIECE = 1 << 25  # codes packed together, so that the room for packed ones is bounded
_MOVED = 5 * 8  # bits that an element takes which travels by itself: its position and its code


class _Arrived(NamedTuple):
    """What came to the host."""

    protected: Bits
    positions: npt.NDArray[np.int64]
    refinement: bytes


class Tables:
    """What kernels need to quantize a group, on the device.

    Args:
        fitted: the group.
        device: where to.
    """

    def __init__(self, fitted: Fitted, device: torch.device) -> None:
        self.fitted = fitted
        book = fitted.codebook
        width = book.cell_high - book.cell_low
        inverse = np.divide(1.0, width, where=width > 0, out=np.zeros_like(width))
        self.table = torch.from_numpy(fitted.table).to(device)
        self.low, self.inverse = (torch.from_numpy(padded(part)).to(device) for part in (book.cell_low, inverse))
        self.width = max(1, int(np.flatnonzero(fitted.counts.sum(0)).max(initial=0)).bit_length())
        """Bits that the largest code in use takes."""

    def quantize(
        self, backend: Backend, x: torch.Tensor, parent: torch.Tensor | None, exponent: float, bits: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Codes and, with `bits`, refinement symbols of a flat tensor, uint8[n]; and what `gather_protected` takes."""
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


class TablesOf:
    """The tables of one save, made when a chunk first asks for them."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], Tables] = {}

    def of(self, fitted: Fitted, device: torch.device) -> Tables:
        """Those of a group on a device."""
        key = id(fitted), device  # which Tables keeps alive
        if key not in self._made:
            self._made[key] = Tables(fitted, device)
        return self._made[key]


class DeviceChunk:
    """A chunk that was quantized on its device; its codes arrive on the host in the background.

    When this is made, everything that reads the tensor is queued on the current stream: what is queued after it, such
    as an optimizer's step, may write to the tensor.

    Attributes:
        resident: uint8[n] on the device: the codes, for the next save to be coded against.
    """

    def __init__(self, chunk: Chunk, tables: Tables) -> None:
        fitted = tables.fitted
        self.key, self.group, self.exponent = chunk.key, chunk.group, chunk.exponent
        self.refinement_bits = chunk.refinement_bits
        self.parent: Codes | None = chunk.parent if fitted.uses_parent else None
        self.values: Floats32 | None = None
        self.codes: Codes = np.empty(chunk.key.elements, np.uint8)
        device, x = chunk.tensor.device, chunk.flat()
        backend, transfer = backend_for(device), transfer_from(device)
        known = None if chunk.parent is None else parent_on_device(chunk)
        size = x.numel() * (1 + bool(self.refinement_bits))
        transfer.reserve(size)
        try:
            codes, symbols, tally = tables.quantize(
                backend, x, known if self.parent is not None else None, self.exponent, self.refinement_bits
            )
            packed = None if symbols is None else backend.pack(symbols, self.refinement_bits)
            protected = backend.gather_protected(x, codes, fitted.codebook.protected, tally)
        except BaseException:
            transfer.submit(size, lambda: None)
            raise
        self.resident: torch.Tensor | None = codes
        code, before = fitted.codebook.protected, chunk.parent  # not the chunk: its tensor may be freed

        def bring() -> _Arrived:
            backend.check()
            self._bring_codes(backend, transfer, codes, known, before, tables.width)
            refinement = b"" if packed is None else transfer.fetch(packed).tobytes()
            kept = transfer.fetch(protected).view(np.uint32)
            where = np.flatnonzero(self.codes == code) if len(kept) else np.empty(0, np.int64)
            if len(where) != len(kept):
                raise RuntimeError(f"'{self.key.fqn}': {len(where)} codes are protected, {len(kept)} values arrived")
            return _Arrived(kept, where, refinement)

        self._arrival: Future[_Arrived] | _Arrived = transfer.submit(size, bring)

    def _bring_codes(
        self, backend: Backend, transfer: Transfer, codes: torch.Tensor, known: torch.Tensor | None,
        before: Codes | None, width: int,
    ) -> None:
        """Fill `self.codes`: by those that changed where these are few, else packed."""
        if known is not None and before is not None:
            found = backend.migrated(codes, known, codes.numel() * width // _MOVED)
            if found is not None:
                positions, moved = found
                kind = np.int64 if positions.dtype == torch.int64 else np.int32
                settle(before, transfer.fetch(positions).view(kind), transfer.fetch(moved), self.codes)
                return
        for start in range(0, codes.numel(), _PIECE):
            where = slice(start, min(start + _PIECE, codes.numel()))
            if width == 8:
                self.codes[where] = transfer.fetch(codes[where])
            else:
                kernels.unpack(transfer.fetch(backend.pack(codes[where], width)), width, self.codes[where])

    def _arrived(self) -> _Arrived:
        arrival = self._arrival
        return arrival.result() if isinstance(arrival, Future) else arrival

    def block(self, where: slice) -> BlockData:
        """What lies beside `codes[where]`, once all has arrived; `where` begins at a multiple of 8 elements."""
        arrived = self._arrived()
        first, last = np.searchsorted(arrived.positions, [where.start, where.stop])
        bits = self.refinement_bits
        packed = arrived.refinement[where.start * bits // 8 : (where.stop * bits + 7) // 8]
        return BlockData(arrived.protected[first:last], packed)

    def staged(self, workers: Workers) -> CodeSource:
        """This: it no longer depends on the tensor."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For another process: without what is on the device."""
        return self.__dict__ | {"_arrival": self._arrived(), "resident": None}


def decode(chunk: Chunk, tables: Tables, bits: int) -> torch.Tensor:
    """What a reader would make of a chunk, on its device, float32[n]; `bits` 0: of the base layer."""
    backend, book, x = backend_for(chunk.tensor.device), tables.fitted.codebook, chunk.flat()
    parent = parent_on_device(chunk) if chunk.parent is not None and tables.fitted.uses_parent else None
    codes, symbols, tally = tables.quantize(backend, x, parent, chunk.exponent, bits)
    kept = backend.gather_protected(x, codes, book.protected, tally, bf16=not bits)
    values = kept.view(torch.float32) if bits else kept.view(torch.bfloat16).float()
    out = Dequantizer(book, chunk.exponent, bits).on_device(codes, values, symbols)
    backend.check()
    return out
