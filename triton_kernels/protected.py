"""Elements with the protected code: gathering of their values in order, and the inverse."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import FLOATS, check_flat, check_tensor
from .compaction import count_selected, output_slots, selection_mask, tile_ends
from .keys import as_fp32, bf16_bits, fp32_bits
from .launch import launch, parts, slice_tiles, tile_count


def gather_protected(
    x: torch.Tensor, codes: torch.Tensor, protected_code: int, tally: torch.Tensor | None = None, bf16: bool = False,
    capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements whose code is `protected_code`, in order.

    Args:
        x: float32[n], bfloat16[n] or float16[n].
        codes: uint8[n].
        protected_code: -1: none.
        tally: result of `quantize` for these codes, which are then not counted again.
        bf16: whether to return the nearest bf16 numbers, never rounded up to infinity.
        capacity: number of entries of the result, to avoid a wait for the number m; None: wait for the device.

    Returns:
        fp32 bits, uint32[m], or with `bf16` bf16 bits, uint16[m]; and m, int64[] on the device. With `capacity`
        the bits have that many entries: the first m are filled, or all if m is larger.

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    check_flat("x", x, FLOATS)
    check_tensor("codes", codes, torch.uint8, (x.numel(),), like=x)
    dtype = torch.uint16 if bf16 else torch.uint32
    if not 0 <= protected_code < 256:
        return torch.empty(0, dtype=dtype, device=x.device), torch.zeros((), dtype=torch.int64, device=x.device)
    if tally is None:
        tally = count_selected(codes, None, protected_code)
    check_tensor("tally", tally, torch.int32, (tile_count(x.numel()),), like=x)
    ends, total = tile_ends(tally)
    out = torch.empty(int(total) if capacity is None else capacity, dtype=dtype, device=x.device)
    for part in parts(x.numel()) if len(out) else ():
        launch(
            _gather, (part.tiles,), x[part.elements], codes[part.elements], protected_code, part.n,
            slice_tiles(tally, part), slice_tiles(ends, part), out, out.numel(), BF16=bf16,
        )
    return out, total


def fill_protected(
    codes: torch.Tensor, protected_code: int, tally: torch.Tensor, protected: torch.Tensor, out: torch.Tensor
) -> None:
    """Set the elements with `protected_code` to the values of `protected`, in order, as long as there are values.

    Args:
        codes: uint8[n].
        protected_code: 0..255.
        tally: number of such codes in each tile, int32[tiles].
        protected, out: of one dtype, [m] and [n].
    """
    ends, _ = tile_ends(tally)
    for part in parts(codes.numel()) if protected.numel() else ():
        launch(
            _fill, (part.tiles,), codes[part.elements], protected_code, part.n, slice_tiles(tally, part),
            slice_tiles(ends, part), protected, protected.numel(), out[part.elements],
        )


@triton.jit(do_not_specialize=["target", "m"], do_not_specialize_on_alignment=["tally", "ends", "out"])
def _gather(x, codes, target, n, tally, ends, out, m, BF16: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    n_selected = tl.load(tally + tile)
    if n_selected > 0:
        offsets = tile * TILE + tl.arange(0, TILE)
        selected = selection_mask(codes, None, target, offsets, n)
        slot = output_slots(selected, n_selected, ends, tile)
        bits = fp32_bits(as_fp32(tl.load(x + offsets, mask=selected, other=0)))
        if BF16:
            tl.store(out + slot, bf16_bits(bits).to(tl.uint16), mask=selected & (slot < m))
        else:
            tl.store(out + slot, bits.to(tl.uint32, bitcast=True), mask=selected & (slot < m))


@triton.jit(do_not_specialize=["target", "m"], do_not_specialize_on_alignment=["tally", "ends", "protected"])
def _fill(codes, target, n, tally, ends, protected, m, out, TILE: tl.constexpr):
    tile = tl.program_id(0)
    n_selected = tl.load(tally + tile)
    if n_selected > 0:
        offsets = tile * TILE + tl.arange(0, TILE)
        selected = selection_mask(codes, None, target, offsets, n)
        slot = output_slots(selected, n_selected, ends, tile)
        writable = selected & (slot < m)
        tl.store(out + offsets, tl.load(protected + slot, mask=writable, other=0), mask=writable)
