"""Range asymmetric numeral systems with one static table per previous code: `RansCoder`.

J. Duda, "Asymmetric numeral systems" (arXiv:1311.2540), section 3, as a stack of 16-bit words with 32-bit
states; F. Giesen, "Interleaved entropy coders" (arXiv:1402.3392), for the lanes. A code that is nearly always
the same costs close to nothing, which no code with whole bits per symbol (Huffman) can do; that is what codes
given previous codes are like.

Rows. The previous code p names the row; codes without a previous code use row `contexts`. The frequencies of
a row are positive integers with sum M = 2**15 and take consecutive ranges [start, start + frequency) of
slots: the *first* symbol of the row (its most frequent one, named by the model), then its other symbols in
ascending order, last the escape, if there is one. Symbols too rare for a slot of their own are *escaped*: the
escape is followed by the index j of the symbol among the row's K >= 2 escaped symbols in ascending order,
coded as frequency E = M // K, start j * E.

Block, all integers little-endian; n, the number of codes, is not stored:

* No bytes at all stand for `lanes` states of 65536 and no words: a block whose codes are certain.
* Otherwise `lanes` uint32, the state of each lane, then the uint16 words up to the end. lanes = 1 if n <
  4096, 4 if n < 65536, else 8. The code with index i belongs to lane i % lanes.
* To decode the codes in order: take the lane's state x; slot = x % M; the symbol is that whose range holds
  the slot; set x = frequency * (x // M) + slot - start; if x < 65536, set x = x * 65536 + the next word. For
  the escape do so a second time with the index in place of the symbol.
* In the end every state is 65536 and no word is left. States lie in [65536, 2**32) at all times.

Model: uint8 1 (version), uint16 contexts, uint16 symbols, then the bits of contexts + 1 rows, laid out and
with "numbers" (Exp-Golomb) as described in `_bits`, zeros to the next whole byte. A row is: number of its
symbols; for each, in ascending order, its distance to the one before minus 1 (for the first one: the symbol
itself) as a number, and 7 bits of frequency; then, if a symbol is escaped, 7 bits of frequency of the escape.
The 7 bits mean: 0 escaped; 127 the first symbol of the row, exactly one, whose frequency is what the others
leave; v in 1..15 the frequency v; v in 16..103 the frequency (8 + v % 8) << (v // 8 - 1), so that frequencies
have four significant bits. What a rounding of 1/16 costs is below 0.1 % of the entropy. Fitting is not part
of the format: other fits give other models, which decode alike.
"""

from __future__ import annotations

import struct
from typing import ClassVar

import numpy as np

from dsq_ckpt.coding import _bits
from dsq_ckpt.coding._rans_kernels import (
    INITIAL_STATE,
    TOTAL,
    TRUNCATED,
    decode_loop,
    encode_loop,
    make_tables,
)
from dsq_ckpt.coding.base import MAX_SYMBOLS, Coder, check_counts
from dsq_ckpt.core.arrays import U8, Array
from dsq_ckpt.errors import CodingError
from dsq_ckpt.kernels.jit import jit

_VERSION = 1
_HEADER = struct.Struct("<BHH")
_WIDTH = 7
_FIRST = 127
_MAX_GRID = 103
_SINGLE_LANE, _FOUR_LANES = 4096, 65536


def lanes(n: int) -> int:
    """How many states take turns: more are faster, and each costs two bytes that carry nothing."""
    return 1 if n < _SINGLE_LANE else 4 if n < _FOUR_LANES else 8


