"""Coder of blocks as lists of changed codes, for groups in which few codes change: `ChangesCoder`.

A lane of `RansCoder` takes the same time for an unchanged code as for a changed one. Here, previous codes are divided
into up to four classes, by the rate at which their codes change. The gaps between changes within a class, and the new
codes, are coded by the 32 lanes of `RansCoder`. A decoder takes a few instructions for 64 codes and a few nanoseconds
for each change, in place of the previous codes. Gaps cost as much as `RansCoder` spends on unchanged codes, to 0.2 %:
the codes of a class change at one rate, so that gaps have a geometric distribution.

docs/format.md, section 10, has the bytes of models and blocks.
"""

from __future__ import annotations

import math
import struct
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import ClassVar

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.coding import _change_loops
from dsq_ckpt.coding._lane_loops import BAD_TABLES, NO_MEMORY, UNKNOWN
from dsq_ckpt.coding._lane_model import MAX_BITS, MAX_LEFT, MIN_BITS
from dsq_ckpt.coding.base import Coder, check_counts, check_vector
from dsq_ckpt.coding.rans import (
    ERROR_DESCRIPTIONS,
    DecoderTables,
    EncoderTables,
    Model,
    RansCoder,
    make_decoder_tables,
    make_encoder_tables,
)
from dsq_ckpt.core.arrays import F64, I64, U8, Array
from dsq_ckpt.errors import CodingError

MAX_CLASSES = 4
NEVER = 7
"""The class, in a model, of previous codes that never change."""
UNIT = 1 << 20
"""Denominator of rates of change."""
_VERSION = 1
_HEADER = struct.Struct("<BBH")
_RATE = 3  # bytes
_LIST_ALL_RATE = 4  # all codes after a previous code are listed if one in this number changes, or more
_MIN_CODES_PER_LISTED = 8  # lists hold at most one code in this number; with more, lanes are as fast
_MIN_TOKEN_SLOTS = 4  # slots of a token: as few per row as distinguish frequencies
_TOLERANCE = 0.002  # fraction of the bits of gaps that fewer classes may cost
_MAX_COST_RATIO = 1.005  # largest cost relative to lanes; below a million codes per block, lists have the smaller frame


