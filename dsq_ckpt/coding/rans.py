"""Range asymmetric numeral systems with one static table per previous code, in 32 lanes: `RansCoder`.

J. Duda, "Asymmetric numeral systems" (arXiv:1311.2540), section 3, as a stack of 16-bit words with 32-bit states; F.
Giesen, "Interleaved entropy coders" (arXiv:1402.3392), for the lanes. Codes given previous codes
are nearly always the same. Such a code costs close to nothing, which Huffman codes, of whole bits, cannot achieve.

docs/format.md, section 10, has the bytes of models and blocks. Vector instructions process the lanes at once: the row
of each code is known in advance, so no lane waits for another. A row has 2**10 to 2**15 slots, as few as cost next to
nothing. At most 4095 of them do not belong to its first symbol, so that an entry of its table has 32 bits. There is one
entry for each of these slots and one for the first symbol. So tables of skewed rows are small, and stay in the cache.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.coding import _lane_loops, _lane_model
from dsq_ckpt.coding._lane_loops import BAD_SIZE, EMPTY, IMPOSSIBLE, LEFT, TRUNCATED, UNKNOWN
from dsq_ckpt.coding._lane_model import ESCAPE, MIN_BITS
from dsq_ckpt.coding.base import MAX_SYMBOLS, Coder, check_counts
from dsq_ckpt.coding.rans1 import Rans1Coder
from dsq_ckpt.core.arrays import I32, I64, U8, U16, U32, Array
from dsq_ckpt.errors import CodingError

_VERSION = 2
_HEADER = struct.Struct("<BHH")
ERROR_DESCRIPTIONS = {
    TRUNCATED: "it ends early", IMPOSSIBLE: "it holds a symbol that the model lacks",
    LEFT: "bytes are left at its end, or its final states are wrong",
    BAD_SIZE: "no block of so many codes has this size",
}
"""Descriptions of errors of blocks, by number."""


class Model(NamedTuple):
    """Frequencies of the rows of a model, int32.

    Attributes:
        freqs: (rows, symbols), -1 if escaped, 0 if absent.
        firsts: (rows,), the first symbol, -1 in a row without symbols.
        escape_freqs: (rows,), 0 without escapes.
        bits: (rows,), a row has 2**bits slots.
    """

    freqs: I32
    firsts: I32
    escape_freqs: I32
    bits: I32

    @classmethod
    def empty(cls, rows: int, symbols: int) -> Model:
        """Return a model of rows without symbols."""
        return cls(
            np.zeros((rows, symbols), np.int32), np.full(rows, -1, np.int32), np.zeros(rows, np.int32),
            np.full(rows, MIN_BITS, np.int32),
        )


class RansCoder(Coder):
    """Interleaved rANS with one static table per previous code (format: docs/format.md, section 10)."""

    name: ClassVar[str] = "rans"

    def __init__(self, model: Model) -> None:
        super().__init__(model.freqs.shape[0] - 1, model.freqs.shape[1])
        self._model = model

    @property
    def model(self) -> Model:
        """Frequencies of the rows."""
        return self._model

    @classmethod
    def fit(cls, counts: Array) -> RansCoder:
        """See `Coder.fit`. The model spends 0.1 % over the conditional entropy of the counts, unless the codes of a row
        are nearly certain: a code costs at least 2**-15 * log2(e) bits, except the only code of a row.
        """
        counts = check_counts(counts)
        model = Model.empty(*counts.shape)
        (_lane_model if native.path() == "numba" else native).fit(counts, native.LOG2, *model)
        return cls(model)

    def expected_bits(self, counts: Array) -> float:
        """See `Coder.expected_bits`."""
        counts = self._check_counts(counts)
        freqs, _, escape_freqs, row_bits = self._model
        if np.any(counts[freqs == 0]):
            return float("inf")
        escaped, slots = freqs < 0, (1 << row_bits.astype(np.int64))
        shares = slots // np.maximum(escaped.sum(axis=1), 1)
        logs = native.LOG2 / (1 << 24)  # logarithms of the fit, the same on every machine
        bits = (counts * (row_bits[:, None] - logs[np.maximum(freqs, 0)]))[~escaped].sum()
        escape_bits = 2 * row_bits - logs[escape_freqs] - logs[shares]
        return float(bits + (np.where(escaped, counts, 0).sum(axis=1) * escape_bits).sum())

    def _encode(self, codes: U8, parent: U8 | None) -> bytes:
        tables = self._keyframe_encoder_tables if parent is None else self._encoder_tables
        buffer = np.empty(4 * codes.size + 1024, np.uint8)  # filled from its end, so that most pages are never touched
        path = native.path_index()
        if path < 0:
            size = _lane_loops.encode(*tables, parent, codes, buffer)
        else:
            size = native.encode(path, *tables, parent, codes, buffer)
        if size < 0:
            raise CodingError(
                self.missing_count_message(codes, parent) if size == UNKNOWN else "tables are inconsistent"
            )
        return buffer[buffer.size - size :].tobytes()

    def _decode(self, data: U8, parent: U8 | None, out: U8) -> None:
        tables = self._keyframe_decoder_tables if parent is None else self._decoder_tables
        if data.size == 0:
            error = _decode_empty_block(tables, self._model.firsts, parent, out)
        else:
            path, data = native.path_index(), np.ascontiguousarray(data)
            if path < 0:
                error = _lane_loops.decode(*tables, parent, out, data)
            else:
                error = native.decode(path, self.native_tables(parent), parent, out, data)
        if error:
            raise CodingError(
                f"damaged rANS block of {data.size} bytes for {out.size} codes: "
                f"{ERROR_DESCRIPTIONS.get(error, 'its states are out of range')}, or model or parent are not its own"
            )

    def lane_coder(self, parent: U8 | None) -> Coder | None:
        """See `Coder.lane_coder`."""
        return self

    def native_tables(self, parent: U8 | None) -> native.Tables:
        """Return the tables of a decoder of codes with or without previous codes."""
        return self._keyframe_native_tables if parent is None else self._native_tables

    def missing_count_message(self, codes: U8, parent: U8 | None, indices: I64 | None = None) -> str:
        """Describe the first code without a count in the model; `indices` are positions of the codes."""
        known = np.zeros((self.contexts + 1, MAX_SYMBOLS), bool)
        known[:, : self.symbols] = self._model.freqs != 0
        at = int(np.argmin(known[self.contexts if parent is None else parent, codes]))
        context = "without a previous code" if parent is None else f"after code {parent[at]}"
        index = at if indices is None else int(indices[at])
        return f"code {codes[at]} at index {index} has no count {context} in the model"

    def to_bytes(self) -> bytes:
        """See `Coder.to_bytes`."""
        freqs = self._model.freqs
        # 3 bytes hold a symbol (at most 15 + 7 bits), 6 the number of symbols (17 bits), the row's bits and the escape
        data = np.zeros(6 * freqs.shape[0] + 3 * int(np.count_nonzero(freqs)) + 2, np.uint8)
        size = (_lane_model if native.path() == "numba" else native).write_rows(*self._model, data)
        return _HEADER.pack(_VERSION, self.contexts, self.symbols) + data[:size].tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Coder:
        """See `Coder.from_bytes`. A model of version 1 yields a coder that only decodes."""
        if len(data) < _HEADER.size:
            raise CodingError(f"an rANS model has {len(data)} bytes, expected at least {_HEADER.size}")
        version, contexts, symbols = _HEADER.unpack(bytes(data[: _HEADER.size]))
        if version == 1:
            return Rans1Coder.from_bytes(data)
        if version != _VERSION or contexts > MAX_SYMBOLS or not 1 <= symbols <= MAX_SYMBOLS:
            raise CodingError(f"no rANS model: version {version}, {contexts} contexts, {symbols} symbols")
        model = Model.empty(contexts + 1, symbols)
        rows = np.frombuffer(data, np.uint8)[_HEADER.size :]
        if not (_lane_model if native.path() == "numba" else native).read_rows(rows, *model):
            raise CodingError(f"damaged rANS model of {len(data)} bytes")
        return cls(model)

    @cached_property
    def _decoder_tables(self) -> DecoderTables:
        return make_decoder_tables(Model(*(array[: self.contexts] for array in self._model)))

    @cached_property
    def _keyframe_decoder_tables(self) -> DecoderTables:
        return make_decoder_tables(Model(*(array[self.contexts :] for array in self._model)))

    @cached_property
    def _native_tables(self) -> native.Tables:
        return native.Tables(*self._decoder_tables)

    @cached_property
    def _keyframe_native_tables(self) -> native.Tables:
        return native.Tables(*self._keyframe_decoder_tables)

    @cached_property
    def _encoder_tables(self) -> EncoderTables:
        return make_encoder_tables(Model(*(array[: self.contexts] for array in self._model)))

    @cached_property
    def _keyframe_encoder_tables(self) -> EncoderTables:
        return make_encoder_tables(Model(*(array[self.contexts :] for array in self._model)))


class DecoderTables(NamedTuple):
    """Tables of a decoder, as native/lanes.h describes them."""

    rows: U32
    counts: U16
    escaped: U8
    entries: U32


class EncoderTables(NamedTuple):
    """Tables of an encoder, as native/lanes.h describes them."""

    table: U32
    escapes: U32
    counts: U16
    shift: int


def _lay_out_slots(model: Model) -> tuple[I64, I64, I64]:
    """Return slots (rows, symbols + 1) of all symbols except the first, escape last; their starts; their sum."""
    slots = np.concatenate((np.maximum(model.freqs, 0), model.escape_freqs[:, None]), axis=1).astype(np.int64)
    full = np.flatnonzero(model.firsts >= 0)
    slots[full, model.firsts[full]] = 0
    ends = np.cumsum(slots, axis=1)
    return slots, ends - slots, ends[:, -1]


def _count_escapes(model: Model) -> U16:
    return np.where(model.firsts < 0, EMPTY, (model.freqs < 0).sum(axis=1)).astype(np.uint16)


def make_decoder_tables(model: Model) -> DecoderTables:
    """Return the tables of rows, which are numbered as those of the model."""
    slots, starts, left = _lay_out_slots(model)
    rows, symbols = model.freqs.shape
    sizes = -(-(left + 1) // 16) * 16
    names = np.append(np.arange(symbols), ESCAPE)
    values = starts << 20 | slots << 8 | names
    last = np.where(model.firsts < 0, ESCAPE, model.firsts).astype(np.int64) | left << 20
    # per row: each symbol once per slot; the first symbol once; zeros up to a multiple of 16
    values = np.concatenate((values, last[:, None], np.zeros((rows, 1), np.int64)), axis=1)
    repeats = np.concatenate((slots, np.ones((rows, 1), np.int64), (sizes - left - 1)[:, None]), axis=1)
    entries = np.repeat(values.ravel(), repeats.ravel()).astype(np.uint32)
    base = np.cumsum(sizes) - sizes
    escaped = np.zeros((rows, 256), np.uint8)
    r, s = np.nonzero(model.freqs < 0)
    escaped[r, (np.cumsum(model.freqs < 0, axis=1) - 1)[r, s]] = s
    infos = (base >> 4 << 16 | left << 4 | model.bits).astype(np.uint32)
    return DecoderTables(infos, _count_escapes(model), escaped.ravel(), entries)


def make_encoder_tables(model: Model) -> EncoderTables:
    """Return the tables of rows, which are numbered as those of the model."""
    _, starts, left = _lay_out_slots(model)
    rows, symbols = model.freqs.shape
    shift, escaped = (symbols - 1).bit_length(), model.freqs < 0
    full = np.flatnonzero(model.firsts >= 0)
    starts[full, model.firsts[full]] = left[full]
    starts = starts << 4 | model.bits[:, None]
    table = np.zeros((rows, 1 << shift), np.int64)
    table[:, :symbols] = np.where(model.freqs > 0, model.freqs.astype(np.int64) << 16 | starts[:, :symbols], 0)
    numbers = np.cumsum(escaped, axis=1) << 4 | model.bits[:, None]
    table[:, :symbols][escaped] = numbers[escaped]
    escapes = model.escape_freqs.astype(np.int64) << 16 | starts[:, symbols]
    return EncoderTables(table.astype(np.uint32).ravel(), escapes.astype(np.uint32), _count_escapes(model), shift)


def _decode_empty_block(tables: DecoderTables, firsts: Array, parent: U8 | None, out: U8) -> int:
    """Decode a block without bytes, in which every code is the only code of its row."""
    certain = (tables.rows >> 4 & 0xFFF == 0) & (tables.counts == 0)
    if parent is None:
        out[:] = firsts[-1:].astype(np.uint8)
        return 0 if certain[0] else IMPOSSIBLE
    if not certain.all() and not certain[parent].all():
        return TRUNCATED
    np.take(firsts[: certain.size].astype(np.uint8), parent, out=out)
    return 0
