"""Run-length and Huffman coding of rearranged cyclic deltas, the coder of the papers: `HuffmanCoder`.

Inshrinkerator section 6 with Algorithms 5 and 6. A delta is (previous code - code) mod B, B the larger of the
two alphabets, so that alphabets may change between checkpoints. Deltas are split into groups by previous code
(rearrangement), each group keeps its order, and a reader needs nothing to undo it but the parent. In each
group only runs of two or more have their lengths stored. The papers distinguish values and lengths by sign;
here they are disjoint tokens of one alphabet, which is the same to the Huffman code that each group has of
its own. Codes without a parent are one group of plain codes with B = symbols.

Tokens: v in 0..B-1 is value v, a run of one until run tokens follow; B + r - 1 is a run length r in 1..256; B
+ 247 + k is 2**k, 9 <= k <= 40. The run tokens after a value add up to the length of its run. That bounds the
alphabet: a long run is written as its largest power of two, and so on with the rest, down to 256.

Block: a stream of bits, laid out and with "numbers" (Exp-Golomb) as described in `_bits`, zeros to the next
whole byte; no bytes for no codes. For each group that is not empty, in the order of previous codes (all
elements in one group if rearrange = 0 in the model): number of used tokens minus 1; for each used token,
ascending, its distance to the one before minus 1 (for the first one: the token itself) as a number, and 4
bits of code length, 1..15; then the codes of the group's tokens. Codes are canonical (shorter ones first,
then smaller tokens) and sent from their most significant bit. A single used token has neither length nor
codes: the group is that value throughout.

Model: uint8 1 (version), uint8 flags (1 rearrange, 2 run_length), uint16 contexts, uint16 symbols
(little-endian), then bits: for each of the contexts + 1 rows the number of its symbols and, for each, its
distance to the one before minus 1, as numbers; zeros to the next whole byte. The model has the codes that may follow
each code; the Huffman tables are in the blocks.
"""

from __future__ import annotations

import heapq
import itertools
import struct
from typing import ClassVar

import numpy as np

from dsq_ckpt.coding import _bits
from dsq_ckpt.coding import _huffman_kernels as kernels
from dsq_ckpt.coding.base import MAX_SYMBOLS, Coder, check_counts
from dsq_ckpt.core.arrays import U8, Array
from dsq_ckpt.errors import CodingError
from dsq_ckpt.kernels.jit import jit

_VERSION = 1
_HEADER = struct.Struct("<BBHH")
_REARRANGE, _RUN_LENGTH = 1, 2


