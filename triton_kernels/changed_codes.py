"""Elements whose code differs from the previous checkpoint; if they are few, fewer bytes are copied to the host."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import Faults, check_flat, check_tensor, collect_faults
from .compaction import count_selected, output_slots, selection_mask, tile_ends
from .index_bounds import mark_if
from .launch import launch, parts, slice_tiles


def find_changes(
    codes: torch.Tensor, parent: torch.Tensor, capacity: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the elements whose code is not the previous one, in order.

    A changed element takes five bytes, and a code takes one, or less when packed: above some number of changes the
    codes are smaller, so that no larger capacity is needed.

    Args:
        codes, parent: uint8[n].
        capacity: number of entries of the results, to avoid a wait for the number m; None: wait for the device.

    Returns:
        Positions, int32[m] (int64 for more than 2**31 elements), codes, uint8[m], and m, int64[] on the device. With
        `capacity`, positions and codes have that many entries: the first m are filled, or all if m is larger.

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    check_flat("codes", codes, torch.uint8)
    check_tensor("parent", parent, torch.uint8, (codes.numel(),), like=codes)
    tally = count_selected(codes, parent, 0)
    ends, total = tile_ends(tally)
    m = int(total) if capacity is None else capacity
    wide = codes.numel() > 1 << 31
    positions = torch.empty(m, dtype=torch.int64 if wide else torch.int32, device=codes.device)
    changed = torch.empty(m, dtype=torch.uint8, device=codes.device)
    for part in parts(codes.numel()) if m else ():
        launch(
            _find_changes, (part.tiles,), codes[part.elements], parent[part.elements], part.n, part.elements.start,
            slice_tiles(tally, part), slice_tiles(ends, part), positions, changed, m,
        )
    return positions, changed, total


def apply_changes(
    parent: torch.Tensor, positions: torch.Tensor, changed: torch.Tensor, out: torch.Tensor,
    faults: Faults | None = None,
) -> None:
    """Invert `find_changes`: set `out` to `parent`, with `changed` at `positions`.

    Args:
        parent, out: uint8[n]; may be the same.
        positions: int32[m] or int64[m], each once.
        changed: uint8[m].
        faults: where positions past the end are marked.

    Raises:
        ValueError: a shape, dtype or device is wrong; without `faults` also a position past the end.
    """
    check_flat("parent", parent, torch.uint8)
    check_tensor("out", out, torch.uint8, parent.shape, like=parent)
    check_tensor("positions", positions, (torch.int32, torch.int64), (changed.numel(),), like=parent)
    check_tensor("changed", changed, torch.uint8, (changed.numel(),), like=parent)
    out.copy_(parent)
    with collect_faults(faults, parent.device) as collected:
        for part in parts(changed.numel()):
            launch(
                _apply_changes, (part.tiles,), positions[part.elements], changed[part.elements], part.n, out,
                out.numel(), collected.flag("positions"),
            )


@triton.jit(
    do_not_specialize=["first", "m"], do_not_specialize_on_alignment=["tally", "ends", "positions", "changed"]
)
def _find_changes(codes, parent, n, first, tally, ends, positions, changed, m, TILE: tl.constexpr):
    tile = tl.program_id(0)
    n_selected = tl.load(tally + tile)
    if n_selected > 0:
        offsets = tile * TILE + tl.arange(0, TILE)
        selected = selection_mask(codes, parent, 0, offsets, n)
        slot = output_slots(selected, n_selected, ends, tile)
        writable = selected & (slot < m)
        tl.store(positions + slot, (first + offsets).to(positions.dtype.element_ty), mask=writable)
        tl.store(changed + slot, tl.load(codes + offsets, mask=writable, other=0), mask=writable)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["fault"])
def _apply_changes(positions, changed, n, out, size, fault, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = offsets < n
    place = tl.load(positions + offsets, mask=mask, other=0)
    known = (place >= 0) & (place < size)
    mark_if(tl.max((mask & (known == 0)).to(tl.int32), 0) > 0, fault)
    tl.store(out + place, tl.load(changed + offsets, mask=mask, other=0), mask=mask & known)