class ChangesCoder(Coder):
    """Coder of lists of changed codes (format: docs/format.md, section 10).

    Codes without previous codes are coded as by a `RansCoder`.
    """

    name: ClassVar[str] = "changes"
    in_place: ClassVar[bool] = True

    def __init__(self, symbols: RansCoder, kinds: U8, rates: tuple[int, ...]) -> None:
        """Make a coder.

        Args:
            symbols: coder of listed codes, given previous codes.
            kinds: class of each previous code: an index of `rates`; or `len(rates)`, if all codes after it are listed;
                or `NEVER`.
            rates: number of changes in `UNIT` codes of each class.
        """
        super().__init__(symbols.contexts, symbols.symbols)
        self._symbol_coder, self._kinds, self._rates = symbols, kinds, rates

    @classmethod
    def fit(cls, counts: Array) -> ChangesCoder:
        """See `Coder.fit`; there are at most 255 previous codes."""
        counts = check_counts(counts)
        contexts = counts.shape[0] - 1
        if contexts + 1 > 256:
            raise CodingError(f"counts of {contexts} previous codes, expected at most 255: gaps have rows of their own")
        totals, changed = _count_changes(counts)
        kinds = np.full(contexts, NEVER, np.uint8)
        all_listed = changed * _LIST_ALL_RATE >= np.maximum(totals, 1)
        classed = np.flatnonzero((changed > 0) & ~all_listed)
        order = classed[np.argsort(changed[classed] / totals[classed], kind="stable")]
        parts = _partition_by_rate(totals[order], changed[order], min(MAX_CLASSES, 256 - contexts))
        rates = []
        for number, part in enumerate(parts):
            kinds[order[part]] = number
            n_changed, total = int(changed[order[part]].sum()), int(totals[order[part]].sum())
            rates.append(min(max((2 * UNIT * n_changed + total) // (2 * total), 1), UNIT // _LIST_ALL_RATE - 1))
        kinds[all_listed] = max(len(rates), 1)
        return cls(RansCoder.fit(_listed_counts(counts, kinds, max(len(rates), 1))), kinds, tuple(rates) or (1,))

    def expected_bits(self, counts: Array) -> float:
        """See `Coder.expected_bits`."""
        counts = self._check_counts(counts)
        totals, changed = _count_changes(counts)
        if changed[self._kinds == NEVER].any():
            return float("inf")
        bits = self._symbol_coder.expected_bits(_listed_counts(counts, self._kinds, len(self._rates)))
        for number, rate in enumerate(self._rates):
            n_changed, total = changed[self._kinds == number].sum(), totals[self._kinds == number].sum()
            bits -= float(n_changed * math.log2(rate / UNIT) + (total - n_changed) * math.log2(1 - rate / UNIT))
        return bits

    def to_bytes(self) -> bytes:
        """See `Coder.to_bytes`."""
        bits = np.unpackbits(self._kinds[:, None], axis=1, count=3, bitorder="little")
        rates = b"".join(rate.to_bytes(_RATE, "little") for rate in self._rates)
        kinds = np.packbits(bits, bitorder="little").tobytes()
        return _HEADER.pack(_VERSION, len(self._rates), self.contexts) + rates + kinds + self._symbol_coder.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> ChangesCoder:
        """See `Coder.from_bytes`."""
        data = bytes(data)
        if len(data) < _HEADER.size:
            raise CodingError(f"a model of changes has {len(data)} bytes, expected at least {_HEADER.size}")
        version, classes, contexts = _HEADER.unpack_from(data)
        if version != _VERSION or not 1 <= classes <= MAX_CLASSES or contexts + classes > 256:
            raise CodingError(f"no model of changes: version {version}, {classes} classes, {contexts} contexts")
        at = _HEADER.size + _RATE * classes
        end = at + (3 * contexts + 7) // 8
        listed = RansCoder.from_bytes(data[end:])
        if not isinstance(listed, RansCoder) or listed.contexts != contexts:
            raise CodingError(f"a model of changes of {contexts} contexts has symbols of another model")
        rates = tuple(int.from_bytes(data[i : i + _RATE], "little") for i in range(_HEADER.size, at, _RATE))
        bits = np.unpackbits(np.frombuffer(data[at:end], np.uint8), bitorder="little")
        kinds = np.packbits(bits[: 3 * contexts].reshape(-1, 3), axis=1, bitorder="little").ravel()
        if bits[3 * contexts :].any() or np.any((kinds > classes) & (kinds != NEVER)):
            raise CodingError(f"damaged model of changes: classes {sorted(set(kinds.tolist()))} of {classes}")
        if not all(1 <= rate < UNIT // _LIST_ALL_RATE for rate in rates):
            raise CodingError(f"damaged model of changes: rates {rates}, expected 1 to {UNIT // _LIST_ALL_RATE - 1}")
        return cls(listed, kinds, rates)

    def update(self, data: bytes | memoryview, codes: U8) -> None:
        """See `Coder.update`; after an error the codes are unchanged."""
        check_vector("codes", codes)
        if not (codes.flags.c_contiguous and codes.flags.writeable):
            raise CodingError("codes must be a contiguous, writeable array")
        if codes.size:
            self._decode_in_place(np.frombuffer(data, np.uint8), codes)
        elif len(data):
            raise CodingError(f"a block of 0 codes has {len(data)} bytes, expected none")

    def lane_coder(self, parent: U8 | None) -> Coder | None:
        """See `Coder.lane_coder`."""
        return self._symbol_coder if parent is None else None

    def _encode(self, codes: U8, parent: U8 | None) -> bytes:
        if parent is None:
            return self._symbol_coder.encode(codes, None)
        buffer = np.empty(8 * codes.size + 1024, np.uint8)  # filled from its end: most pages are never touched
        arguments = *self._encoder_tables, self._kinds, self._limits, parent, codes, buffer
        if self.contexts > self.symbols and int(codes.max()) >= self.symbols:
            raise CodingError(f"code {int(codes.max())}, but the model has {self.symbols} symbols")
        path = native.path_index()
        size = _change_loops.encode(*arguments) if path < 0 else native.encode_changes(path, *arguments)
        if size == NO_MEMORY:
            raise MemoryError(f"no memory to code {codes.size} codes")
        if size < 0:
            raise CodingError(
                self._missing_count_message(codes, parent) if size == UNKNOWN else "tables are inconsistent"
            )
        return buffer[buffer.size - size :].tobytes()

    def _decode(self, data: U8, parent: U8 | None, out: U8) -> None:
        if parent is None:
            self._symbol_coder.decode(data.data, None, out)
        else:
            np.copyto(out, parent)
            self._decode_in_place(data, out)

    def _missing_count_message(self, codes: U8, parent: U8) -> str:
        """Describe the first change without a count, in a class without changes or among listed codes."""
        never = np.flatnonzero((self._kinds[parent] == NEVER) & (codes != parent))
        if not never.size:
            listed = np.flatnonzero((self._kinds[parent] == len(self._rates)) | (codes != parent))
            return self._symbol_coder.missing_count_message(codes[listed], parent[listed], listed)
        at = int(never[0])
        return f"code {codes[at]} at index {at} has no count after code {parent[at]} in the model"

    def _decode_in_place(self, data: U8, codes: U8) -> None:
        if self.contexts <= self.symbols:
            self._decode_into(data, codes)
            return
        decoded = codes.copy()  # unchanged codes need not be codes of the model
        self._decode_into(data, decoded)
        if (largest := int(decoded.max())) >= self.symbols:
            raise CodingError(f"damaged block of changes: code {largest}, the model has {self.symbols} symbols")
        np.copyto(codes, decoded)

    def _decode_into(self, data: U8, codes: U8) -> None:
        path, data = native.path_index(), np.ascontiguousarray(data)
        error = BAD_TABLES
        if path >= 0:  # the compiled path checks all codes itself
            error = native.decode_changes(path, self._native_tables, codes, data)
        if error == BAD_TABLES and int(codes.max()) >= self.contexts:
            raise CodingError(f"previous code {int(codes.max())}, but the model has {self.contexts} contexts")
        if path < 0:
            error = _change_loops.decode(*self._decoder_tables, self._kinds, self._limits, codes, data)
        if error == NO_MEMORY:
            raise MemoryError(f"no memory to decode {codes.size} codes")
        if error:
            raise CodingError(
                f"damaged block of changes of {data.size} bytes for {codes.size} codes: "
                f"{ERROR_DESCRIPTIONS.get(error, 'its states are out of range')}, "
                "or model or previous codes are not its own"
            )

    @cached_property
    def _limits(self) -> U8:
        return np.array([len(fit_gap_row(rate)[1]) - 1 for rate in self._rates], np.uint8)

    @cached_property
    def _table_rows(self) -> Model:
        """Rows of symbols, without the row for no previous code, then the rows of the tokens of each class."""
        symbols, gaps = self._symbol_coder.model, [fit_gap_row(rate) for rate in self._rates]
        model = Model.empty(self.contexts + len(gaps), max(self.symbols, *(len(freqs) for _, freqs in gaps)))
        model.freqs[: self.contexts, : self.symbols] = symbols.freqs[:-1]
        for array, values in zip(model[1:], symbols[1:], strict=True):
            array[: self.contexts] = values[:-1]
        for row, (first, freqs) in enumerate(gaps, self.contexts):
            model.freqs[row, : len(freqs)] = freqs
            model.firsts[row] = first
            model.bits[row] = sum(freqs).bit_length() - 1
        return model

    @cached_property
    def _decoder_tables(self) -> DecoderTables:
        return make_decoder_tables(self._table_rows)

    @cached_property
    def _native_tables(self) -> native.Tables:
        return native.Tables(*self._decoder_tables, self._kinds, self._limits)

    @cached_property
    def _encoder_tables(self) -> EncoderTables:
        return make_encoder_tables(self._table_rows)


def fit_fastest(counts: Array) -> Coder:
    """Fit a `ChangesCoder` if few codes change and its size is within 0.5 % of a `RansCoder`; else a `RansCoder`."""
    counts = check_counts(counts)
    lanes = RansCoder.fit(counts)
    if not 1 <= lanes.contexts <= 256 - MAX_CLASSES:
        return lanes
    totals, changed = _count_changes(counts)
    listed = np.where(changed * _LIST_ALL_RATE >= totals, totals, changed).sum()
    if not 0 < listed * _MIN_CODES_PER_LISTED <= totals.sum():
        return lanes
    changes = ChangesCoder.fit(counts)
    changes_bits, lanes_bits = (coder.expected_bits(counts) + 8 * len(coder.to_bytes()) for coder in (changes, lanes))
    return changes if changes_bits <= _MAX_COST_RATIO * lanes_bits else lanes


@lru_cache(64)
def fit_gap_row(rate: int) -> tuple[int, tuple[int, ...]]:
    """Return the first symbol of the row of a class, and the frequencies of its tokens, for a rate of changes.

    Token t means t unchanged codes and then a change. The last token means that many unchanged codes.
    """
    stay, left = UNIT - rate, [1 << 32]
    while len(left) <= 254 and left[-1] * 20 > 1 << 32:
        left.append(left[-1] * stay >> 20)
    shares = [before - after for before, after in pairwise(left)] + left[-1:]
    for bits in range(MIN_BITS, MAX_BITS + 1):
        trial = [max((share + (1 << 31 - bits)) >> (32 - bits), 1) for share in shares]
        place = trial.index(max(trial))
        if sum(trial) - trial[place] > MAX_LEFT:
            break
        freqs, first, slots = trial, place, 1 << bits
        if min(freqs) >= _MIN_TOKEN_SLOTS:
            break
    freqs[first] = slots - sum(freqs[:first]) - sum(freqs[first + 1 :])
    return first, tuple(freqs)


def _count_changes(counts: I64) -> tuple[I64, I64]:
    """Return the number of occurrences of each previous code, and the number of its changes."""
    with_parent = counts[:-1]
    totals = with_parent.sum(axis=1)
    changed = totals.copy()
    size = min(with_parent.shape)
    changed[:size] -= with_parent.diagonal()
    return totals, changed


def _listed_counts(counts: I64, kinds: U8, classes: int) -> I64:
    """Return the counts of the listed codes."""
    counts = counts.copy()
    codes = np.flatnonzero(kinds != classes)
    codes = codes[codes < counts.shape[1]]
    counts[codes, codes] = 0  # unchanged codes, which are not listed
    return counts


def _log2(numbers: I64) -> F64:
    """Return log2 of positive integers with an error of 2**-28, the same on every machine; 0 for 0."""
    mantissas, exponents = np.frexp(np.maximum(numbers, 1).astype(np.float64))
    scaled = mantissas * (1 << 15)
    places = scaled.astype(np.int64)
    rest: F64 = native.LOG2[places] / (1 << 24) + (scaled - places) / places * 1.4426950408889634
    return rest + (exponents - 15)


def _partition_by_rate(totals: I64, changed: I64, max_classes: int) -> list[slice]:
    """Return classes of previous codes sorted by rate: as few as cost little more than `max_classes`."""
    n = len(totals)
    if n == 0:
        return []
    total_sums, changed_sums = (np.concatenate(([0], np.cumsum(numbers))) for numbers in (totals, changed))
    total, change = total_sums[None] - total_sums[:, None], changed_sums[None] - changed_sums[:, None]
    # cost of gaps, from one position to another
    bits = total * _log2(total) - change * _log2(change) - (total - change) * _log2(total - change)
    bits[np.tril_indices(n + 1)] = np.inf
    costs, before = [bits[0]], [np.zeros(n + 1, np.int64)]
    for _ in range(min(max_classes, n) - 1):
        trial = costs[-1][:, None] + bits
        before.append(np.argmin(trial, axis=0))
        costs.append(np.min(trial, axis=0))
    best = min(cost[n] for cost in costs)
    number = next(place for place, cost in enumerate(costs) if cost[n] <= (1 + _TOLERANCE) * best)
    parts, end = list[slice](), n
    for place in range(number, -1, -1):
        start = int(before[place][end])
        parts.append(slice(start, end))
        end = start
    return parts[::-1]
