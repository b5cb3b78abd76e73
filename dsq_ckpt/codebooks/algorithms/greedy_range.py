"""Adaptive range of uniform quantization by greedy search: Check-N-Run, for comparison.

Check-N-Run (Eisenman et al., NSDI 2022; "adaptive asymmetric quantization") takes the greedy search of Guan et al.,
"Post-Training 4-bit Quantization on Embedding Tables", 2019, which PyTorch has as `choose_qparams_optimized`.
Inshrinkerator (section 8.2, "Adaptive"; Table 11) compares with it: 8 to 256 bins, 10 to 100 step bins, and 0.1 to
0.5 of the range to search.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dsq_ckpt.codebooks.histogram import as_histogram
from dsq_ckpt.kernels.jit import jit


@jit
def _squared_error(values: Any, weights: Any, low: float, high: float, bins: int) -> float:
    """Return the weighted squared error of `bins` levels from `low` to `high`; values outside are clipped.

    It is summed bin by bin: differences of prefix sums would lose the digits that decide near ties.
    """
    step = (high - low) / (bins - 1)
    total = 0.0
    for i in range(values.size):
        code = np.rint((values[i] - low) / step) if step > 0.0 else 0.0
        gap = values[i] - (low + min(max(code, 0.0), bins - 1.0) * step)
        total += weights[i] * gap * gap
    return total


@jit
def _search_greedily(values: Any, weights: Any, bins: int, stride: float, moves: int) -> Any:
    """Search as `adaptive_range` does: `moves` strides, each at the end where the error grows less."""
    first, last = values[0], values[-1]
    best_low, best_high = first, last
    best = _squared_error(values, weights, first, last, bins)
    below, above = 0, 0
    for _ in range(moves):
        low, high = first + below * stride, last - above * stride
        without_low = _squared_error(values, weights, low + stride, high, bins)
        without_high = _squared_error(values, weights, low, high - stride, bins)
        if without_low < without_high:
            below, error = below + 1, without_low
        else:
            above, error = above + 1, without_high
        if error < best:
            best, best_low, best_high = error, first + below * stride, last - above * stride
    return best_low, best_high


def adaptive_range(
    values: npt.ArrayLike, counts: npt.ArrayLike, bins: int, step_bins: int, search_range: float
) -> tuple[float, float]:
    """Find the range to quantize uniformly with `bins` levels (`uniform_levels`), by greedy search.

    Starting from the full range, one end at a time moves inwards by a stride of 1 / `step_bins` of the full range:
    the end whose move leaves the smaller squared error, the upper one on a tie. The search ends when the range is
    smaller by `search_range`, rounded up to whole strides. The result is the visited range of smallest error, on a
    tie the wider, so the error is never above that of the full range.

    PyTorch's code keeps a range only if both of its successors are worse, and so never the last; the search
    itself is the same. It also rounds the lower end and the step to fp16, which is its format and not the method.

    Args:
        values, counts: the layer's histogram, see `as_histogram`.
        bins: levels, >= 2, both ends of the range among them.
        step_bins: strides in the full range, >= 1.
        search_range: fraction of the full range that may be cut off, in [0, 1); one stride is always left.

    Returns:
        The lower and the upper end, `low <= high`; equal for a histogram of one bin.

    Raises:
        ValueError: an argument is not as above.
    """
    v, c = as_histogram(values, counts)
    if bins < 2:
        raise ValueError(f"bins is {bins}, expected at least 2: both ends of the range are levels")
    if step_bins < 1:
        raise ValueError(f"step_bins is {step_bins}, expected at least 1")
    if not 0.0 <= search_range < 1.0:
        raise ValueError(f"search_range is {search_range}, expected a number in [0, 1)")
    stride = float(v[-1] - v[0]) / step_bins
    # Whole strides are counted, not ends compared; the products are freed of rounding (0.07 * 100 is above 7).
    moves = min(math.ceil(round(search_range * step_bins, 9)), step_bins - 1)
    low, high = _search_greedily(v, c.astype(np.float64), bins, stride, moves)
    return float(low), float(high)
