"""Moving average of gradients, and the sketch of sensitivities computed from it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from dsq_ckpt.kernels.keys import FULL

from . import counting
from .checks import FLOATS, check_flat, check_tensor
from .counting import add_to_counts, count_tile, empty_histogram
from .keys import MAGNITUDE, as_fp32, bin_of, fp32_bits
from .launch import launch, parts, slice_elements

_HALF = FULL.n


def blend(average: torch.Tensor, new: torch.Tensor, weight: float) -> None:
    """Set `average = weight * new + (1 - weight) * average`, rounded as `gradients.offload.blend` does.

    That is torch's `average.mul_(1 - weight).add_(new, alpha=weight)`: of the products, the second is not rounded
    before they are added (a fused multiply-add, on GPUs and on CPUs that have one).

    Args:
        average: float32[n].
        new: float32[n], bfloat16[n] or float16[n].
        weight: in [0, 1].

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    _check(average, new)
    for part in parts(average.numel()):
        launch(_blend, (part.tiles,), average[part.elements], new[part.elements], part.n, *_weights(weight))


def sketch_sensitivity(
    parameter: torch.Tensor, average: torch.Tensor, counts: torch.Tensor, new: torch.Tensor | None = None,
    weight: float = 0.0,
) -> None:
    """Add the sensitivities `|parameter * average|` to `counts`; with `new`, in the same pass as `blend`.

    Args:
        parameter: float32[n], bfloat16[n] or float16[n].
        average: float32[n]; `new` is blended in before sensitivities are counted.
        counts: int64[FULL.size], added to in place.
        new, weight: as in `blend`.

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    check_flat("parameter", parameter, FLOATS)
    check_tensor("average", average, torch.float32, (parameter.numel(),), like=parameter)
    check_tensor("counts", counts, torch.int64, (FULL.size,), like=parameter)
    if new is not None:
        _check(average, new)
    positive = counts[:_HALF]
    counting.run_counting(
        _sensitivity, counting.make_plan(_HALF, average.device), average.numel(),
        lambda part: (
            average[part.elements], slice_elements(new, part), *_weights(weight), parameter[part.elements],
            FULL.lo, FULL.hi,
        ),
        positive,
    )


def _check(average: torch.Tensor, new: torch.Tensor) -> None:
    check_flat("average", average, torch.float32)
    check_tensor("new", new, FLOATS, (average.numel(),), like=average)


def _weights(weight: float) -> tuple[float, float]:
    """Return the weights of the new and of the old values, in fp32."""
    return float(np.float32(weight)), float(np.float32(1.0 - weight))


@triton.jit
def _blend_values(old, new, weight, rest):
    return tl.fma(as_fp32(new), tl.full(old.shape, weight, tl.float32), old * tl.full(old.shape, rest, tl.float32))


@triton.jit
def _blend(average, new, n, weight, rest, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = offsets < n
    old = tl.load(average + offsets, mask=mask, other=0)
    tl.store(average + offsets, _blend_values(old, tl.load(new + offsets, mask=mask, other=0), weight, rest), mask=mask)


@triton.jit(do_not_specialize=["copies", "bins"])
def _sensitivity(
    average, new, weight, rest, parameter, lo, hi, n, counts, copies, bins, BINS: tl.constexpr, TILE: tl.constexpr
):
    histogram = empty_histogram(BINS)
    for start in range(tl.program_id(0) * TILE, n, tl.num_programs(0) * TILE):
        offsets = start + tl.arange(0, TILE)
        mask = offsets < n
        mean = tl.load(average + offsets, mask=mask, other=0)
        if new is not None:
            mean = _blend_values(mean, tl.load(new + offsets, mask=mask, other=0), weight, rest)
            tl.store(average + offsets, mean, mask=mask)
        product = as_fp32(tl.load(parameter + offsets, mask=mask, other=0)) * mean
        bin_index = bin_of(fp32_bits(product) & MAGNITUDE, False, lo, hi)
        histogram = count_tile(histogram, bin_index, mask, counts, copies, bins, BINS)
    add_to_counts(histogram, counts, BINS)
