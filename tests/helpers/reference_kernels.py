"""NumPy implementations of the kernels, written to be read next to their formulas; all others are compared with them.

`dsq_ckpt.kernels.cpu`, `cpu_decode` and `cpu_pack` state the formulas.

All arrays are C-contiguous, and one-dimensional unless documented otherwise; `x` is float32[n]. `inv_scale`
multiplies `x` in fp32 before its key is taken. `parent` holds the previous codes, uint8[n]; where it is
`None` every element uses row `context` of the table. Wrong dtypes or shapes, and codes past the end of a table,
raise `ValueError`.
"""

from __future__ import annotations

import numpy as np

from dsq_ckpt.core.arrays import F32, F64, I64, U8, U16, U32
from dsq_ckpt.kernels.checks import check_array, check_below, check_bits, check_rows, scale_factor
from dsq_ckpt.kernels.keys import KeyWindow


def _scale(x: F32, inv_scale: float) -> F32:
    check_array("x", x, np.float32, (x.size,))
    factor = scale_factor(inv_scale)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x * factor


def sketch(x: F32, lo: int, hi: int, inv_scale: float, counts: I64) -> None:
    """Add the elements of `x` to `counts`, int64[size], of the window `[lo, hi)`."""
    window = KeyWindow(lo, hi)
    check_array("counts", counts, np.int64, (window.size,))
    counts += np.bincount(window.bin_of(_scale(x, inv_scale)), minlength=window.size)


def joint_sketch(
    x: F32, parent: U8 | None, context: int, lo: int, hi: int, inv_scale: float, counts: I64
) -> None:
    """Add the pairs (parent code, bin) to `counts`, int64[rows, size]."""
    window = KeyWindow(lo, hi)
    check_array("counts", counts, np.int64)
    check_rows("counts", counts, parent, context, x.size, window.size)
    rows = context if parent is None else parent.astype(np.int64)
    pairs = rows * window.size + window.bin_of(_scale(x, inv_scale))
    counts += np.bincount(pairs, minlength=counts.size).reshape(counts.shape)


def count_octaves(x: F32, counts: I64) -> None:
    """Add the elements of `x` to `counts`, int64[512], by sign and biased exponent, the top bits of a float."""
    check_array("x", x, np.float32, (x.size,))
    check_array("counts", counts, np.int64, (512,))
    counts += np.bincount(x.view(np.uint32) >> 23, minlength=512)


def quantize(
    x: F32, parent: U8 | None, context: int, lo: int, hi: int, inv_scale: float, table: U8, codes: U8
) -> None:
    """Set `codes[i] = table[parent code, bin]`, with table uint8[rows, size] and codes uint8[n]."""
    window = KeyWindow(lo, hi)
    check_array("table", table, np.uint8)
    check_array("codes", codes, np.uint8, (x.size,))
    check_rows("table", table, parent, context, x.size, window.size)
    codes[:] = table[context if parent is None else parent, window.bin_of(_scale(x, inv_scale))]


def gather_protected(x: F32, codes: U8, protected_code: int) -> U32:
    """Return the fp32 bits of the elements whose code is `protected_code` (-1: none), in order: uint32[m]."""
    check_array("x", x, np.float32, (x.size,))
    check_array("codes", codes, np.uint8, (x.size,))
    bits: U32 = x.view(np.uint32)[codes.astype(np.int64) == protected_code]
    return bits


def refine(
    x: F32, codes: U8, inv_scale: float, low: F64, inv_width: F64, bits: int, log_domain: bool, out: U8
) -> None:
    """Do what `cpu.refine` documents."""
    check_bits(bits)
    check_array("codes", codes, np.uint8, (x.size,))
    check_array("out", out, np.uint8, (x.size,))
    check_below("codes", codes, min(low.size, inv_width.size))
    scaled = _scale(x, inv_scale)
    u = scaled.astype(np.float64)
    if log_domain:
        u = (scaled.view(np.uint32) & np.uint32(0x7FFFFFFF)) / 2.0**23
    with np.errstate(over="ignore", invalid="ignore"):
        t = (u - low[codes].astype(np.float64)) * (inv_width[codes] * np.float64(2.0**bits))
    t = np.where(t > 0.0, t, 0.0)
    out[:] = np.where(t < 2.0**bits - 1, t, 2.0**bits - 1).astype(np.uint8)


def _fill_protected(codes: U8, protected_code: int, protected: F32, out: F32) -> int:
    positions = np.flatnonzero(codes.astype(np.int64) == protected_code)
    filled = positions[: protected.size]
    out[filled] = protected[: filled.size]
    return int(positions.size)


def dequantize(codes: U8, levels: F32, scale: float, protected_code: int, protected: F32, out: F32) -> int:
    """Do what `cpu_decode.dequantize` documents."""
    check_array("codes", codes, np.uint8)
    check_array("protected", protected, np.float32)
    check_array("out", out, np.float32, codes.shape)
    check_below("codes", codes, levels.size)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out[:] = levels.astype(np.float32)[codes] * np.float32(scale)
    return _fill_protected(codes, protected_code, protected, out)


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
    """Do what `cpu_decode.dequantize_refined` documents."""
    check_bits(bits)
    check_array("codes", codes, np.uint8)
    check_array("refinement", refinement, np.uint8, codes.shape)
    check_array("protected", protected, np.float32)
    check_array("out", out, np.float32, codes.shape)
    check_below("codes", codes, min(low.size, width.size, sign.size, levels.size))
    check_below("refinement", refinement, 1 << bits)
    part_width = width.astype(np.float64)[codes] / 2.0**bits
    u = low.astype(np.float64)[codes] + (refinement + 0.5) * part_width
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if log_domain:
            magnitude = np.clip(np.rint(u * 2.0**23), 0.0, 2.0**31 - 1).astype(np.uint32).view(np.float32)
            value = np.where(sign[codes] < 0, -magnitude, magnitude)
        else:
            value = u.astype(np.float32)
        value = np.where(width[codes] != 0, value, levels.astype(np.float32)[codes])
        out[:] = value * np.float32(scale)
    return _fill_protected(codes, protected_code, protected, out)


def to_bf16(bits: U32) -> U16:
    """Round fp32 bits, uint32[m], to bf16 bits, uint16[m]: nearest, ties to even; NaN stays (quiet) NaN."""
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(halves: U16) -> F32:
    """Convert bf16 bits, uint16[m], to float32[m], exactly."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def pack(symbols: U8, bits: int) -> U8:
    """Do what `cpu_pack.pack` documents."""
    check_bits(bits)
    check_array("symbols", symbols, np.uint8)
    check_below("symbols", symbols, 1 << bits)
    stream = np.unpackbits(symbols[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(stream, bitorder="little")


def unpack(packed: U8, bits: int, out: U8) -> None:
    """Invert `pack`: fill `out`, uint8[n], from uint8[ceil(n * bits / 8)]."""
    check_bits(bits)
    check_array("out", out, np.uint8)
    check_array("packed", packed, np.uint8, ((out.size * bits + 7) // 8,))
    stream = np.unpackbits(packed, count=out.size * bits, bitorder="little")
    out[:] = np.packbits(stream.reshape(-1, bits), axis=1, bitorder="little").reshape(-1)
