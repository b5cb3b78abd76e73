"""Sketches: counts of elements in each bin of a key window, alone or jointly with their previous code."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsq_ckpt.kernels.keys import KeyWindow

from . import counting
from .checks import FLOATS, Faults, check_flat, check_rows, check_tensor, collect_faults, fp32_scale
from .counting import add_to_counts, count_tile, empty_histogram
from .index_bounds import clamp_index
from .keys import bin_of_element
from .launch import slice_elements


def sketch(x: torch.Tensor, lo: int, hi: int, inv_scale: float, counts: torch.Tensor) -> None:
    """Add the elements of `x` to `counts`.

    Args:
        x: float32[n], bfloat16[n] or float16[n].
        lo, hi: the window of magnitude keys.
        inv_scale: multiplies `x` in fp32 before its key is taken.
        counts: int64[size] of the window, added to in place.

    Raises:
        ValueError: a shape, dtype or device is wrong, or the window or `inv_scale` is out of range.
    """
    window = KeyWindow(lo, hi)
    check_flat("x", x, FLOATS)
    check_tensor("counts", counts, torch.int64, (window.size,), like=x)
    _count(x, None, 0, window, inv_scale, counts.view(1, -1), None)


def joint_sketch(
    x: torch.Tensor, parent: torch.Tensor | None, context: int, lo: int, hi: int, inv_scale: float,
    counts: torch.Tensor, faults: Faults | None = None,
) -> None:
    """Add the pairs (parent code, bin) to `counts`.

    Args:
        x: float32[n], bfloat16[n] or float16[n].
        parent: previous codes, uint8[n]; None: all elements use row `context`.
        context: row of the table, without `parent`.
        lo, hi, inv_scale: as in `sketch`.
        counts: int64[rows, size], added to in place.
        faults: where previous codes past the last row are marked.

    Raises:
        ValueError: as `sketch` does, or there is no such row; without `faults` also a previous code.
    """
    window = KeyWindow(lo, hi)
    check_flat("x", x, FLOATS)
    check_rows("counts", counts, torch.int64, x, parent, context, window.size)
    if parent is None:
        _count(x, None, 0, window, inv_scale, counts[context : context + 1], None)
        return
    with collect_faults(faults, x.device) as collected:
        _count(x, parent, context, window, inv_scale, counts, collected.flag("parent"))


def _count(
    x: torch.Tensor, parent: torch.Tensor | None, context: int, window: KeyWindow, inv_scale: float,
    counts: torch.Tensor, fault: torch.Tensor | None,
) -> None:
    factor, rows = fp32_scale(inv_scale), counts.shape[0]
    counting.run_counting(
        _sketch, counting.make_plan(counts.numel(), x.device), x.numel(),
        lambda part: (x[part.elements], slice_elements(parent, part), rows, window.lo, window.hi, factor, fault),
        counts,
    )


@triton.jit(
    do_not_specialize=["rows", "lo", "hi", "copies", "bins"], do_not_specialize_on_alignment=["fault", "counts"]
)
def _sketch(x, parent, rows, lo, hi, factor, fault, n, counts, copies, bins, BINS: tl.constexpr, TILE: tl.constexpr):
    histogram = empty_histogram(BINS)
    for start in range(tl.program_id(0) * TILE, n, tl.num_programs(0) * TILE):
        offsets = start + tl.arange(0, TILE)
        mask = offsets < n
        bin_index = bin_of_element(tl.load(x + offsets, mask=mask, other=0), factor, lo, hi)
        if parent is not None:
            parent_code = tl.load(parent + offsets, mask=mask, other=0).to(tl.int32)
            bin_index += clamp_index(parent_code, rows, fault) * (2 * (hi - lo + 3))
        histogram = count_tile(histogram, bin_index, mask, counts, copies, bins, BINS)
    add_to_counts(histogram, counts, BINS)
