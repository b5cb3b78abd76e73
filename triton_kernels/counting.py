"""Counting into bins: every program counts on its own, and adds its counts to those of all programs.

A program counts each tile in a histogram in shared memory, which is cleared for each tile and summed in registers: one
atomic in global memory per element would be many times slower, most so where most elements are in a few bins. At its
end a program adds its nonzero bins to the counts in global memory, with one atomic for each of these bins, whatever the
number of elements. No copies are cleared or summed, so that a small tensor costs little. If there are too many
bins for one histogram, they are split between two programs that read the same tiles at about the same time, one of them
from the L2 cache. Tables that are too large even for two histograms are counted with one atomic per element, into
copies that fit that cache; so are all but small windows before Triton 3.8, which has no atomics in shared memory.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import launch

MAX_BINS = 1 << 15
"""Bins of one histogram at most: 128 KiB."""
MAX_SPLITS = 2
"""Histograms side by side at most."""
_MAX_BALLOT_BINS = 1 << 9  # likewise MAX_BINS, where Triton makes histograms of ballots, whose cost grows with the bins
_MIN_BINS = 1 << 8  # a bin for each thread of a tile
_MAX_COPIED_BINS = 1 << 23  # bins in global memory, of all copies together: 32 MiB, which the L2 cache holds


class CountingPlan(NamedTuple):
    """Assignment of histograms to programs."""

    bins: int
    """Bins of one histogram, a power of two; 0: no histograms, only atomics."""
    splits: int
    """Number of histograms side by side; at least 1."""
    tile: int
    programs: int
    """Largest number of programs, without splits."""
    copies: int
    """Largest number of copies of the counts, which programs without histograms share."""


def make_plan(bins: int, device: torch.device) -> CountingPlan:
    """Return the plan to count into a number of bins on a device."""
    limits = launch.device_limits(device)
    max_bins, max_splits = (MAX_BINS, MAX_SPLITS) if _shared_atomics() else (_MAX_BALLOT_BINS, 1)
    shared_bins = 1 << (limits.shared // 4 - 1).bit_length() - 1
    histogram_bins = min(max(triton.next_power_of_2(bins), _MIN_BINS), max_bins, shared_bins)
    splits = triton.cdiv(bins, histogram_bins)
    if splits > max_splits:
        return CountingPlan(0, 1, launch.TILE, 8 * limits.processors, max(1, _MAX_COPIED_BINS // bins))
    # A histogram is cleared and read once per tile, which must take less time than it saves.
    tile = launch.TILE if launch.INTERPRETED else max(launch.TILE, min(histogram_bins, 1 << 14))
    resident = max(1, min(4, limits.shared // (4 * histogram_bins)))
    programs = max(1, limits.processors * resident // splits)
    return CountingPlan(histogram_bins, splits, tile, programs, 1)


def _shared_atomics() -> bool:
    """Return whether Triton computes histograms by atomics in shared memory, one per element: since 3.8."""
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8)


def run_counting(
    kernel: Any, plan: CountingPlan, n: int, arguments: Callable[[launch.Part], tuple[Any, ...]], counts: torch.Tensor
) -> None:
    """Run a counting kernel on all parts of n elements and add its counts.

    Args:
        kernel: its arguments are the arguments of a part, the number of elements, copies of the counts, the number of
            copies and the length of each, and the constants `BINS` and `TILE`.
        plan: plan for the bins of `counts`.
        arguments: function that returns the arguments of a part, a tensor first.
        counts: int64, contiguous.
    """
    bins = counts.numel()
    for part in launch.parts(n):
        programs = min(plan.programs, triton.cdiv(part.n, plan.tile))
        copies = max(1, min(plan.copies, programs, part.n // bins))  # clearing and summing them must pay off
        target = counts if copies == 1 else torch.zeros((copies, bins), dtype=torch.int32, device=counts.device)
        grid = programs, plan.splits
        launch.launch(kernel, grid, *arguments(part), part.n, target, copies, bins, tile=plan.tile, BINS=plan.bins)
        if copies > 1:
            counts.view(-1).add_(target.sum(0, dtype=torch.int32))  # of a launch, whose elements an int32 counts


@triton.jit
def empty_histogram(BINS: tl.constexpr):
    """Return an empty histogram; a single bin if there are none."""
    return tl.zeros([BINS if BINS else 1], tl.int32)


@triton.jit
def count_tile(histogram, bin_index, mask, counts, copies, bins, BINS: tl.constexpr):
    """Count a tile's bins: into the histogram, which is returned, or in global memory."""
    if BINS:
        bin_index -= tl.program_id(1) * BINS
        return histogram + tl.histogram(bin_index, BINS, mask=mask & (bin_index >= 0) & (bin_index < BINS))
    else:
        target = counts + (tl.program_id(0) % copies) * bins
        ones = tl.full(bin_index.shape, 1, counts.dtype.element_ty)
        tl.atomic_add(target + bin_index, ones, mask=mask, sem="relaxed")
        return histogram


@triton.jit
def add_to_counts(histogram, counts, BINS: tl.constexpr):
    """Add the histogram, if there is one, to the counts of all programs."""
    if BINS:
        target = counts + tl.program_id(1) * BINS + tl.arange(0, BINS)
        tl.atomic_add(target, histogram.to(tl.int64), mask=histogram > 0, sem="relaxed")
