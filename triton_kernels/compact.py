"""Selection of elements that satisfy a condition, in their order: shared by ``protected`` and ``changed_codes``.

First every tile counts its selected elements. A running sum of the counts is the end of each tile in the output. Then
each tile writes its elements there.  The result does not depend on the order of programs.  Tiles without selected
elements, which are most of them, are not read again.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch, parts, tile_count, tiles_of


def tally_like(codes: torch.Tensor) -> torch.Tensor:
    """Allocate one count per tile, int32, on the device of ``codes``."""
    return torch.empty(tile_count(codes.numel()), dtype=torch.int32, device=codes.device)


def ends_of(tally: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the end of the selected elements of each tile, int64[tiles], and their total number, int64[]."""
    ends = tally.cumsum(0, dtype=torch.int64)
    return ends, ends[-1] if len(ends) else tally.sum(dtype=torch.int64)


def count_chosen(codes: torch.Tensor, parent: torch.Tensor | None, wanted: int) -> torch.Tensor:
    """Count the ``codes`` of each tile that are ``wanted`` or, with ``parent``, differ from it: int32[tiles]."""
    tally = tally_like(codes)
    for part in parts(codes.numel()):
        other = None if parent is None else parent[part.where]
        launch(_count_chosen, (part.tiles,), codes[part.where], other, wanted, part.n, tiles_of(tally, part))
    return tally


@triton.jit
def chosen_of(codes, parent, wanted, at, n):
    """Return the mask of a tile's selected elements: codes that are ``wanted``, or differ from ``parent``."""
    inside = at < n
    code = tl.load(codes + at, mask=inside, other=0)
    if parent is None:
        return inside & (code.to(tl.int32) == wanted)
    else:
        return inside & (code != tl.load(parent + at, mask=inside, other=0))


@triton.jit
def slots_of(chosen, held, ends, tile):
    """Return the output positions of the selected elements of a tile, ``held`` in number."""
    return tl.load(ends + tile) - held + tl.cumsum(chosen.to(tl.int32), 0) - 1


@triton.jit(do_not_specialize=["wanted"], do_not_specialize_on_alignment=["tally"])
def _count_chosen(codes, parent, wanted, n, tally, TILE: tl.constexpr):
    tile = tl.program_id(0)
    chosen = chosen_of(codes, parent, wanted, tile * TILE + tl.arange(0, TILE), n)
    tl.store(tally + tile, tl.sum(chosen.to(tl.int32), 0))
