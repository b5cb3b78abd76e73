"""Decoder of range asymmetric numeral systems of format versions 1 to 3: `Rans1Coder`.

docs/format.md, section 10, has the bytes of models and blocks, as "model version 1".
"""

from __future__ import annotations

import struct
from typing import ClassVar

import numpy as np

from dsq_ckpt.coding import _bits
from dsq_ckpt.coding._lane_model import FIRST, MAX_GRID, WIDTH, grid_value
from dsq_ckpt.coding._rans1_kernels import INITIAL_STATE, TOTAL, TRUNCATED, decode_loop, make_tables
from dsq_ckpt.coding.base import MAX_SYMBOLS, Coder
from dsq_ckpt.core.arrays import U8, Array
from dsq_ckpt.errors import CodingError
from dsq_ckpt.kernels.jit import jit

_VERSION = 1
_HEADER = struct.Struct("<BHH")
_SINGLE_LANE, _FOUR_LANES = 4096, 65536


def lane_count(n: int) -> int:
    """Return the number of interleaved states."""
    return 1 if n < _SINGLE_LANE else 4 if n < _FOUR_LANES else 8


class Rans1Coder(Coder):
    """Interleaved rANS of model version 1, only for decoding.

    The model has for each row: `freqs[row, symbol]`, int32, the frequency, -1 if escaped, 0 if absent;
    `firsts[row]`, the first symbol or -1 in an empty row; `escape_freqs[row]`, 0 without escapes.
    """

    name: ClassVar[str] = "rans"

    def __init__(self, freqs: Array, firsts: Array, escape_freqs: Array) -> None:
        super().__init__(freqs.shape[0] - 1, freqs.shape[1])
        self._tables = make_tables(freqs, firsts, escape_freqs)
        self._last_row = self._tables.from_row(self.contexts)

    @classmethod
    def fit(cls, counts: Array) -> Rans1Coder:
        """Refuse: models of version 1 are only read."""
        raise CodingError("models of rANS version 1 are only read")

    def to_bytes(self) -> bytes:
        """Refuse: models of version 1 are only read."""
        raise CodingError("models of rANS version 1 are only read")

    def expected_bits(self, counts: Array) -> float:
        """Refuse: models of version 1 are only read."""
        raise CodingError("models of rANS version 1 are only read")

    def _encode(self, codes: U8, parent: U8 | None) -> bytes:
        raise CodingError("models of rANS version 1 are only read")

    def _decode(self, data: U8, parent: U8 | None, out: U8) -> None:
        head = 4 * lane_count(out.size)
        if data.size == 0:
            states = np.full(lane_count(out.size), INITIAL_STATE, np.uint64)
        elif data.size < head or data.size % 2:
            raise CodingError(
                f"an rANS block of {out.size} codes has {data.size} bytes, expected {head} + 2 * words"
            )
        else:
            states = data[:head].view("<u4").astype(np.uint64)
        if np.any(states < INITIAL_STATE):
            raise CodingError("damaged rANS block: an initial state is out of range")
        words = np.append(data[head:].view("<u2").astype(np.uint16), np.uint16(0))  # one extra for the kernel
        if parent is None:
            position = decode_loop(words, states, np.zeros(out.size, np.uint8), self._last_row, out)
        else:
            position = decode_loop(words, states, parent, self._tables, out)
        if position < 0:
            reason = "it ends early" if position == TRUNCATED else "it holds a symbol that the model lacks"
            raise CodingError(
                f"damaged rANS block of {data.size} bytes: {reason}, or model or parent are not its own"
            )
        if position != words.size - 1 or np.any(states != INITIAL_STATE):
            raise CodingError(
                f"damaged rANS block of {data.size} bytes: {words.size - 1 - position} words are left after "
                f"{out.size} codes, final states are wrong, or model or parent are not its own"
            )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Rans1Coder:
        """See `Coder.from_bytes`."""
        if len(data) < _HEADER.size:
            raise CodingError(f"an rANS model has {len(data)} bytes, expected at least {_HEADER.size}")
        version, contexts, symbols = _HEADER.unpack(bytes(data[: _HEADER.size]))
        if version != _VERSION or contexts > MAX_SYMBOLS or not 1 <= symbols <= MAX_SYMBOLS:
            raise CodingError(f"no rANS model: version {version}, {contexts} contexts, {symbols} symbols")
        bits = _bits.pad(np.frombuffer(data, np.uint8)[_HEADER.size :])
        freqs = np.zeros((contexts + 1, symbols), np.int32)
        firsts = np.full(contexts + 1, -1, np.int32)
        escape_freqs = np.zeros(contexts + 1, np.int32)
        position = _read_rows(bits, freqs, firsts, escape_freqs)
        if position < 0 or not _bits.is_end(bits, position):
            raise CodingError(f"damaged rANS model of {len(data)} bytes")
        return cls(freqs, firsts, escape_freqs)


@jit
def _read_rows(bits: Array, freqs: Array, firsts: Array, escape_freqs: Array) -> int:
    """Fill the arrays of a model; return the position after the rows, or -1 if they are invalid."""
    position = 0
    for r in range(freqs.shape[0]):
        n_symbols, position = _bits.read_number(bits, position)
        if n_symbols < 0 or n_symbols > freqs.shape[1]:
            return -1
        symbol = -1
        rest = TOTAL
        n_escaped = 0
        for _ in range(n_symbols):
            gap, position = _bits.read_number(bits, position)
            index = _bits.read_bits(bits, position, WIDTH)
            position += WIDTH
            symbol += gap + 1
            if gap < 0 or symbol >= freqs.shape[1]:
                return -1
            if index == FIRST and firsts[r] < 0:
                firsts[r] = symbol
            elif index == 0:
                freqs[r, symbol] = -1
                n_escaped += 1
            elif index <= MAX_GRID:
                freqs[r, symbol] = grid_value(index)
                rest -= freqs[r, symbol]
            else:
                return -1
        if n_escaped > 0:
            index = _bits.read_bits(bits, position, WIDTH)
            position += WIDTH
            if n_escaped < 2 or index == 0 or index > MAX_GRID:
                return -1
            escape_freqs[r] = grid_value(index)
            rest -= escape_freqs[r]
        if n_symbols > 0:
            if firsts[r] < 0 or rest < 1:
                return -1
            freqs[r, firsts[r]] = rest
    return position
