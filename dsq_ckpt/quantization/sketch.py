"""Sketches: logarithmic histograms of signed values that answer quantiles and merge by addition.

The guarantee. For any q in [0, 1], `quantile(q)` is within a factor `1 +- ALPHA` of the element of rank
`floor(q * (n - 1))` among the n finite elements in ascending order, with `ALPHA = 1/129 = 0.775 %`, if
that element is a normal fp32 number inside the sketch's window. The same holds for `magnitude_quantile`
and absolute values. It holds for any data, whatever its distribution and size, and after any number of
merges: a merged sketch equals, bin for bin, the sketch of all the data at once.

Outside the guarantee: elements below the window (zero and fp32 subnormals, always) are estimated as zero, and
elements above a window that is not `FULL` as its upper edge. fp64 input is first rounded to fp32, which
adds at most 2**-24 to the relative error and turns values past the fp32 range into infinities.

The algorithm is DDSketch (Masson, Rim and Lee, "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees", VLDB 2019, section 2; insertion and quantile are its Algorithms 1 and 2). Its
collapsing of the lowest buckets is not needed, because fp32 has only `FULL.size` buckets: the array is
dense and its length fixed, so merging the sketches of many processes is one sum of arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from dsq_ckpt import kernels
from dsq_ckpt.core.arrays import F32, F64, I64
from dsq_ckpt.kernels.keys import FULL, KeyWindow

BLOCK_ELEMENTS = 1 << 20
"""Elements converted to fp32 at a time; bounds the memory that an addition needs besides its input."""

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def _blocks(x: Any) -> Iterator[Any]:
    """Cut an array or tensor of any shape into parts of at most `BLOCK_ELEMENTS`, without copying."""
    longest = max(x.shape, default=1)
    elements = int(np.prod(x.shape, dtype=np.int64))
    if elements <= BLOCK_ELEMENTS:
        yield x
        return
    axis = list(x.shape).index(longest)
    slab = max(1, BLOCK_ELEMENTS // (elements // longest))
    for start in range(0, longest, slab):
        yield from _blocks(x[(slice(None),) * axis + (slice(start, start + slab),)])


def _fp32_blocks(x: Any) -> Iterator[F32]:
    """Yield the elements of a NumPy array or torch tensor as flat fp32 blocks, in any order."""
    # A tensor can only exist if torch was imported, so torch is not imported here.
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(x, torch.Tensor)
    if not is_tensor:
        x = np.asarray(x)
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"a sketch counts {', '.join(_DTYPES)}; got {dtype}")
    for block in _blocks(x.detach() if is_tensor else x):
        if is_tensor:
            assert torch is not None
            block = block.to(device="cpu", dtype=torch.float32).numpy()
        with np.errstate(over="ignore", under="ignore"):
            yield np.ascontiguousarray(block, dtype=np.float32).reshape(-1)


class Sketch:
    """Counts per bin of a window, with estimates of quantiles and the mean square.

    Args:
        window: range of magnitudes that are resolved.
        counts: int64[window.size], used without a copy. Default: all zero.

    Raises:
        ValueError: `counts` has another dtype or shape.
    """

    window: KeyWindow
    """Range of magnitudes that are resolved."""
    counts: I64
    """int64[window.size]. Summing these over processes merges their sketches."""

    def __init__(self, window: KeyWindow = FULL, counts: I64 | None = None) -> None:
        if counts is None:
            counts = np.zeros(window.size, np.int64)
        if counts.shape != (window.size,) or counts.dtype != np.int64:
            raise ValueError(
                f"counts of this window are int64[{window.size}], got {counts.dtype}{list(counts.shape)}"
            )
        self.window, self.counts = window, counts

    @classmethod
    def of(cls, x: Any, window: KeyWindow = FULL) -> Sketch:
        """Return the sketch of `x`; see `add`."""
        sketch = cls(window)
        sketch.add(x)
        return sketch

    def add(self, x: Any) -> None:
        """Count the elements of `x`.

        Args:
            x: NumPy array or torch tensor (any device) of fp16, bf16, fp32 or fp64, any shape and strides.

        Raises:
            TypeError: any other dtype.
        """
        for block in _fp32_blocks(x):
            kernels.sketch(block, self.window.lo, self.window.hi, 1.0, self.counts)

    def merge(self, other: Sketch) -> None:
        """Add the counts of `other`, which is unchanged.

        Raises:
            ValueError: the windows differ.
        """
        if other.window != self.window:
            raise ValueError(f"cannot merge sketches of windows {self.window} and {other.window}")
        self.counts = self.counts + other.counts

    def __add__(self, other: Sketch) -> Sketch:
        """Return a new sketch, merged from both; raises `ValueError` if `merge` does."""
        merged = Sketch(self.window, self.counts.copy())
        merged.merge(other)
        return merged

    @property
    def count(self) -> int:
        """Number of elements, including non-finite elements."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        """Number of elements below the window: zeros, subnormals and, for a narrow window, small normal numbers."""
        return int(self.counts[0] + self.counts[self.window.n])

    @property
    def nonfinite(self) -> int:
        """Number of infinities and NaN."""
        return int(self.counts[self.window.n - 1] + self.counts[-1])

    def quantile(self, q: float) -> float:
        """Estimate the finite element of rank `floor(q * (n - 1))` in ascending order.

        Raises:
            ValueError: `q` is not in [0, 1], or there are no finite elements.
        """
        finite, values = self.window.n - 1, self.window.values()
        positive, negative = self.counts[:finite], self.counts[self.window.n : -1]
        ascending = np.concatenate((negative[::-1], positive))
        estimates = np.concatenate((values[self.window.n : -1][::-1], values[:finite]))
        return _at_rank(ascending, estimates, q)

    def magnitude_quantile(self, q: float) -> float:
        """Estimate a quantile of absolute values; see `quantile`."""
        finite = self.window.n - 1
        magnitudes = self.counts.reshape(2, self.window.n)[:, :finite].sum(axis=0)
        return _at_rank(magnitudes, self.window.values()[:finite], q)

    def mean_square(self) -> float:
        """Return the mean square of the finite elements, within `2 ALPHA + ALPHA**2`; 0 if there are none."""
        n = self.window.n
        magnitudes = self.counts.reshape(2, n)[:, : n - 1].sum(axis=0)
        total = int(magnitudes.sum())
        return float(magnitudes @ self.window.values()[: n - 1] ** 2) / total if total else 0.0


def _at_rank(counts: I64, values: F64, q: float) -> float:
    """Return the value of the first bin whose cumulative count exceeds `q * (n - 1)` (DDSketch, Algorithm 2)."""
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"quantile {q} is not in [0, 1]")
    cumulative = np.cumsum(counts)
    total = int(cumulative[-1])
    if total == 0:
        raise ValueError("a sketch without finite elements has no quantiles")
    return float(values[np.searchsorted(cumulative, q * (total - 1), side="right")]) + 0.0
