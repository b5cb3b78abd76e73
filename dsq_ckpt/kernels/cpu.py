"""Kernels on the CPU: in C (`native`) where there is a compiled library, else in Numba, with the same results.

All arrays are C-contiguous, and one-dimensional unless documented otherwise; `x` is float32[n]. `inv_scale`
multiplies `x` in fp32 before its key is taken. `parent` holds the previous codes, uint8[n]; where it is
`None` every element uses row `context` of the table. Wrong dtypes or shapes, and codes past the end of a table,
raise `ValueError`.

Notes on the speed of Numba's:

* Data is processed in blocks of a few thousand elements. A first loop computes the table index of every
  element of the block into a small buffer; it has no branch and no lookup, so LLVM turns it into vector code.
  A second, scalar loop does the lookups.
* The scalar loops are bound by the number of memory operations, so they load two 32-bit indices at once.
  Indices are unsigned, so that Numba does not test for negative (wrapping) ones.
* Equal neighbours would make each histogram increment wait for the store of the one before it. Alternating
  between two histograms breaks most of these chains.
* No kernel starts threads, and all release the GIL: the caller decides how many cores are used.

Decoding, from codes to values, is in `cpu_decode`.
"""

from __future__ import annotations

import numpy as np

from dsq_ckpt import native
from dsq_ckpt.core.arrays import F32, F64, I64, U8, U32
from dsq_ckpt.kernels.checks import check_array, check_below, check_bits, check_output, check_rows, scale_factor
from dsq_ckpt.kernels.cpu_decode import dequantize, dequantize_refined, find_positions, from_bf16, to_bf16
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.kernels.keys import NON_FINITE, SHIFT, KeyWindow
from dsq_ckpt.native import sketches

__all__ = [
    "count_octaves",
    "dequantize",
    "dequantize_refined",
    "from_bf16",
    "gather_protected",
    "joint_sketch",
    "quantize",
    "refine",
    "sketch",
    "to_bf16",
]


BLOCK = 4096
"""Elements per block: 16 KiB of indices, half an L1 cache."""
KEYS = 1 << (32 - SHIFT)
"""Number of keys with the sign bit, whatever the window."""
WAYS = 2
"""Number of histograms between which `sketch` alternates."""
PIECE = 1 << 31
"""Elements counted before the uint32 histograms are emptied; they would overflow at twice that."""

_SHIFT = np.uint32(SHIFT)
_KEY_MASK = np.int32((1 << (31 - SHIFT)) - 1)
_NON_FINITE = np.int32(NON_FINITE)
_HALF = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)


@jit
def scaled_bits(x, inv_scale, buffer):  # type: ignore[no-untyped-def]
    """Return the fp32 bits of `x * inv_scale`, in `buffer` (float32) or, for the factor 1, in place."""
    if inv_scale == np.float32(1.0):
        return x.view(np.uint32)
    for i in range(x.size):
        buffer[i] = x[i] * inv_scale
    return buffer[: x.size].view(np.uint32)


@jit
def compute_indices(bits, parent, start, lo, hi, index):  # type: ignore[no-untyped-def]
    """Write `parent * size + KeyWindow.bin_of` of each fp32 number to `index` (uint32); parent may be None.

    Every step is cast back to 32 bits: Numba's integer sums are 64 bits wide, half as many per vector.
    """
    under = np.int32(lo - 1)
    top = np.int32(hi - lo + 1)
    per_sign = np.int32(hi - lo + 3)
    size = np.int32(2 * per_sign)
    for i in range(bits.size):
        key = np.int32(bits[i] >> _SHIFT)
        magnitude = np.int32(key & _KEY_MASK)
        inside = min(max(np.int32(magnitude - under), np.int32(0)), top)
        special = np.int32(1) if magnitude >= _NON_FINITE else np.int32(0)
        negative = per_sign if key > _KEY_MASK else np.int32(0)
        bin_ = np.int32(np.int32(inside + special) + negative)
        if parent is not None:
            parent_code = np.int32(parent[np.uint64(start) + np.uint64(i)])
            bin_ = np.int32(bin_ + np.int32(parent_code * size))
        index[i] = np.uint32(bin_)


