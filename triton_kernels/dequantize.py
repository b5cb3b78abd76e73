"""Dequantization of codes, and of refinement symbols if there are any, to values.

A value depends on its code and symbol only. So a few operations on at most 64 K numbers make a table of all values: in
fp64, rounded to fp32, scaled in fp32, then rounded to the output dtype. The pass over the elements is a lookup.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from dsq_ckpt.kernels.checks import check_bits

from .checks import FLOATS, Faults, check_entries, check_flat, check_tensor, collect_faults
from .compaction import empty_tally
from .index_bounds import clamp_index
from .launch import launch, parts, slice_elements, slice_tiles
from .protected import fill_protected


def dequantize(
    codes: torch.Tensor, levels: torch.Tensor, scale: float, protected_code: int, protected: torch.Tensor,
    out: torch.Tensor, faults: Faults | None = None,
) -> torch.Tensor:
    """Set `out = levels[code] * scale` in fp32; protected elements take the next of `protected`, unscaled.

    Args:
        codes: uint8[n].
        levels: float32, one per code.
        scale: factor of levels.
        protected_code: the code of protected elements, -1 for none.
        protected: float32[m].
        out: float32[n], bfloat16[n] or float16[n], filled with the nearest numbers.
        faults: where codes past the levels are marked.

    Returns:
        Number of codes equal to `protected_code`, int64[] on the device; reading it waits. The caller compares it
        to `m`: if it is larger, the last elements had no value left and hold `levels[protected_code] * scale`.

    Raises:
        ValueError: a shape, dtype or device is wrong; without `faults` also a code past the levels.
    """
    check_tensor("levels", levels, torch.float32, (levels.numel(),), like=codes)
    values = levels * float(np.float32(scale))
    return _look_up(codes, None, 0, values, protected_code, protected, out, faults)


def dequantize_refined(
    codes: torch.Tensor, refinement: torch.Tensor, bits: int, low: torch.Tensor, width: torch.Tensor,
    sign: torch.Tensor, levels: torch.Tensor, scale: float, protected_code: int, protected: torch.Tensor,
    log_domain: bool, out: torch.Tensor, faults: Faults | None = None,
) -> torch.Tensor:
    """Dequantize as `dequantize` does, to the middle of the part of the cell that the symbol selects.

    `dsq_ckpt.kernels.dequantize_refined` has the formula.

    Args:
        refinement: uint8[n], below `2**bits`.
        bits: 1..8.
        low, width, sign: float64, one per code.
        log_domain: whether cells are those of magnitude bits.
        faults: where codes past a table, and symbols past `2**bits`, are marked.

    Returns:
        As `dequantize`.

    Raises:
        ValueError: as `dequantize` does, or `bits` is out of range; without `faults` also a symbol.
    """
    check_bits(bits)
    for name, table in (("low", low), ("width", width), ("sign", sign)):
        check_tensor(name, table, torch.float64, (table.numel(),), like=codes)
    check_tensor("levels", levels, torch.float32, (levels.numel(),), like=codes)
    check_tensor("refinement", refinement, torch.uint8, (codes.numel(),), like=codes)
    known = min(table.numel() for table in (low, width, sign, levels))
    lower, spread, level = low[:known, None], width[:known, None], levels[:known, None]
    symbols = torch.arange(1 << bits, dtype=torch.float64, device=codes.device)
    u = lower + (symbols + 0.5) * (spread / 2.0**bits)
    if log_domain:
        magnitude = (u * 2.0**23).round().clamp(0.0, 2.0**31 - 1).to(torch.int32).view(torch.float32)
        value = torch.where(sign[:known, None] < 0, -magnitude, magnitude)
    else:
        value = u.float()
    values = torch.where(spread != 0, value, level) * float(np.float32(scale))
    return _look_up(codes, refinement, bits, values.view(-1), protected_code, protected, out, faults)


def _look_up(
    codes: torch.Tensor, refinement: torch.Tensor | None, bits: int, values: torch.Tensor, protected_code: int,
    protected: torch.Tensor, out: torch.Tensor, faults: Faults | None,
) -> torch.Tensor:
    """Look up `values[code << bits | symbol]`, and fill protected elements."""
    check_flat("codes", codes, torch.uint8)
    check_tensor("protected", protected, torch.float32, (protected.numel(),), like=codes)
    check_tensor("out", out, FLOATS, codes.shape, like=codes)
    known = values.numel() >> bits
    check_entries("levels and cells", known)
    rounded = values.to(out.dtype)
    tally = empty_tally(codes) if 0 <= protected_code < 256 else None
    with collect_faults(faults, codes.device) as collected:
        for part in parts(codes.numel()):
            launch(
                _dequantize, (part.tiles,), codes[part.elements], slice_elements(refinement, part), part.n, rounded,
                known, out[part.elements], protected_code, slice_tiles(tally, part), collected.flag("codes"),
                collected.flag("refinement"), BITS=bits,
            )
    if tally is None:
        return torch.zeros((), dtype=torch.int64, device=codes.device)
    fill_protected(codes, protected_code, tally, protected.to(out.dtype), out)
    return tally.sum(dtype=torch.int64)


@triton.jit(
    do_not_specialize=["known", "protected_code"],
    do_not_specialize_on_alignment=["values", "tally", "code_fault", "symbol_fault"],
)
def _dequantize(
    codes, refinement, n, values, known, out, protected_code, tally, code_fault, symbol_fault, BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    offsets = tile * TILE + tl.arange(0, TILE)
    mask = offsets < n
    code = tl.load(codes + offsets, mask=mask, other=0).to(tl.int32)
    entry = clamp_index(code, known, code_fault)
    if BITS:
        symbol = tl.load(refinement + offsets, mask=mask, other=0).to(tl.int32)
        entry = (entry << BITS) | clamp_index(symbol, 1 << BITS, symbol_fault)
    tl.store(out + offsets, tl.load(values + entry), mask=mask)
    if tally is not None:
        tl.store(tally + tile, tl.sum((mask & (code == protected_code)).to(tl.int32), 0))
