"""Codes and packed refinement symbols of values, in one pass over the data; `values` is the way back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dsq_ckpt import kernels, native
from dsq_ckpt.core.arrays import F32, F64, U8
from dsq_ckpt.kernels.checks import check_array, check_output, scale_factor
from dsq_ckpt.kernels.cpu import parts_of_cells
from dsq_ckpt.kernels.keys import KeyWindow


@dataclass(frozen=True)
class RefinedCells:
    """Cells of codes, each divided into 2**bits parts of equal width.

    Attributes:
        low, inv_width: lower edge and one over the width of the cell of each code, float64[k], k at most 256, as for
            `kernels.refine`.
        bits: 1..8.
        log_domain: whether cells are of magnitude bits over 2**23, not of values.
    """

    low: F64
    inv_width: F64
    bits: int
    log_domain: bool

    @cached_property
    def parts(self) -> F64:
        """Lower edge and one over the width of a part, in units of one bit in the log domain: float64[256, 2]."""
        return parts_of_cells(self.low, self.inv_width, self.bits, self.log_domain)

    def refine(self, x: F32, codes: U8, inv_scale: float) -> U8:
        """Return the packed symbols of values whose codes are known, uint8[ceil(n * bits / 8)]."""
        symbols = np.empty_like(codes)
        kernels.refine(x, codes, inv_scale, self.low, self.inv_width, self.bits, self.log_domain, symbols)
        return kernels.pack(symbols, self.bits)


def quantize(
    x: F32, parent: U8 | None, context: int, window: KeyWindow, inv_scale: float, table: U8, codes: U8,
    cells: RefinedCells | None = None,
) -> U8 | None:
    """Set the codes of values as `kernels.quantize` does, and return their refinement symbols as `kernels.pack` does.

    Args:
        x: float32[n].
        parent: previous codes, uint8[n]; None: every value has the row `context` of the table.
        context: row of the table.
        window: key window of the table's rows.
        inv_scale: factor that multiplies values before anything else.
        table: uint8[rows, window.size].
        codes: output, uint8[n]; undefined after an error.
        cells: cells to refine; None: there is no refinement.

    Returns:
        uint8[ceil(n * bits / 8)], or None without cells.

    Raises:
        ValueError: a previous code has no row, a code has no cell, or arrays do not match.
    """
    check_array("x", x, np.float32, (x.size,))
    check_array("table", table, np.uint8, (len(table), window.size))
    check_output("codes", codes, np.uint8, (x.size,))
    if parent is not None:
        check_array("parent", parent, np.uint8, (x.size,))
    path, factor = native.path_index(), scale_factor(inv_scale)
    if path >= 0:
        parts, n_cells, bits, log = (None, 0, 0, False) if cells is None else (
            cells.parts, min(cells.low.size, cells.inv_width.size), cells.bits, cells.log_domain
        )
        packed = np.empty((x.size * bits + 7) // 8, np.uint8)
        if native.quantize(
            path, x, factor, window.lo, window.hi, table, parent, context, codes, bits, log, parts, n_cells, packed
        ):
            return None if cells is None else packed
    kernels.quantize(x, parent, context, window.lo, window.hi, inv_scale, table, codes)
    return None if cells is None else cells.refine(x, codes, inv_scale)
