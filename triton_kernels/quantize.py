"""Quantization of elements to codes, with refinement inside the cells of the codes in the same pass."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsq_ckpt.kernels.backend import Refinement
from dsq_ckpt.kernels.checks import check_bits
from dsq_ckpt.kernels.keys import KeyWindow

from .checks import FLOATS, Faults, check_entries, check_flat, check_rows, check_tensor, collect_faults, fp32_scale
from .compaction import empty_tally
from .index_bounds import clamp_index
from .keys import MAGNITUDE, bin_of, fp32_bits, is_negative, scale_elements
from .launch import launch, parts, slice_elements, slice_tiles


def quantize(
    x: torch.Tensor, parent: torch.Tensor | None, context: int, lo: int, hi: int, inv_scale: float, table: torch.Tensor,
    codes: torch.Tensor, refinement: Refinement | None = None, protected_code: int = -1, faults: Faults | None = None,
) -> torch.Tensor | None:
    """Set `codes[i] = table[parent code, bin]`.

    Args:
        x: float32[n], bfloat16[n] or float16[n].
        parent: previous codes, uint8[n]; None: all elements use row `context`.
        context: row of the table, without `parent`.
        lo, hi: the window of magnitude keys.
        inv_scale: multiplies `x` in fp32 before its key is taken.
        table: uint8[rows, size].
        codes: uint8[n], filled.
        refinement: arguments of `refine`, whose symbols are filled in the same pass; None: no symbols.
        protected_code: code to count for `gather_protected`; -1: none.
        faults: where codes past the end of a table are marked.

    Returns:
        With `protected_code`, the number of elements of each tile that have it, int32, for `gather_protected` of
        these codes as long as they are not changed. Else None.

    Raises:
        ValueError: a shape, dtype or device is wrong, a number is out of range, or there is no such row;
            without `faults` also a previous code past its last row, or a code past the cells.
    """
    window, n = KeyWindow(lo, hi), x.numel()
    check_flat("x", x, FLOATS)
    check_rows("table", table, torch.uint8, x, parent, context, window.size)
    check_tensor("codes", codes, torch.uint8, (n,), like=x)
    factor = fp32_scale(inv_scale)
    low, inv_width, bits, log_domain, out = refinement or (None, None, 0, False, None)
    if refinement is not None:
        _check_cells(x, *refinement)
    tally = empty_tally(codes) if 0 <= protected_code < 256 else None
    rows = table if parent is not None else table[context]
    cells = 256 if low is None or inv_width is None else min(low.numel(), inv_width.numel())
    with collect_faults(faults, x.device) as collected:
        for part in parts(n):
            launch(
                _quantize, (part.tiles,), x[part.elements], slice_elements(parent, part), part.n, lo, hi, factor, rows,
                table.shape[0], codes[part.elements], low, inv_width, cells, slice_elements(out, part), protected_code,
                slice_tiles(tally, part), collected.flag("parent"), collected.flag("codes"), BITS=bits, LOG=log_domain,
            )
    return tally


def refine(
    x: torch.Tensor, codes: torch.Tensor, inv_scale: float, low: torch.Tensor, inv_width: torch.Tensor, bits: int,
    log_domain: bool, out: torch.Tensor, faults: Faults | None = None,
) -> None:
    """Quantize the position of each element inside its cell to `bits` bits; formula: `kernels.refine`.

    Args:
        x: float32[n], bfloat16[n] or float16[n].
        codes: uint8[n].
        inv_scale: multiplies `x` in fp32.
        low: lower edge of each cell, float64, one per code.
        inv_width: one over the width of each cell, float64; 0: the cell is not refined.
        bits: 1..8.
        log_domain: whether places are those of magnitude bits.
        out: uint8[n], filled.
        faults: where codes past the cells are marked.

    Raises:
        ValueError: a shape, dtype or device is wrong, or a number is out of range; without `faults` also a code.
    """
    check_flat("x", x, FLOATS)
    check_tensor("codes", codes, torch.uint8, (x.numel(),), like=x)
    _check_cells(x, low, inv_width, bits, log_domain, out)
    factor, cells = fp32_scale(inv_scale), min(low.numel(), inv_width.numel())
    with collect_faults(faults, x.device) as collected:
        for part in parts(x.numel()):
            launch(
                _refine, (part.tiles,), x[part.elements], codes[part.elements], part.n, factor, low, inv_width, cells,
                out[part.elements], collected.flag("codes"), BITS=bits, LOG=log_domain,
            )


def _check_cells(
    x: torch.Tensor, low: torch.Tensor, inv_width: torch.Tensor, bits: int, log_domain: bool, out: torch.Tensor
) -> None:
    check_bits(bits)
    check_tensor("low", low, torch.float64, (low.numel(),), like=x)
    check_tensor("inv_width", inv_width, torch.float64, (inv_width.numel(),), like=x)
    check_entries("low and inv_width", min(low.numel(), inv_width.numel()))
    check_tensor("out", out, torch.uint8, (x.numel(),), like=x)


@triton.jit
def cell_symbol(value, code, low, inv_width, BITS: tl.constexpr, LOG: tl.constexpr):
    """Return the symbol of a scaled element: `clip(floor((u - low) * (inv_width * 2**BITS)), 0, 2**BITS - 1)`."""
    # In the bits domain in units of 2**-23.
    u = (fp32_bits(value) & MAGNITUDE).to(tl.float64) * 1.1920928955078125e-07 if LOG else value.to(tl.float64)
    t = (u - tl.load(low + code)) * (tl.load(inv_width + code) * (1 << BITS))
    t = tl.where(t > 0, t, 0.0)  # NaN too
    top = (1 << BITS) - 1
    return tl.where(t < top, t, top).to(tl.int32).to(tl.uint8)


@triton.jit(
    do_not_specialize=["lo", "hi", "rows", "cells", "protected_code"],
    do_not_specialize_on_alignment=["table", "low", "inv_width", "tally", "parent_fault", "code_fault"],
)
def _quantize(
    x, parent, n, lo, hi, factor, table, rows, codes, low, inv_width, cells, symbols, protected_code, tally,
    parent_fault, code_fault, BITS: tl.constexpr, LOG: tl.constexpr, TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    offsets = tile * TILE + tl.arange(0, TILE)
    mask = offsets < n
    raw = tl.load(x + offsets, mask=mask, other=0)
    value = scale_elements(raw, factor)
    entry = bin_of(fp32_bits(value) & MAGNITUDE, is_negative(raw), lo, hi)
    if parent is not None:
        parent_code = tl.load(parent + offsets, mask=mask, other=0).to(tl.int32)
        entry += clamp_index(parent_code, rows, parent_fault) * (2 * (hi - lo + 3))
    code = tl.load(table + entry)
    tl.store(codes + offsets, code, mask=mask)
    code_i32 = code.to(tl.int32)
    if BITS:
        cell = clamp_index(tl.where(mask, code_i32, 0), cells, code_fault)
        symbol = cell_symbol(value, cell, low, inv_width, BITS, LOG)
        tl.store(symbols + offsets, symbol, mask=mask)
    if tally is not None:
        tl.store(tally + tile, tl.sum((mask & (code_i32 == protected_code)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["cells"], do_not_specialize_on_alignment=["low", "inv_width", "fault"])
def _refine(
    x, codes, n, factor, low, inv_width, cells, symbols, fault, BITS: tl.constexpr, LOG: tl.constexpr,
    TILE: tl.constexpr,
):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = offsets < n
    value = scale_elements(tl.load(x + offsets, mask=mask, other=0), factor)
    code = clamp_index(tl.load(codes + offsets, mask=mask, other=0).to(tl.int32), cells, fault)
    tl.store(symbols + offsets, cell_symbol(value, code, low, inv_width, BITS, LOG), mask=mask)
