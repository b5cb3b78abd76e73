"""Selection of elements that satisfy a condition, in their order: shared by `protected` and `changed_codes`.

First every tile counts its selected elements. A running sum of the counts is the end of each tile in the output. Then
each tile writes its elements there. The result does not depend on the order of programs. Tiles without selected
elements, which are most of them, are not read again.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch, parts, slice_tiles, tile_count


def empty_tally(codes: torch.Tensor) -> torch.Tensor:
    """Allocate one count per tile, int32, on the device of `codes`."""
    return torch.empty(tile_count(codes.numel()), dtype=torch.int32, device=codes.device)


def tile_ends(tally: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the end of the selected elements of each tile, int64[tiles], and their total number, int64[]."""
    ends = tally.cumsum(0, dtype=torch.int64)
    return ends, ends[-1] if len(ends) else tally.sum(dtype=torch.int64)


def count_selected(codes: torch.Tensor, parent: torch.Tensor | None, target: int) -> torch.Tensor:
    """Count the `codes` of each tile that are `target` or, with `parent`, differ from it: int32[tiles]."""
    tally = empty_tally(codes)
    for part in parts(codes.numel()):
        other = None if parent is None else parent[part.elements]
        launch(_count_selected, (part.tiles,), codes[part.elements], other, target, part.n, slice_tiles(tally, part))
    return tally


@triton.jit
def selection_mask(codes, parent, target, offsets, n):
    """Return the mask of a tile's selected elements: codes that are `target`, or differ from `parent`."""
    mask = offsets < n
    code = tl.load(codes + offsets, mask=mask, other=0)
    if parent is None:
        return mask & (code.to(tl.int32) == target)
    else:
        return mask & (code != tl.load(parent + offsets, mask=mask, other=0))


@triton.jit
def output_slots(selected, n_selected, ends, tile):
    """Return the output positions of the selected elements of a tile, `n_selected` in number."""
    return tl.load(ends + tile) - n_selected + tl.cumsum(selected.to(tl.int32), 0) - 1


@triton.jit(do_not_specialize=["target"], do_not_specialize_on_alignment=["tally"])
def _count_selected(codes, parent, target, n, tally, TILE: tl.constexpr):
    tile = tl.program_id(0)
    selected = selection_mask(codes, parent, target, tile * TILE + tl.arange(0, TILE), n)
    tl.store(tally + tile, tl.sum(selected.to(tl.int32), 0))
