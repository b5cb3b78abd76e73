"""Kernels of `rans1.py`: the inner loop, and the tables it reads.

Numba turns mixed signed and unsigned arithmetic into floating point, hence the many explicit `np.uint64`.
The loop is one function: arrays handed to another function cost two atomic additions per call. Rans1Tables bound
their own indices by construction; what comes from encoded bytes is checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dsq_ckpt.core.arrays import Array
from dsq_ckpt.kernels.jit import jit

RESOLUTION = 15
TOTAL = 1 << RESOLUTION
INITIAL_STATE = 1 << 16

# What the loops return instead of a position
TRUNCATED, IMPOSSIBLE = -2, -3

_U0, _U1, _U4, _U8, _U16 = (np.uint64(i) for i in (0, 1, 4, 8, 16))
_R = np.uint64(RESOLUTION)
_SLOT_MASK = np.uint64(TOTAL - 1)
_ESCAPE_FLAG = np.uint64(TOTAL)
_WORD_MASK = np.uint64(0xFFFF)
_LOW = np.uint64(INITIAL_STATE)

# Columns of Rans1Tables.escapes
_COUNT, _FREQ = (np.uint64(i) for i in range(2))

_i64: Any = np.int64  # typed Any, as kernels turn it into a plain int for their callers


class Rans1Tables(NamedTuple):
    """Tables that the loops read; r is the row (previous code) and s the symbol.

    Attributes:
        rows: uint64 (rows,): index into `slots` << 16 | frequency of the first symbol - 1.
        slots: uint8: symbols of the slots. All slots of a row's first symbol share one entry, so that skewed
            rows stay small: slot i is found at max(0, i - (frequency of the first symbol - 1)).
        decoder: uint32 (rows * 256,): frequency << 16 | escape flag << 15 | start.
        escapes: uint64 (rows, 2): number of escaped symbols, frequency of each.
        escaped: uint8 (rows, 256): the escaped symbols of each row.
    """

    rows: Array
    slots: Array
    decoder: Array
    escapes: Array
    escaped: Array

    def from_row(self, row: int) -> Rans1Tables:
        """Return the tables without the rows before this one."""
        return Rans1Tables(
            self.rows[row:],
            self.slots,
            self.decoder[row << 8 :],
            self.escapes[row:],
            self.escaped[row:],
        )


@jit
def decode_loop(words: Array, states: Array, parent: Array, tables: Any, out: Array) -> int:
    """Decode into out, from the first code to the last; return the number of words read, or what is wrong.

    `words` ends with one word that is not part of the block: what would be read past the end reads that. A state that
    starts in [2**16, 2**32) stays there, so one word is always enough. Whether one is needed is a coin toss above
    1 bit per code, so it is computed, not branched on.
    """
    rows, slots, decoder, escapes = tables.rows, tables.slots, tables.decoder, tables.escapes
    lane_mask = np.uint64(states.size - 1)
    n_words = np.uint64(words.size - 1)
    p = _U0
    for k in range(out.size):
        i = np.uint64(k)
        lane = i & lane_mask
        x = states[lane]
        context = np.uint64(parent[i])
        row = rows[context]
        slot = x & _SLOT_MASK
        first = row & _WORD_MASK
        symbol = slots[(row >> _U16) + (slot - first if slot > first else _U0)]
        entry = np.uint64(decoder[(context << _U8) | np.uint64(symbol)])
        x = (entry >> _U16) * (x >> _R) + slot - (entry & _SLOT_MASK)
        needed = np.uint64(x < _LOW)
        x = (x << (needed << _U4)) | (np.uint64(words[min(p, n_words)]) & (_U0 - needed))
        p += needed
        if entry & _ESCAPE_FLAG:
            slot = x & _SLOT_MASK
            if escapes[context, _COUNT] == _U0:
                return IMPOSSIBLE
            freq = escapes[context, _FREQ]
            index = slot // freq
            if index >= escapes[context, _COUNT]:
                return IMPOSSIBLE
            symbol = tables.escaped[context, index]
            x = freq * (x >> _R) + slot - index * freq
            if x < _LOW:
                x = (x << _U16) | np.uint64(words[min(p, n_words)])
                p += _U1
        out[i] = symbol
        states[lane] = x
    position: int = _i64(p)
    return position if p <= n_words else TRUNCATED


@jit
def _fill_tables(
    freqs: Array,
    firsts: Array,
    escape_freqs: Array,
    rows: Array,
    slots: Array,
    decoder: Array,
    escapes: Array,
    escaped: Array,
) -> None:
    decoder[:] = np.uint32(TOTAL << 16 | TOTAL)  # an escape, which stops the decoder in a row that has none
    slots[0] = 0
    base = 1  # entry 0 serves the empty rows
    for r in range(freqs.shape[0]):
        first = firsts[r]
        if first < 0:
            rows[r] = TOTAL - 1
            continue
        rows[r] = np.uint64(base << 16 | (freqs[r, first] - 1))
        slots[base] = first
        base += 1
        decoder[r << 8 | first] = np.uint32(freqs[r, first] << 16)
        start = _i64(freqs[r, first])
        count = 0
        for s in range(freqs.shape[1]):
            freq = _i64(freqs[r, s])
            if freq < 0:
                escaped[r, count] = s
                count += 1
            elif freq > 0 and s != first:
                decoder[r << 8 | s] = np.uint32(freq << 16 | start)
                slots[base : base + freq] = s
                base += freq
                start += freq
        if count > 0:
            freq = _i64(escape_freqs[r])
            # in `slots` and `decoder`, the first escaped symbol, which has no slots of its own, is the escape
            slots[base : base + freq] = escaped[r, 0]
            base += freq
            decoder[r << 8 | escaped[r, 0]] = np.uint32(freq << 16 | TOTAL | start)
            each = TOTAL // count
            escapes[r, 0] = np.uint64(count)
            escapes[r, 1] = np.uint64(each)


def make_tables(freqs: Array, firsts: Array, escape_freqs: Array) -> Rans1Tables:
    """Return the tables of a model, whose arrays `rans1.Rans1Coder` describes."""
    n_rows = freqs.shape[0]
    used = np.flatnonzero(firsts >= 0)
    n_slots = 1 + int((TOTAL + 1 - freqs[used, firsts[used]].astype(np.int64)).sum())
    tables = Rans1Tables(
        rows=np.zeros(n_rows, np.uint64),
        slots=np.zeros(n_slots, np.uint8),
        decoder=np.empty(n_rows << 8, np.uint32),
        escapes=np.zeros((n_rows, 2), np.uint64),
        escaped=np.zeros((n_rows, 256), np.uint8),
    )
    _fill_tables(freqs, firsts, escape_freqs, *tables)
    return tables