class RansCoder(Coder):
    """Interleaved rANS, one static table per previous code (module docstring: the format).

    The model is, for each row: `freqs[row, symbol]`, int32, the frequency, -1 if escaped, 0 if absent;
    `firsts[row]`, the first symbol or -1 in an empty row; `escape_freqs[row]`, 0 without escapes.
    """

    name: ClassVar[str] = "rans"

    def __init__(self, freqs: Array, firsts: Array, escape_freqs: Array) -> None:
        super().__init__(freqs.shape[0] - 1, freqs.shape[1])
        self._freqs = freqs
        self._firsts = firsts
        self._escape_freqs = escape_freqs
        self._tables = make_tables(freqs, firsts, escape_freqs)
        self._last_row = self._tables.from_row(self.contexts)
        self._max_words = 2 if escape_freqs.any() else 1

    @classmethod
    def fit(cls, counts: Array) -> RansCoder:
        """See `Coder.fit`. Spends 0.1 % over the conditional entropy of the counts, if a row's codes are not
        all but certain: the least a code can cost is 2**-15 * log2(e) bits, unless its row has no other.
        """
        counts = check_counts(counts)
        freqs = np.zeros(counts.shape, np.int32)
        firsts = np.full(counts.shape[0], -1, np.int32)
        escape_freqs = np.zeros(counts.shape[0], np.int32)
        _fit_rows(counts, freqs, firsts, escape_freqs)
        return cls(freqs, firsts, escape_freqs)

    def expected_bits(self, counts: Array) -> float:
        """See `Coder.expected_bits`."""
        counts = self._checked_counts(counts)
        if np.any(counts[self._freqs == 0]):
            return float("inf")
        escaped = self._freqs < 0
        n_escaped = np.where(escaped, counts, 0).sum(axis=1)
        each = TOTAL // np.maximum(escaped.sum(axis=1), 1)
        bits = (counts * np.log2(TOTAL / np.maximum(self._freqs, 1)))[~escaped].sum()
        bits += (
            n_escaped * (np.log2(TOTAL / np.maximum(self._escape_freqs, 1)) + np.log2(TOTAL / each))
        ).sum()
        return float(bits)

    def _encode(self, codes: U8, parent: U8 | None) -> bytes:
        n = codes.size
        # One to spare for the kernel; pages that stay unused are never touched.
        words = np.empty(self._max_words * n + 1, np.uint16)
        states = np.empty(lanes(n), np.uint64)
        if parent is None:
            position = encode_loop(codes, np.zeros(n, np.uint8), self._last_row, words, states)
        else:
            position = encode_loop(codes, parent, self._tables, words, states)
        if position < 0:
            raise CodingError(self._unknown_symbol(codes, parent))
        if position == words.size and np.all(states == INITIAL_STATE):
            return b""
        return states.astype("<u4").tobytes() + words[position:].astype("<u2", copy=False).tobytes()

    def _decode(self, data: U8, parent: U8 | None, out: U8) -> None:
        head = 4 * lanes(out.size)
        if data.size == 0:
            states = np.full(lanes(out.size), INITIAL_STATE, np.uint64)
        elif data.size < head or data.size % 2:
            raise CodingError(
                f"an rANS block of {out.size} codes has {data.size} bytes, expected {head} + 2 * words"
            )
        else:
            states = data[:head].view("<u4").astype(np.uint64)
        if np.any(states < INITIAL_STATE):
            raise CodingError("damaged rANS block: an initial state is out of range")
        words = np.append(data[head:].view("<u2").astype(np.uint16), np.uint16(0))  # one to spare for the kernel
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

    def _unknown_symbol(self, codes: U8, parent: U8 | None) -> str:
        known = np.zeros((self.contexts + 1, MAX_SYMBOLS), bool)
        known[:, : self.symbols] = self._freqs != 0
        at = int(np.argmin(known[self.contexts if parent is None else parent, codes]))
        given = "without a previous code" if parent is None else f"after code {parent[at]}"
        return f"code {codes[at]} at index {at} has no count {given} in the model"

    def to_bytes(self) -> bytes:
        """See `Coder.to_bytes`; the format is in the module docstring."""
        # 3 bytes hold a symbol (at most 15 + 7 bits), 5 the number of symbols (17 bits) and the escape
        bits = np.zeros(5 * self._freqs.shape[0] + 3 * int(np.count_nonzero(self._freqs)) + 2, np.uint8)
        position = _write_rows(self._freqs, self._firsts, self._escape_freqs, bits)
        header = _HEADER.pack(_VERSION, self.contexts, self.symbols)
        return header + bits[: (position + 7) // 8].tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> RansCoder:
        """See `Coder.from_bytes`."""
        if len(data) < _HEADER.size:
            raise CodingError(f"an rANS model has {len(data)} bytes, expected at least {_HEADER.size}")
        version, contexts, symbols = _HEADER.unpack(bytes(data[: _HEADER.size]))
        if version != _VERSION or contexts > MAX_SYMBOLS or not 1 <= symbols <= MAX_SYMBOLS:
            raise CodingError(f"no rANS model: version {version}, {contexts} contexts, {symbols} symbols")
        bits = _bits.padded(np.frombuffer(data, np.uint8)[_HEADER.size :])
        freqs = np.zeros((contexts + 1, symbols), np.int32)
        firsts = np.full(contexts + 1, -1, np.int32)
        escape_freqs = np.zeros(contexts + 1, np.int32)
        position = _read_rows(bits, freqs, firsts, escape_freqs)
        if position < 0 or not _bits.is_end(bits, position):
            raise CodingError(f"damaged rANS model of {len(data)} bytes")
        return cls(freqs, firsts, escape_freqs)


@jit
def _grid_index(freq: int) -> int:
    """The largest v that means a frequency <= freq."""
    shift = 0
    while freq >> shift >= 16:
        shift += 1
    return 8 * shift + (freq >> shift)


@jit
def _grid_value(index: int) -> int:
    """The frequency that index v means."""
    return index if index < 16 else (8 + (index & 7)) << ((index >> 3) - 1)


@jit
def _share_row(counts: Array, first: int, freqs: Array) -> int:
    """Share TOTAL out to the counts, in freqs, on the grid except for `first`, which takes the rest.

    Integers only: the same counts give the same model on every machine.
    """
    total = counts.sum()
    rest = TOTAL
    for s in range(counts.size):
        freqs[s] = 0
        if counts[s] > 0 and s != first:
            freqs[s] = _grid_value(_grid_index(max(1, counts[s] * TOTAL // total)))
            rest -= freqs[s]
    # All were rounded down, and `first` has what they lost. First raise those that are nearer to the next
    # grid value, down to 15/16 of the share of `first`; then any that are below their share while `first` is
    # above its own.
    for only_near in (True, False):
        for s in range(counts.size):
            if freqs[s] == 0:
                continue
            above = _grid_value(_grid_index(freqs[s]) + 1)
            left = rest - (above - freqs[s])
            if only_near:
                wanted = 2 * counts[s] * TOTAL >= (freqs[s] + above) * total and left >= 1
                affordable = 16 * left * total >= 15 * counts[first] * TOTAL
            else:
                wanted = counts[s] * TOTAL > freqs[s] * total and left >= 1
                affordable = left * total >= counts[first] * TOTAL
            if wanted and affordable:
                freqs[s] = above
                rest = left
    freqs[first] = rest
    return rest


@jit
def _row_bits(counts: Array, freqs: Array) -> float:
    bits = 0.0
    for s in range(counts.size):
        if counts[s] > 0:
            bits += counts[s] * np.log2(TOTAL / freqs[s])
    return bits


@jit
def _fit_rows(counts: Array, freqs: Array, firsts: Array, escape_freqs: Array) -> None:
    """For each row, try to escape the symbols below several shares of a slot; keep what takes fewest bits."""
    symbols = counts.shape[1]
    merged = np.empty(
        symbols + 1, np.int64
    )  # the counts of a row without its escaped symbols, then the escape's
    trial = np.empty(symbols + 1, np.int64)
    for r in range(counts.shape[0]):
        total = counts[r].sum()
        if total == 0:
            continue
        first = int(np.argmax(counts[r]))
        firsts[r] = first
        best_bits = np.inf
        tried = -1
        for quarters in (0, 1, 2, 4, 8, 16):
            n_escaped = 0
            merged[symbols] = 0
            for s in range(symbols):
                merged[s] = counts[r, s]
                if 0 < 4 * counts[r, s] * TOTAL < quarters * total and s != first:
                    merged[s] = 0
                    merged[symbols] += counts[r, s]
                    n_escaped += 1
            if n_escaped == tried or n_escaped == 1:
                continue
            tried = n_escaped
            _share_row(merged, first, trial)
            bits = _row_bits(merged, trial)
            if n_escaped > 0:
                bits += merged[symbols] * np.log2(TOTAL / (TOTAL // n_escaped))
            if bits < best_bits:
                best_bits = bits
                escape_freqs[r] = trial[symbols]
                for s in range(symbols):
                    freqs[r, s] = -1 if merged[s] == 0 and counts[r, s] > 0 else trial[s]


@jit
def _write_rows(freqs: Array, firsts: Array, escape_freqs: Array, bits: Array) -> int:
    position = 0
    for r in range(freqs.shape[0]):
        position = _bits.write_number(bits, position, int(np.count_nonzero(freqs[r])))
        previous = -1
        for s in range(freqs.shape[1]):
            if freqs[r, s] == 0:
                continue
            position = _bits.write_number(bits, position, s - previous - 1)
            previous = s
            index = _FIRST if s == firsts[r] else 0 if freqs[r, s] < 0 else _grid_index(freqs[r, s])
            position = _bits.write_bits(bits, position, index, _WIDTH)
        if escape_freqs[r] > 0:
            position = _bits.write_bits(bits, position, _grid_index(escape_freqs[r]), _WIDTH)
    return position


@jit
def _read_rows(bits: Array, freqs: Array, firsts: Array, escape_freqs: Array) -> int:
    """Fill the arrays of a model; return the position after the rows, or -1 if they are no model."""
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
            index = _bits.read_bits(bits, position, _WIDTH)
            position += _WIDTH
            symbol += gap + 1
            if gap < 0 or symbol >= freqs.shape[1]:
                return -1
            if index == _FIRST and firsts[r] < 0:
                firsts[r] = symbol
            elif index == 0:
                freqs[r, symbol] = -1
                n_escaped += 1
            elif index <= _MAX_GRID:
                freqs[r, symbol] = _grid_value(index)
                rest -= freqs[r, symbol]
            else:
                return -1
        if n_escaped > 0:
            index = _bits.read_bits(bits, position, _WIDTH)
            position += _WIDTH
            if n_escaped < 2 or index == 0 or index > _MAX_GRID:
                return -1
            escape_freqs[r] = _grid_value(index)
            rest -= escape_freqs[r]
        if n_symbols > 0:
            if firsts[r] < 0 or rest < 1:
                return -1
            freqs[r, firsts[r]] = rest
    return position
