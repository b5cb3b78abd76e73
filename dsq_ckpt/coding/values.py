"""Look-up of values in a table by code and refinement symbol, in one pass over the data."""

from __future__ import annotations

import numpy as np

from dsq_ckpt import kernels, native
from dsq_ckpt.core.arrays import F32, U8
from dsq_ckpt.kernels.checks import check_array, check_below, check_output
from dsq_ckpt.kernels.cpu_decode import count_code, look_up, look_up_refined


def look_up_values(
    table: F32, codes: U8, symbols: U8 | None, packed: bool, counted: int, out: F32, last: bool = False
) -> int:
    """Look up the value of each code and symbol; return the number of codes equal to `counted`.

    Args:
        table: float32[rows, 2**bits].
        codes: uint8[n].
        symbols: uint8[n], or packed by `kernels.pack`; None without refinement, in which case `bits` is 0.
        packed: whether symbols are packed.
        counted: code to count.
        out: float32[n]; undefined after an error.
        last: whether the values are not read again soon, so that they may bypass the cache.

    Raises:
        ValueError: a code or a symbol has no entry, or arrays do not match.
    """
    rows, bits = table.shape[0], table.shape[1].bit_length() - 1
    size = codes.size if not packed else (codes.size * bits + 7) // 8
    check_array("table", table, np.float32, (rows, 1 << bits))
    check_array("codes", codes, np.uint8, (codes.size,))
    check_output("out", out, np.float32, codes.shape)
    if (symbols is not None) != (bits > 0) or not 0 <= counted < 256:
        kind = "no symbols" if symbols is None else "symbols"
        raise ValueError(f"a table of {1 << bits} entries for each code, {kind}, and the code {counted} to be counted")
    if symbols is not None:
        check_array("symbols", symbols, np.uint8, (size,))
    path = native.path_index()
    if path >= 0:
        n_counted = native.look_up_values(path, table, rows, bits, codes, symbols, packed, counted, out, last)
        if n_counted >= 0:
            return n_counted
    check_below("codes", codes, rows)
    if symbols is None:
        look_up(codes, table.reshape(-1), out)
    else:
        if packed:
            stream, symbols = symbols, np.empty(codes.size, np.uint8)
            kernels.unpack(stream, bits, symbols)
        check_below("refinement", symbols, 1 << bits)
        look_up_refined(codes, symbols, bits, table.reshape(-1), out)
    return int(count_code(codes, np.uint8(counted)))