@jit
def _count_bins(x, parent, lo, hi, inv_scale, counts):  # type: ignore[no-untyped-def]
    """Add to the bins of a window, `counts` int64[rows * size]."""
    buffer = np.empty(BLOCK, np.float32)
    index = np.empty(BLOCK, np.uint32)
    pairs = index.view(np.uint64)
    for start in range(0, x.size, BLOCK):
        bits = scaled_bits(x[start : start + BLOCK], inv_scale, buffer)
        compute_indices(bits, parent, start, lo, hi, index)
        fours = bits.size // 4
        for i in range(fours):
            first_pair, second_pair = pairs[2 * np.uint64(i)], pairs[2 * np.uint64(i) + np.uint64(1)]
            counts[first_pair & _LOW_HALF] += 1
            counts[first_pair >> _HALF] += 1
            counts[second_pair & _LOW_HALF] += 1
            counts[second_pair >> _HALF] += 1
        for j in range(4 * fours, bits.size):
            counts[index[j]] += 1


@jit
def _count_keys(x, inv_scale, ways):  # type: ignore[no-untyped-def]
    """Count keys with sign in `ways`, uint32[2, KEYS]; `x` has even length and is 8-byte aligned."""
    buffer = np.empty(BLOCK, np.float32)
    even, odd = ways[0], ways[1]
    one = np.uint32(1)
    low_shift, high_shift, mask = np.uint64(SHIFT), np.uint64(SHIFT + 32), np.uint64(KEYS - 1)
    for start in range(0, x.size, BLOCK):
        pairs = scaled_bits(x[start : start + BLOCK], inv_scale, buffer).view(np.uint64)
        twos = pairs.size // 2
        for i in range(twos):
            first, second = pairs[2 * np.uint64(i)], pairs[2 * np.uint64(i) + np.uint64(1)]
            even[(first >> low_shift) & mask] += one
            odd[first >> high_shift] += one
            even[(second >> low_shift) & mask] += one
            odd[second >> high_shift] += one
        for j in range(2 * twos, pairs.size):
            even[(pairs[j] >> low_shift) & mask] += one
            odd[pairs[j] >> high_shift] += one


