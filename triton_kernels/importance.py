"""Sensitivity of elements, and their classes by sensitivity; see `dsq_ckpt.kernels.importance`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from dsq_ckpt.kernels.importance import PROTECT, PRUNE, fp32_at_or_above

from .checks import FLOATS, check_flat, check_tensor
from .keys import as_fp32
from .launch import launch, parts

_PRUNE, _PROTECT = tl.constexpr(PRUNE), tl.constexpr(PROTECT)


def compute_importance(weight: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    """Compute `|weight * average|` in fp32, in one pass.

    Args:
        weight: float32[n], bfloat16[n] or float16[n].
        average: float32[n], the average gradient of each weight.

    Returns:
        float32[n], as `dsq_ckpt.kernels.importance` has it.

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    check_flat("weight", weight, FLOATS)
    check_tensor("average", average, torch.float32, (weight.numel(),), like=weight)
    out = torch.empty_like(average)
    for part in parts(weight.numel()):
        launch(
            _compute_importance, (part.tiles,), weight[part.elements], average[part.elements], part.n,
            out[part.elements],
        )
    return out


def classify(importance: torch.Tensor, prune_below: float, protect_from: float) -> torch.Tensor:
    """Classify elements: `PRUNE` below the first threshold, `PROTECT` at or above the second, else `NORMAL`.

    Args:
        importance: float32[n], not negative.
        prune_below: 0 prunes nothing.
        protect_from: infinity protects nothing, infinite elements included. Elements that
            satisfy both conditions are protected.

    Returns:
        uint8[n].

    Raises:
        ValueError: the shape or dtype is wrong, or a threshold is NaN.
    """
    check_flat("importance", importance, torch.float32)
    if math.isnan(prune_below) or math.isnan(protect_from):
        raise ValueError(f"thresholds {prune_below} and {protect_from} are not numbers")
    out = torch.empty(importance.numel(), dtype=torch.uint8, device=importance.device)
    # No value is at or above NaN, not even infinity.
    upper = math.nan if protect_from == math.inf else float(fp32_at_or_above(protect_from))
    lower = float(fp32_at_or_above(prune_below))
    for part in parts(importance.numel()):
        launch(_classify, (part.tiles,), importance[part.elements], part.n, lower, upper, out[part.elements])
    return out


@triton.jit
def _compute_importance(weight, average, n, out, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = offsets < n
    product = as_fp32(tl.load(weight + offsets, mask=mask, other=0)) * tl.load(average + offsets, mask=mask, other=0)
    tl.store(out + offsets, tl.abs(product), mask=mask)


@triton.jit
def _classify(values, n, prune_below, protect_from, out, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = offsets < n
    value = tl.load(values + offsets, mask=mask, other=0)
    kind = tl.where(value < tl.full([1], prune_below, tl.float32), _PRUNE, 0)
    kind = tl.where(value >= tl.full([1], protect_from, tl.float32), _PROTECT, kind)
    tl.store(out + offsets, kind.to(tl.uint8), mask=mask)
