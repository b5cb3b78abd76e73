"""Bindings of sketches.c, and of the parts of quantize.c that work on arrays of their own.

Callers check dtypes, lengths, layouts and contents; errors of C, which checks what leads outside of memory once more,
are raised as ValueError.
"""

from __future__ import annotations

import numpy as np

from dsq_ckpt.core.arrays import F32, F64, I64, U8, U16, U32
from dsq_ckpt.native import address, library, raise_error

KEYS = 1 << 15
"""Number of keys with the sign bit."""
_TABLES, _TABLE_GAP = 4, 16  # of pairs: see sketches.c


def count_bins(path: int, x: F32, inv_scale: np.float32, lo: int, hi: int, parent: U8 | None, counts: I64) -> None:
    """Add values to the bins of a window, int64[rows, size]; see `dsq_count_bins`."""
    raise_error(library().dsq_count_bins(
        path, address(x), x.size, inv_scale, lo, hi, address(parent), len(counts), address(counts)
    ))


def count_keys(path: int, x: F32, inv_scale: np.float32, lo: int, hi: int, counts: I64) -> None:
    """Add many values to the bins of a window, int64[size]; see `dsq_count_keys`."""
    ways = np.empty(2 * KEYS, np.uint32)
    raise_error(library().dsq_count_keys(
        path, address(x), x.size, inv_scale, lo, hi, address(ways), address(counts)
    ))


def count_octaves(x: F32, counts: I64) -> None:
    """Add values to int64[512] by their top nine bits; see `dsq_count_octaves`."""
    library().dsq_count_octaves(address(x), x.size, address(counts))


def count_pairs(path: int, contexts: U8, symbols: U8, rows: int, bits: int, counts: I64) -> None:
    """Add pairs to int64[256, 256]; see `dsq_count_pairs`."""
    tables = np.zeros(_TABLES * ((rows << bits) + _TABLE_GAP), np.uint32)
    raise_error(library().dsq_count_pairs(
        path, address(contexts), address(symbols), symbols.size, rows, bits, address(tables),
        address(counts),
    ))


def find_positions(path: int, codes: U8, code: int) -> I64:
    """Return the positions of a code; see `dsq_find_positions`."""
    positions = np.empty(count_code(path, codes, code), np.int64)
    found: int = positions.size
    if found:
        found = library().dsq_find_positions(
            path, address(codes), codes.size, code, address(positions), positions.size
        )
    raise_error(found - positions.size)
    return positions


def count_code(path: int, codes: U8, code: int) -> int:
    """Return the number of codes equal to one of them; see `dsq_find_positions`."""
    count: int = library().dsq_find_positions(path, address(codes), codes.size, code, None, 0)
    return count


def to_bf16(path: int, bits: U32, out: U16) -> None:
    """Round fp32 bits to bf16; see `dsq_to_bf16`."""
    raise_error(library().dsq_to_bf16(path, address(bits), bits.size, address(out)))


def from_bf16(path: int, halves: U16, out: U32) -> None:
    """Convert bf16 to fp32 bits; see `dsq_from_bf16`."""
    raise_error(library().dsq_from_bf16(path, address(halves), halves.size, address(out)))


def refine(
    path: int, x: F32, inv_scale: np.float32, codes: U8, bits: int, of_bits: bool, cells: F64, n_cells: int, out: U8
) -> None:
    """Set the refinement symbols of values whose codes are known; see `dsq_refine`."""
    raise_error(library().dsq_refine(
        path, address(x), x.size, inv_scale, address(codes), bits, of_bits, address(cells),
        n_cells, address(out),
    ))


def pack(path: int, symbols: U8, bits: int, out: U8) -> None:
    """Pack symbols; see `dsq_pack`."""
    raise_error(
        library().dsq_pack(path, address(symbols), symbols.size, bits, address(out))
    )
