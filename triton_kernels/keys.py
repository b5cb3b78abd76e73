"""Device functions for fp32 bits of loaded elements, and their bins of a key window (`kernels.keys`).

Only the sign of a NaN is preserved everywhere: a GPU returns its own NaN from every operation, so signs are taken from
the element as it was loaded.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from dsq_ckpt.kernels import keys

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
SHIFT = tl.constexpr(keys.SHIFT)
NON_FINITE = tl.constexpr(keys.NON_FINITE)


@triton.jit
def as_fp32(raw):
    """Convert fp32, bf16 or fp16 to fp32, exactly."""
    if raw.dtype == tl.bfloat16:
        return (raw.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def is_negative(raw):
    """Return whether the sign bit is set, also for NaN and zero."""
    if raw.dtype == tl.float32:
        return raw.to(tl.int32, bitcast=True) < 0
    else:
        return raw.to(tl.int16, bitcast=True) < 0


@triton.jit
def fp32_bits(value):
    """Return the bits of fp32 numbers, int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def scale_elements(raw, factor):
    """Return the element times a positive fp32 factor, fp32."""
    # A factor is a Python number when interpreted; as a tensor it is fp32, compiled or interpreted.
    return as_fp32(raw) * tl.full([1], factor, tl.float32)


@triton.jit
def bin_of(magnitude, negative, lo, hi):
    """Return the bin of a window, int32, from magnitude bits and sign: `KeyWindow.bin_of`."""
    key = magnitude >> SHIFT
    inside = tl.minimum(tl.maximum(key - (lo - 1), 0), hi - lo + 1)
    special = (key >= NON_FINITE).to(tl.int32)
    return inside + special + tl.where(negative, hi - lo + 3, 0)


@triton.jit
def bin_of_element(raw, factor, lo, hi):
    """Return the bin of a loaded element, scaled."""
    return bin_of(fp32_bits(scale_elements(raw, factor)) & MAGNITUDE, is_negative(raw), lo, hi)


@triton.jit
def bf16_bits(bits):
    """Round fp32 bits to the nearest bf16 bits, int32: ties to even, but never up to infinity; NaN stays NaN."""
    high = (bits >> 16) & 0xFFFF
    rounded = ((bits + 0x7FFF + (high & 1)) >> 16) & 0xFFFF
    rounded = tl.where((rounded & 0x7FFF) == 0x7F80, rounded - 1, rounded)
    return tl.where((bits & MAGNITUDE) > INFINITY, high | 0x40, rounded)
