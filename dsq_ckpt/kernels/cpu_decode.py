"""Kernels that decode codes to values; see `cpu`."""

from __future__ import annotations

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.core.arrays import F32, F64, I64, U8, U16, U32
from dsq_ckpt.kernels.checks import check_array, check_below, check_bits, check_output
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import sketches

BLOCK = 4096
"""Elements per block."""


@jit
def count_code(codes, code):  # type: ignore[no-untyped-def]
    """Return the number of `codes` equal to `code`, both uint8."""
    total = 0
    for start in range(0, codes.size, 128):
        block = codes[start : start + 128]
        # Counters have eight bits, so that 64 fit a vector; 128 elements cannot overflow them.
        hits = np.uint8(0)
        for i in range(block.size):
            hits = np.uint8(hits + np.uint8(block[i] == code))
        total += np.int64(hits)
    return total


@jit
def _write_positions(codes, code, positions):  # type: ignore[no-untyped-def]
    """Write the positions of `code` to `positions`, which must be long enough."""
    words = np.empty(BLOCK // 8, np.uint64)
    flags = words.view(np.uint8)
    count = 0
    for start in range(0, codes.size, BLOCK):
        block = codes[start : start + BLOCK]
        used = (block.size + 7) // 8
        for i in range(block.size):
            flags[i] = np.uint8(block[i] == code)
        for i in range(block.size, 8 * used):
            flags[i] = np.uint8(0)
        # Protected elements are rare: most words are zero, which skips eight codes at a time.
        for word in range(used):
            if words[word] != 0:
                for i in range(8 * word, 8 * word + 8):
                    if flags[i]:
                        positions[count] = start + i
                        count += 1


def find_positions(codes: U8, code: int) -> I64:
    """Return the positions of `code` in `codes`, ascending, int64[m]; none for a code outside 0..255."""
    if not 0 <= code < 256:
        return np.empty(0, np.int64)
    path = native.path_index()
    if path >= 0:
        return sketches.find_positions(path, np.ascontiguousarray(codes), code)
    positions = np.empty(count_code(codes, np.uint8(code)), np.int64)
    if positions.size:
        _write_positions(codes, np.uint8(code), positions)
    return positions


def _fill_protected(codes: U8, protected_code: int, protected: F32, out: F32) -> int:
    positions = find_positions(codes, protected_code)
    filled = positions[: protected.size]
    out[filled] = protected[: filled.size]
    return int(positions.size)


@jit
def look_up(codes, values, out):  # type: ignore[no-untyped-def]
    """Set `out = values[codes]`."""
    for i in range(codes.size):
        out[i] = values[codes[i]]


def dequantize(codes: U8, levels: F32, scale: float, protected_code: int, protected: F32, out: F32) -> int:
    """Set `out = levels[code] * scale` in fp32; protected elements take the next of `protected`, unscaled.

    Args:
        codes: uint8[n].
        levels: float32, one per code.
        protected_code: the code of protected elements, -1 for none.
        protected: float32[m].
        out: float32[n].

    Returns:
        The number of codes equal to `protected_code`. The caller compares it to `m`: where it is larger, the last
        elements had no value left and hold `levels[protected_code] * scale`.
    """
    check_array("codes", codes, np.uint8)
    check_array("protected", protected, np.float32)
    check_output("out", out, np.float32, codes.shape)
    check_below("codes", codes, levels.size)
    path, table = native.path_index(), value_table(levels, scale)
    if path < 0:
        look_up(codes, table, out)
    else:
        native.raise_error(min(native.look_up_values(path, table, table.size, 0, codes, None, False, 0, out, False), 0))
    return _fill_protected(codes, protected_code, protected, out)


@jit
def look_up_refined(codes, refinement, bits, values, out):  # type: ignore[no-untyped-def]
    """Set `out = values[codes << bits | refinement]`."""
    shift = np.uint32(bits)
    for i in range(codes.size):
        out[i] = values[np.uint32(np.uint32(codes[i]) << shift) | np.uint32(refinement[i])]


def value_table(levels: F32, scale: float) -> F32:
    """Return the value of each code without refinement, by the formula of `dequantize`."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values: F32 = levels.astype(np.float32) * np.float32(scale)
    return values


def refined_value_table(
    bits: int, low: F64, width: F64, sign: F64, levels: F32, scale: float, log_domain: bool
) -> F32:
    """Return the value of each (code, symbol), by the formula of `dequantize_refined`."""
    lower, spread = low[:, None].astype(np.float64), width[:, None].astype(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        u = lower + (np.arange(1 << bits) + 0.5) * (spread / 2.0**bits)
        if log_domain:
            magnitude = np.clip(np.rint(u * 2.0**23), 0.0, 2.0**31 - 1).astype(np.uint32).view(np.float32)
            value = np.where(sign[:, None] < 0, -magnitude, magnitude)
        else:
            value = u.astype(np.float32)
        values: F32 = np.where(spread != 0, value, levels[:, None].astype(np.float32)) * np.float32(scale)
    return values


def dequantize_refined(
    codes: U8,
    refinement: U8,
    bits: int,
    low: F64,
    width: F64,
    sign: F64,
    levels: F32,
    scale: float,
    protected_code: int,
    protected: F32,
    log_domain: bool,
    out: F32,
) -> int:
    """Dequantize as `dequantize` does, to the middle of the part of the cell that the symbol selects.

    With `c` the code and `r` the refinement symbol, `u = low[c] + (r + 0.5) * (width[c] / 2**bits)` in
    fp64. Linear domain: the value is `u` rounded to fp32. Bits domain: the fp32 whose bits are `rint(u *
    2**23)`, with the sign of `sign[c]`. Cells of `width` 0 have the value `levels[c]`. Then times
    `scale` in fp32.

    Args:
        refinement: uint8[n], below `2**bits`.
        low, width, sign: float64, one per code (float32 is accepted).
    """
    check_bits(bits)
    check_array("codes", codes, np.uint8)
    check_array("refinement", refinement, np.uint8, codes.shape)
    check_array("protected", protected, np.float32)
    check_output("out", out, np.float32, codes.shape)
    check_below("codes", codes, min(low.size, width.size, sign.size, levels.size))
    check_below("refinement", refinement, 1 << bits)
    used = int(codes.max()) + 1 if codes.size else 0  # later rows are never read
    value = refined_value_table(bits, low[:used], width[:used], sign[:used], levels[:used], scale, log_domain)
    path = native.path_index()
    if path < 0:
        look_up_refined(codes, refinement, bits, value.reshape(-1), out)
    else:
        counted = native.look_up_values(path, value, used, bits, codes, refinement, False, 0, out, False)
        native.raise_error(min(counted, 0))
    return _fill_protected(codes, protected_code, protected, out)


@jit
def _to_bf16(bits, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        b = bits[i]
        high = np.uint32(b >> np.uint32(16))
        # Half of the last place kept, less one unless that place is odd: ties go to even.
        up = np.uint32(np.uint32(0x7FFF) + np.uint32(high & np.uint32(1)))
        rounded = np.uint32(b + up) >> np.uint32(16)
        nan = np.uint32(b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16(high | np.uint32(0x40)) if nan else np.uint16(rounded)


def to_bf16(bits: U32) -> U16:
    """Round fp32 bits, uint32[m], to bf16 bits, uint16[m]: nearest, ties to even; NaN stays (quiet) NaN."""
    check_array("bits", bits, np.uint32)
    path, out = native.path_index(), np.empty(bits.shape, np.uint16)
    if path < 0:
        _to_bf16(bits, out)
    else:
        sketches.to_bf16(path, bits, out)
    return out


@jit
def _from_bf16(halves, out):  # type: ignore[no-untyped-def]
    for i in range(halves.size):
        out[i] = np.uint32(halves[i]) << np.uint32(16)


def from_bf16(halves: U16) -> F32:
    """Convert bf16 bits, uint16[m], to float32[m], exactly."""
    check_array("halves", halves, np.uint16)
    path, out = native.path_index(), np.empty(halves.shape, np.uint32)
    if path < 0:
        _from_bf16(halves, out)
    else:
        sketches.from_bf16(path, halves, out)
    return out.view(np.float32)