class HuffmanCoder(Coder):
    """Run-length + Huffman coding per group (module docstring: the format).

    Attributes:
        rearrange: split the deltas by previous code; otherwise one group holds all.
        run_length: code the lengths of runs; otherwise every delta is a token.
    """

    name: ClassVar[str] = "huffman"

    def __init__(self, support: Array, rearrange: bool, run_length: bool) -> None:
        super().__init__(support.shape[0] - 1, support.shape[1])
        self.rearrange = rearrange
        self.run_length = run_length
        self._support = np.zeros((support.shape[0], MAX_SYMBOLS), np.bool_)
        self._support[:, : self.symbols] = support

    @classmethod
    def fit(cls, counts: Array, rearrange: bool = True, run_length: bool = True) -> HuffmanCoder:
        """See `Coder.fit`. Of the counts only the zeros matter: each block has its own Huffman tables."""
        return cls(check_counts(counts) > 0, rearrange, run_length)

    def expected_bits(self, counts: Array) -> float:
        """Estimate the bits of one block with these counts, tables included.

        With `run_length=False` only the size of the tables is approximate. Otherwise run lengths are estimated as if
        the codes of a group were independent; the result is then within about 10 %.
        """
        counts = self._check_counts(counts)
        if np.any(counts[~self._support[:, : self.symbols]]):
            return float("inf")
        n_values = max(self.contexts, self.symbols)
        deltas = np.zeros((self.contexts, n_values), np.int64)
        for row in range(self.contexts):
            deltas[row, (row - np.arange(self.symbols)) % n_values] = counts[row]
        groups = [(row, n_values) for row in (deltas if self.rearrange else [deltas.sum(axis=0)])]
        groups.append((counts[-1], self.symbols))
        return float(sum(_group_bits(row, n, self.run_length) for row, n in groups if row.any()))

    def _group_layout(self, parent: U8 | None, n: int) -> tuple[U8, int, int, int, Array]:
        """Return (parent, modulus, n_values, row offset, starts of the groups) of a block."""
        if parent is None:
            return np.zeros(n, np.uint8), 0, self.symbols, self.contexts, np.array([0, n], np.int64)
        modulus = max(self.contexts, self.symbols)
        return (
            parent,
            modulus,
            modulus,
            0,
            kernels.group_starts(parent, self.contexts if self.rearrange else 1),
        )

    def _encode(self, codes: U8, parent: U8 | None) -> bytes:
        parent, modulus, n_values, row_offset, starts = self._group_layout(parent, codes.size)
        values = np.empty(codes.size, np.uint8)
        if not kernels.group_values(
            codes, parent, row_offset, modulus, self._support, starts[:-1].copy(), values
        ):
            at = int(np.argmin(self._support[parent.astype(np.int64) + row_offset, codes]))
            raise CodingError(
                f"code {codes[at]} at index {at} has no count in row {parent[at] + row_offset} of the model"
            )
        # at most 15 bits for a token and 23 for its entry in the table; zeroed pages stay untouched until
        # written
        buffer = np.zeros(5 * codes.size + 3 * starts.size + 8, np.uint8)
        tokens = np.empty(codes.size, np.uint16)
        position = 0
        for start, end in itertools.pairwise(starts.tolist()):
            if start < end:
                group = values[start:end]
                position = kernels.write_group(group, n_values, self.run_length, tokens, buffer, position)
        return buffer[: (position + 7) // 8].tobytes()

    def _decode(self, data: U8, parent: U8 | None, out: U8) -> None:
        parent, modulus, n_values, _, starts = self._group_layout(parent, out.size)
        buffer = _bits.pad(data)
        values = np.empty(out.size, np.uint8)
        lookup = np.empty(1 << kernels.MAX_LENGTH, np.int32)
        position = 0
        for start, end in itertools.pairwise(starts.tolist()):
            if start < end:
                position = kernels.read_group(buffer, position, n_values, lookup, values[start:end])
            if position < 0:
                raise CodingError(f"damaged Huffman block of {data.size} bytes: {_REASONS[position]}")
        if not _bits.is_end(buffer, position):
            raise CodingError(f"Huffman block of {data.size} bytes: {out.size} codes end at bit {position}")
        if not kernels.ungroup_values(values, parent, modulus, self.symbols, starts[:-1].copy(), out):
            raise CodingError(
                f"damaged Huffman block of {data.size} bytes: a code is not below {self.symbols}"
            )

    def to_bytes(self) -> bytes:
        """See `Coder.to_bytes`; the format is in the module docstring."""
        bits = np.zeros(3 * (self._support.shape[0] + int(np.count_nonzero(self._support))) + 2, np.uint8)
        position = _write_support(self._support, bits)
        flags = _REARRANGE * self.rearrange | _RUN_LENGTH * self.run_length
        header = _HEADER.pack(_VERSION, flags, self.contexts, self.symbols)
        return header + bits[: (position + 7) // 8].tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> HuffmanCoder:
        """See `Coder.from_bytes`."""
        if len(data) < _HEADER.size:
            raise CodingError(f"a Huffman model has {len(data)} bytes, expected at least {_HEADER.size}")
        version, flags, contexts, symbols = _HEADER.unpack(bytes(data[: _HEADER.size]))
        if version != _VERSION or flags > 3 or contexts > MAX_SYMBOLS or not 1 <= symbols <= MAX_SYMBOLS:
            raise CodingError(
                f"no Huffman model: version {version}, flags {flags}, {contexts} contexts, {symbols} symbols"
            )
        bits = _bits.pad(np.frombuffer(data, np.uint8)[_HEADER.size :])
        support = np.zeros((contexts + 1, symbols), np.bool_)
        position = _read_support(bits, support)
        if position < 0 or not _bits.is_end(bits, position):
            raise CodingError(f"damaged Huffman model of {len(data)} bytes")
        return cls(support, bool(flags & _REARRANGE), bool(flags & _RUN_LENGTH))


_REASONS = {
    kernels.TRUNCATED: "it ends early",
    kernels.BAD_TABLE: "a table of code lengths is no prefix code",
    kernels.BAD_RUN: "a run does not fit its group",
}


def huffman_bits(symbols: Array) -> int:
    """Return the bits of an array of integers in its own Huffman code, without table and limit of length.

    An array with one distinct value takes 0 bits.
    """
    heap = np.unique(symbols, return_counts=True)[1].tolist()
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heapq.heappop(heap)
        bits += pair  # each inner node of the tree adds one bit to all codes below it
        heapq.heappush(heap, pair)
    return bits


def _group_bits(counts: Array, n_values: int, run_length: bool) -> float:
    """Return the expected bits of a group with these counts, int64 (n_values,), in random order, with its table."""
    total = int(counts.sum())
    expected = np.zeros(n_values + kernels.RUN_TOKENS)
    expected[:n_values] = counts
    if run_length and total > 1:
        stay = counts / total
        n_runs = np.maximum(counts * (1.0 - stay), counts > 0)
        expected[:n_values] = n_runs
        plain = np.arange(kernels.MAX_PLAIN_RUN)  # run length - 1, modulo 256
        for s in np.flatnonzero(counts):
            # a length above 1 is geometric, whose binary digits are independent of each other
            p = min(stay[s], 1.0 - 1.0 / total)
            low = p**plain * (1.0 - p) / (1.0 - p**kernels.MAX_PLAIN_RUN)
            low[0] *= p**kernels.MAX_PLAIN_RUN  # a run of one has no length token
            expected[n_values : n_values + kernels.MAX_PLAIN_RUN] += n_runs[s] * low
            for k in range(8, 41):
                odds = p ** (1 << k)
                expected[n_values + kernels.MAX_PLAIN_RUN - 9 + k] += n_runs[s] * odds / (1.0 + odds)
    # run lengths that are unlikely one by one still occur: as many different ones as they are expected in all
    used = np.flatnonzero(expected >= 0.5)
    n_rare = round(expected[expected < 0.5].sum())
    weights = np.concatenate((np.rint(expected[used]), np.ones(n_rare))).astype(np.int64)
    if weights.size == 1:
        return float(2 * np.log2(used[0] + 1) + 2)
    lengths = kernels.huffman_lengths(weights)
    gap = max(1.0, expected.size / weights.size / 2)
    table = weights.size * (4 + 2 * np.log2(gap) + 1)
    return float((weights * lengths).sum() + table)


@jit
def _write_support(support: Array, bits: Array) -> int:
    position = 0
    for r in range(support.shape[0]):
        n_symbols = 0
        for s in range(support.shape[1]):
            n_symbols += support[r, s]
        position = _bits.write_number(bits, position, n_symbols)
        previous = -1
        for s in range(support.shape[1]):
            if support[r, s]:
                position = _bits.write_number(bits, position, s - previous - 1)
                previous = s
    return position


@jit
def _read_support(bits: Array, support: Array) -> int:
    """Fill support; return the position after the rows, or -1 if they do not fit it."""
    position = 0
    for r in range(support.shape[0]):
        n_symbols, position = _bits.read_number(bits, position)
        if n_symbols < 0 or n_symbols > support.shape[1]:
            return -1
        symbol = -1
        for _ in range(n_symbols):
            gap, position = _bits.read_number(bits, position)
            symbol += gap + 1
            if gap < 0 or symbol >= support.shape[1]:
                return -1
            support[r, symbol] = True
    return position