def _add_key_counts(ways: U32, window: KeyWindow, counts: I64) -> None:
    """Add the histogram of all keys to the bins of a window."""
    # axis: sign, magnitude key
    keys = ways.sum(axis=0, dtype=np.int64).reshape(2, KEYS // 2)
    bins = counts.reshape(2, window.n)
    bins[:, 0] += keys[:, : window.lo].sum(axis=1)
    bins[:, 1:-2] += keys[:, window.lo : window.hi]
    bins[:, -2] += keys[:, window.hi : NON_FINITE].sum(axis=1)
    bins[:, -1] += keys[:, NON_FINITE:].sum(axis=1)


def sketch(x: F32, lo: int, hi: int, inv_scale: float, counts: I64) -> None:
    """Add the elements of `x` to `counts`, int64[size], of the window `[lo, hi)`."""
    window = KeyWindow(lo, hi)
    check_array("x", x, np.float32, (x.size,))
    check_output("counts", counts, np.int64, (window.size,))
    path, factor, few = native.path_index(), scale_factor(inv_scale), x.size < 4 * KEYS
    if path >= 0:
        if few:
            sketches.count_bins(path, x, factor, lo, hi, None, counts[None])
        else:
            sketches.count_keys(path, x, factor, lo, hi, counts)
        return
    if few:  # for all keys to pay off
        _count_bins(x, None, lo, hi, factor, counts)
        return
    first = x.ctypes.data // 4 % 2
    last = x.size - (x.size - first) % 2
    for ragged in (x[:first], x[last:]):
        _count_bins(ragged, None, lo, hi, factor, counts)
    for start in range(first, last, PIECE):
        ways = np.zeros((WAYS, KEYS), np.uint32)
        _count_keys(x[start : min(start + PIECE, last)], factor, ways)
        _add_key_counts(ways, window, counts)


def joint_sketch(
    x: F32, parent: U8 | None, context: int, lo: int, hi: int, inv_scale: float, counts: I64
) -> None:
    """Add the pairs (parent code, bin) to `counts`, int64[rows, size]; undefined after an error."""
    window = KeyWindow(lo, hi)
    check_array("x", x, np.float32, (x.size,))
    check_output("counts", counts, np.int64, counts.shape)
    path, factor = native.path_index(), scale_factor(inv_scale)
    check_rows("counts", counts, parent, context, x.size, window.size, below=path < 0)
    if parent is None:
        sketch(x, lo, hi, inv_scale, counts[context])
    elif path >= 0:
        try:
            sketches.count_bins(path, x, factor, lo, hi, parent, counts)
        except ValueError:  # C looks at the codes while they are in the cache
            check_below("parent", parent, len(counts))
            raise
    else:
        _count_bins(x, parent, lo, hi, factor, counts.reshape(-1))


@jit
def _count_octaves(bits, ways):  # type: ignore[no-untyped-def]
    """Count the top nine bits in `ways`, int64[4, 512], by turns: most numbers of a tensor share few octaves."""
    first, second, third, fourth = ways[0], ways[1], ways[2], ways[3]
    shift, fours = np.uint32(23), bits.size // 4
    for i in range(fours):
        offset = 4 * np.uint64(i)
        first[bits[offset] >> shift] += 1
        second[bits[offset + np.uint64(1)] >> shift] += 1
        third[bits[offset + np.uint64(2)] >> shift] += 1
        fourth[bits[offset + np.uint64(3)] >> shift] += 1
    for j in range(4 * fours, bits.size):
        first[bits[j] >> shift] += 1


def count_octaves(x: F32, counts: I64) -> None:
    """Add the elements of `x` to `counts`, int64[512], by sign and biased exponent, the top bits of a float."""
    check_array("x", x, np.float32, (x.size,))
    check_output("counts", counts, np.int64, (512,))
    if native.path_index() >= 0:
        sketches.count_octaves(x, counts)
        return
    ways = np.zeros((4, 512), np.int64)
    _count_octaves(x.view(np.uint32), ways)
    counts += ways.sum(axis=0)


@jit
def _look_up(x, parent, lo, hi, inv_scale, table, codes):  # type: ignore[no-untyped-def]
    """Look up `codes` in `table`, uint8[rows * size]."""
    buffer = np.empty(BLOCK, np.float32)
    index = np.empty(BLOCK, np.uint32)
    pairs = index.view(np.uint64)
    for start in range(0, x.size, BLOCK):
        bits = scaled_bits(x[start : start + BLOCK], inv_scale, buffer)
        compute_indices(bits, parent, start, lo, hi, index)
        out = codes[start : start + BLOCK]
        fours = bits.size // 4
        for i in range(fours):
            first_pair, second_pair = pairs[2 * np.uint64(i)], pairs[2 * np.uint64(i) + np.uint64(1)]
            offset = 4 * np.uint64(i)
            out[offset] = table[first_pair & _LOW_HALF]
            out[offset + np.uint64(1)] = table[first_pair >> _HALF]
            out[offset + np.uint64(2)] = table[second_pair & _LOW_HALF]
            out[offset + np.uint64(3)] = table[second_pair >> _HALF]
        for j in range(4 * fours, bits.size):
            out[j] = table[index[j]]


def quantize(
    x: F32, parent: U8 | None, context: int, lo: int, hi: int, inv_scale: float, table: U8, codes: U8
) -> None:
    """Set `codes[i] = table[parent code, bin]`, with table uint8[rows, size] and codes uint8[n]."""
    window = KeyWindow(lo, hi)
    check_array("x", x, np.float32, (x.size,))
    check_array("table", table, np.uint8)
    check_output("codes", codes, np.uint8, (x.size,))
    check_rows("table", table, parent, context, x.size, window.size)
    path, factor = native.path_index(), scale_factor(inv_scale)
    if path >= 0:
        none = np.empty(0, np.uint8)
        native.raise_error(
            not native.quantize(path, x, factor, lo, hi, table, parent, context, codes, 0, False, None, 0, none)
        )
        return
    rows = table[context] if parent is None else table.reshape(-1)
    _look_up(x, parent, lo, hi, factor, rows, codes)


def gather_protected(x: F32, codes: U8, protected_code: int) -> U32:
    """Return the fp32 bits of the elements whose code is `protected_code` (-1: none), in order: uint32[m]."""
    check_array("x", x, np.float32, (x.size,))
    check_array("codes", codes, np.uint8, (x.size,))
    bits: U32 = x.view(np.uint32)[find_positions(codes, protected_code)]
    return bits


@jit
def _cell_symbol(u, low, steps, top):  # type: ignore[no-untyped-def]
    """Return `clip(floor((u - low) * steps), 0, top)`; 0 for NaN."""
    t = (u - low) * steps
    t = t if t > 0.0 else 0.0
    return np.uint8(np.int32(t if t < top else top))


@jit
def _refine_linear(x, codes, inv_scale, low, steps, top, out):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        out[i] = _cell_symbol(np.float64(x[i] * inv_scale), low[codes[i]], steps[codes[i]], top)


@jit
def _refine_bits(x, codes, inv_scale, low, steps, top, out):  # type: ignore[no-untyped-def]
    buffer = np.empty(BLOCK, np.float32)
    for start in range(0, x.size, BLOCK):
        bits = scaled_bits(x[start : start + BLOCK], inv_scale, buffer)
        block, target = codes[start : start + BLOCK], out[start : start + BLOCK]
        for i in range(bits.size):
            u = np.float64(np.int32(bits[i] & np.uint32(0x7FFFFFFF)))
            target[i] = _cell_symbol(u, low[block[i]], steps[block[i]], top)


def _lower_and_steps(low: F64, inv_width: F64, bits: int, log_domain: bool) -> tuple[F64, F64]:
    """Return the lower edges of cells, and one over the widths of their 2**bits parts, for `refine`.

    In the log domain they are in units of one bit of a magnitude, so that no loop scales values: multiplication by a
    power of two is exact.
    """
    check_bits(bits)
    unit = 2.0**23 if log_domain else 1.0
    lower: F64 = np.ascontiguousarray(low, np.float64) * unit
    steps: F64 = np.ascontiguousarray(inv_width, np.float64) * (2.0**bits / unit)
    return lower, steps


def parts_of_cells(low: F64, inv_width: F64, bits: int, log_domain: bool) -> F64:
    """Return both of up to 256 codes, as the compiled library takes them: float64[256, 2], zeros for other codes."""
    parts = np.zeros((256, 2))
    for column, numbers in enumerate(_lower_and_steps(low, inv_width, bits, log_domain)):
        parts[: len(numbers), column] = numbers
    return parts


def refine(
    x: F32, codes: U8, inv_scale: float, low: F64, inv_width: F64, bits: int, log_domain: bool, out: U8
) -> None:
    """Quantize the position of each element inside its cell to `bits` bits.

    With `u` the scaled element, or in the bits domain its magnitude bits over `2**23`, and `c` its
    code: `out = clip(floor((u - low[c]) * inv_width[c] * 2**bits), 0, 2**bits - 1)`. A cell with
    `inv_width` 0 is not refined: its symbol is 0. So is the symbol of NaN.

    Args:
        low: lower edge of each cell, float64[256] (float32 is accepted), in units of the domain.
        inv_width: one over the width of each cell, likewise.
        bits: 1..8.
        out: uint8[n].
    """
    check_array("x", x, np.float32, (x.size,))
    check_array("codes", codes, np.uint8, (x.size,))
    check_output("out", out, np.uint8, (x.size,))
    check_below("codes", codes, min(low.size, inv_width.size))
    path, factor = native.path_index(), scale_factor(inv_scale)
    if path >= 0:
        cells = parts_of_cells(low, inv_width, bits, log_domain)
        sketches.refine(path, x, factor, codes, bits, log_domain, cells, min(low.size, inv_width.size), out)
        return
    lower, steps = _lower_and_steps(low, inv_width, bits, log_domain)
    kernel = _refine_bits if log_domain else _refine_linear
    kernel(x, codes, factor, lower, steps, 2.0**bits - 1, out)
