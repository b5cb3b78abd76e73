"""Bit packing; see `cpu`. Eight symbols of b bits are exactly b bytes.

In Numba eight symbols are read as one word. Neighbours are joined, then pairs, then fours: three steps on a whole word
instead of one per symbol.
"""

from __future__ import annotations

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.core.arrays import U8, Array
from dsq_ckpt.kernels.checks import check_array, check_below, check_bits, check_output
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import sketches


@jit
def _masks(bits):  # type: ignore[no-untyped-def]
    """Return the masks of the lower and upper symbols, pairs and fours, and the shifts of the upper ones."""
    one, width = np.uint64(1), np.uint64(bits)
    symbol, pair, four = (one << width) - one, (one << 2 * width) - one, (one << 4 * width) - one
    low = symbol | symbol << np.uint64(16) | symbol << np.uint64(32) | symbol << np.uint64(48)
    pairs = pair | pair << np.uint64(32)
    return (
        low, low << width, np.uint64(8) - width, pairs, pairs << 2 * width, np.uint64(16) - 2 * width,
        four, four << 4 * width, np.uint64(32) - 4 * width,
    )


@jit
def _count_word_groups(groups, bits, size):  # type: ignore[no-untyped-def]
    """Return the number of groups that can be accessed as eight bytes, including bytes of the next group."""
    return min(groups, max(0, (size - 8) // bits + 1))


@jit
def _pack(words, bits, out):  # type: ignore[no-untyped-def]
    low, high, shift, low2, high2, shift2, low4, high4, shift4 = _masks(bits)
    word_groups = _count_word_groups(words.size, bits, out.size)
    for group in range(words.size):
        word = words[group]
        word = word & low | word >> shift & high
        word = word & low2 | word >> shift2 & high2
        word = word & low4 | word >> shift4 & high4
        if group < word_groups:  # one store; the next group overwrites its excess bytes
            for i in range(8):
                out[bits * group + i] = np.uint8(word >> np.uint64(8 * i))
        else:
            for i in range(bits):
                out[bits * group + i] = np.uint8(word >> np.uint64(8 * i))


@jit
def _unpack(packed, bits, out):  # type: ignore[no-untyped-def]
    low, high, shift, low2, high2, shift2, low4, high4, shift4 = _masks(bits)
    word_groups = _count_word_groups(out.size, bits, packed.size)
    for group in range(out.size):
        word = np.uint64(0)
        if group < word_groups:
            for i in range(8):
                word |= np.uint64(packed[bits * group + i]) << np.uint64(8 * i)
        else:
            for i in range(bits):
                word |= np.uint64(packed[bits * group + i]) << np.uint64(8 * i)
        word = word & low4 | (word & high4) << shift4
        word = word & low2 | (word & high2) << shift2
        out[group] = word & low | (word & high) << shift


def _as_words(symbols: U8) -> Array:
    words = symbols.view(np.uint64)
    return words if words.flags.aligned else words.copy()


def pack(symbols: U8, bits: int) -> U8:
    """Pack symbols below `2**bits` into a stream of bits, the lowest bit of the first symbol first.

    Args:
        symbols: uint8[n].
        bits: 1..8.

    Returns:
        uint8[ceil(n * bits / 8)]; bits after the last symbol are zero.
    """
    check_bits(bits)
    check_array("symbols", symbols, np.uint8)
    check_below("symbols", symbols, 1 << bits)
    whole = symbols.size // 8 * 8
    path, out = native.path_index(), np.empty((symbols.size * bits + 7) // 8, np.uint8)
    if path >= 0:
        sketches.pack(path, symbols, bits, out)
        return out
    _pack(_as_words(symbols[:whole]), bits, out[: whole // 8 * bits])
    if whole < symbols.size:
        last, tail = np.zeros(8, np.uint8), np.empty(bits, np.uint8)
        last[: symbols.size - whole] = symbols[whole:]
        _pack(last.view(np.uint64), bits, tail)
        out[whole // 8 * bits :] = tail[: out.size - whole // 8 * bits]
    return out


def unpack(packed: U8, bits: int, out: U8) -> None:
    """Invert `pack`: fill `out`, uint8[n], from uint8[ceil(n * bits / 8)]."""
    check_bits(bits)
    check_output("out", out, np.uint8, (out.size,))
    check_array("packed", packed, np.uint8, ((out.size * bits + 7) // 8,))
    path = native.path_index()
    if path >= 0:
        native.raise_error(not native.unpack(path, packed, bits, out))
        return
    whole = out.size // 8 * 8
    words = _as_words(out[:whole])
    _unpack(packed[: whole // 8 * bits], bits, words)
    if not np.shares_memory(words, out):
        out[:whole] = words.view(np.uint8)
    if whole < out.size:
        last, tail = np.empty(8, np.uint8), np.zeros(bits, np.uint8)
        rest = packed[whole // 8 * bits :]
        tail[: rest.size] = rest
        _unpack(tail, bits, last.view(np.uint64))
        out[whole:] = last[: out.size - whole]
