"""Bit packing in Numba; see ``reference``. Eight symbols of b bits are exactly b bytes."""

from __future__ import annotations

import numpy as np

from dsq_ckpt.core.arrays import U8
from dsq_ckpt.kernels.checks import check_array, check_below, check_bits
from dsq_ckpt.kernels.jit import jit


@jit
def _pack(symbols, bits, out):  # type: ignore[no-untyped-def]
    width = np.uint64(bits)
    for group in range(symbols.size // 8):
        word = np.uint64(0)
        for i in range(8):
            word |= np.uint64(symbols[8 * group + i]) << (np.uint64(i) * width)
        for i in range(bits):
            out[bits * group + i] = np.uint8(word >> np.uint64(8 * i))


@jit
def _unpack(packed, bits, out):  # type: ignore[no-untyped-def]
    width, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    for group in range(out.size // 8):
        word = np.uint64(0)
        for i in range(bits):
            word |= np.uint64(packed[bits * group + i]) << np.uint64(8 * i)
        for i in range(8):
            out[8 * group + i] = np.uint8((word >> (np.uint64(i) * width)) & mask)


def pack(symbols: U8, bits: int) -> U8:
    """Implement ``reference.pack``: symbols below ``2**bits`` to uint8[ceil(n * bits / 8)]."""
    check_bits(bits)
    check_array("symbols", symbols, np.uint8)
    check_below("symbols", symbols, 1 << bits)
    whole = symbols.size // 8 * 8
    out = np.empty((symbols.size * bits + 7) // 8, np.uint8)
    _pack(symbols[:whole], bits, out)
    if whole < symbols.size:
        last, tail = np.zeros(8, np.uint8), np.empty(bits, np.uint8)
        last[: symbols.size - whole] = symbols[whole:]
        _pack(last, bits, tail)
        out[whole // 8 * bits :] = tail[: out.size - whole // 8 * bits]
    return out


def unpack(packed: U8, bits: int, out: U8) -> None:
    """Implement ``reference.unpack``: fill ``out``, uint8[n], from uint8[ceil(n * bits / 8)]."""
    check_bits(bits)
    check_array("out", out, np.uint8)
    check_array("packed", packed, np.uint8, ((out.size * bits + 7) // 8,))
    whole = out.size // 8 * 8
    _unpack(packed, bits, out[:whole])
    if whole < out.size:
        last, tail = np.empty(8, np.uint8), np.zeros(bits, np.uint8)
        rest = packed[whole // 8 * bits :]
        tail[: rest.size] = rest
        _unpack(tail, bits, last)
        out[whole:] = last[: out.size - whole]
