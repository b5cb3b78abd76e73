"""Sensitivity of elements, and their classes by sensitivity: pruned, normal, protected.

Sensitivity is the first-order change of the loss when an element is set to zero, `|weight * gradient|`
(Inshrinkerator, section 4.1). Its quantiles come from a full sketch, and a threshold is always the edge of a bin:
the class of an element is then a function of its bin alone, the same on every rank and for every order of merging.
"""

from __future__ import annotations

import math

import numpy as np

from dsq_ckpt.core.arrays import F32, I64, U8
from dsq_ckpt.kernels.checks import check_array
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.kernels.keys import FULL, key_edges

NORMAL, PRUNE, PROTECT = 0, 1, 2
"""Classes of elements."""


@jit
def _compute_importance(weight, average, out):  # type: ignore[no-untyped-def]
    for i in range(weight.size):
        out[i] = abs(weight[i] * average[i])


def compute_importance(weight: F32, average: F32) -> F32:
    """Compute `|weight * average|` in fp32, in one pass.

    Args:
        weight: float32[n], C-contiguous.
        average: float32[n], C-contiguous: the average gradient of each weight.

    Returns:
        float32[n]. Products past the range of fp32 are infinite, products below it zero or subnormal, which a
        sketch counts as zero; NaN where either is NaN.

    Raises:
        ValueError: a dtype is wrong, or lengths differ.
    """
    check_array("weight", weight, np.float32, (weight.size,))
    check_array("average", average, np.float32, (weight.size,))
    out = np.empty(weight.size, np.float32)
    _compute_importance(weight, average, out)
    return out


def importance_thresholds(counts: I64, protect: float, prune: float) -> tuple[float, float]:
    """Return the magnitudes below which to prune, and at or above which to protect.

    At most these fractions are pruned and protected, in whole bins: a bin with more elements than remain of its
    fraction stays normal. Infinities and NaN count as elements, and as protected: a sketch counts
    them in one bin. Signs do not matter, so the function also applies to sketches of weights.

    Args:
        counts: int64[FULL.size], a row of the full window (`kernels.sketch`).
        protect: fraction of all elements, the largest ones.
        prune: fraction of all elements, the smallest ones.

    Returns:
        `(prune_below, protect_from)` for `classify`: the upper edge of the last bin that is pruned, 0 if none is,
        and the lower edge of the first that is protected, infinity if none is. All are fp32 numbers but for
        `2**128`, past the largest one.

    Raises:
        ValueError: the dtype or length of the row is wrong, a fraction is not in [0, 1], or their sum is more than 1.
    """
    check_array("counts", counts, np.int64, (FULL.size,))
    if not (0.0 <= protect <= 1.0 and 0.0 <= prune <= 1.0 and protect + prune <= 1.0):
        raise ValueError(f"protect {protect} and prune {prune} are not fractions of one whole")
    magnitudes = counts.reshape(2, FULL.n).sum(axis=0)
    total = int(magnitudes.sum())
    # Bin b of the full window, "under" included, is [edges[b], edges[b + 1]); its bin "over" is always empty.
    edges = np.concatenate(([0.0], key_edges(np.arange(FULL.lo, FULL.hi + 1))))
    finite, overflow = magnitudes[: edges.size - 1], int(magnitudes[edges.size - 1 :].sum())

    cumulative = np.cumsum(finite)
    pruned = int(np.searchsorted(cumulative, prune * total, side="right"))
    bins = np.flatnonzero(finite[:pruned])
    prune_below = float(edges[bins[-1] + 1]) if bins.size else 0.0

    cumulative_above = overflow + np.cumsum(finite[::-1])
    protected = int(np.searchsorted(cumulative_above, protect * total, side="right"))
    first = finite.size - protected
    bins = np.flatnonzero(finite[first:])
    protect_from = float(edges[first + bins[0]]) if bins.size else math.inf
    if not bins.size and 0 < overflow <= protect * total:
        protect_from = float(edges[-1])  # no finite element, but infinite ones
    return prune_below, protect_from


@jit
def _classify(values, prune_below, protect_from, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        protected = values[i] >= protect_from
        pruned = (values[i] < prune_below) & (not protected)
        out[i] = np.uint8(pruned) | np.uint8(np.uint8(protected) << np.uint8(1))


def fp32_at_or_above(threshold: float) -> np.float32:
    """Return the smallest fp32 number (or infinity) at or above `threshold`; fp32 values compare alike with both."""
    with np.errstate(over="ignore"):
        rounded = np.float32(threshold)
    return np.nextafter(rounded, np.float32(np.inf)) if float(rounded) < threshold else rounded


def classify(importance: F32, prune_below: float, protect_from: float) -> U8:
    """Classify elements: `PRUNE` below the first threshold, `PROTECT` at or above the second, else `NORMAL`.

    NaN is `NORMAL`.

    Args:
        importance: float32[n], C-contiguous, not negative.
        prune_below: 0 prunes nothing.
        protect_from: infinity protects nothing, infinite elements included. Elements that
            satisfy both conditions are protected.

    Returns:
        uint8[n].

    Raises:
        ValueError: the dtype or the number of dimensions is wrong, or a threshold is NaN.
    """
    check_array("importance", importance, np.float32, (importance.size,))
    if math.isnan(prune_below) or math.isnan(protect_from):
        raise ValueError(f"thresholds {prune_below} and {protect_from} are not numbers")
    out = np.empty(importance.size, np.uint8)
    # No value is at or above NaN, not even infinity.
    upper = np.float32(np.nan) if protect_from == math.inf else fp32_at_or_above(protect_from)
    _classify(importance, fp32_at_or_above(prune_below), upper, out)
    return out
