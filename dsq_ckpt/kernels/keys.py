"""Keys of floating-point numbers: the mapping of values to histogram bins.

The top bits of an IEEE-754 number, exponent and the first mantissa bits, are a logarithmic bucket:
they grow by one whenever the magnitude passes the next of `2**MANTISSA_BITS` equal steps within an
octave. This is the linearly interpolated mapping of DDSketch (Masson, Rim and Lee, VLDB
2019, section 2, has the exact logarithm; the authors' libraries offer both), and it costs one shift
instead of a logarithm.

With 6 mantissa bits a bucket `[a, b)` is at its widest, relative to its values, at the bottom of an
octave, where `b = a * (1 + 1/64)`. The relative error of the representative `2ab / (a + b)` is then
at most `(b - a) / (a + b) = 1/129 = 0.775 %`, which is `ALPHA`.

Magnitude keys of fp32 run from 0 to 16383:

====================  =======================================================
`0 .. 63`           zero and subnormals; counted as zero
`64 .. 16319`       normal numbers
`16320 .. 16383`    infinities and NaN
====================  =======================================================
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsq_ckpt.core.arrays import F32, F64, I64

MANTISSA_BITS = 6
KEYS_PER_OCTAVE = 1 << MANTISSA_BITS
SHIFT = 23 - MANTISSA_BITS
"""fp32 bits below the key."""
ALPHA = 1.0 / (2 ** (MANTISSA_BITS + 1) + 1)
"""Relative error of a bin's representative: 1/129."""
FIRST_NORMAL = 1 << MANTISSA_BITS
"""Magnitude key of the smallest normal number, 2**-126."""
NON_FINITE = 255 << MANTISSA_BITS
"""Smallest magnitude key that is not a finite number."""
_WINDOWS = 16
"""Windows whose arrays are kept: 2 MiB if they have 4,000 bins, as those of weights do, 16 MiB at most."""

_EXPONENT_BIAS = 127
"""Magnitude key of 1.0."""


def key_edges(keys: npt.ArrayLike) -> F64:
    """Return the smallest magnitude of each magnitude key.

    Args:
        keys: integers in `FIRST_NORMAL .. NON_FINITE`; the edge of `NON_FINITE` itself is
            `2**128`, the real number just past the largest fp32.

    Returns:
        float64, the shape of `keys`.
    """
    k = np.asarray(keys, dtype=np.int64)
    fraction = 1.0 + (k % KEYS_PER_OCTAVE) / KEYS_PER_OCTAVE
    return np.ldexp(fraction, (k // KEYS_PER_OCTAVE - _EXPONENT_BIAS).astype(np.int32))


@functools.cache
def _all_resolved_bins() -> tuple[F64, F64]:
    """Return the edges of all normal keys, and the representatives between them."""
    edge = key_edges(np.arange(FIRST_NORMAL, NON_FINITE + 1))
    a, b = edge[:-1], edge[1:]
    return edge, 2.0 * a * b / (a + b)  # neither overflows: float64 holds 2**256


@dataclass(frozen=True)
class KeyWindow:
    """The magnitude keys `[lo, hi)` that a sketch resolves; everything else falls into shared bins.

    A full range is 16256 keys per sign, most of them never hit: weights span a dozen octaves. A window
    keeps rows short enough that a joint sketch, one row per previous code, stays in cache.

    Bins of one sign, `n = hi - lo + 3` of them:

    =================  ===============================================================
    `0`              under: magnitude key below `lo`, zero and subnormals included
    `1 + (key - lo)` resolved: `lo <= key < hi`
    `hi - lo + 1`    over: finite, key at or past `hi`
    `hi - lo + 2`    infinities and NaN
    =================  ===============================================================

    A row has `size = 2 * n` bins: positive sign in `[0, n)`, negative sign in `[n, 2n)`.

    Raises:
        ValueError: unless `FIRST_NORMAL <= lo < hi <= NON_FINITE`.
    """

    lo: int
    """First resolved magnitude key."""
    hi: int
    """One past the last resolved magnitude key."""

    def __post_init__(self) -> None:
        if not FIRST_NORMAL <= self.lo < self.hi <= NON_FINITE:
            raise ValueError(
                f"key window [{self.lo}, {self.hi}) is not a non-empty part of [{FIRST_NORMAL}, {NON_FINITE})"
            )

    @property
    def n(self) -> int:
        """Number of bins per sign."""
        return self.hi - self.lo + 3

    @property
    def size(self) -> int:
        """Number of bins of a row, for both signs."""
        return 2 * self.n

    def bin_of(self, x: F32) -> I64:
        """Return the bin of every element.

        Args:
            x: float32, any shape.

        Returns:
            int64 of the same shape, in `[0, size)`.

        Raises:
            TypeError: `x` is not float32; a silent cast would move values across bin edges.
        """
        if x.dtype != np.float32:
            raise TypeError(f"bin_of needs float32, got {x.dtype}")
        bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape).astype(np.int64)
        magnitude = (bits & 0x7FFFFFFF) >> SHIFT
        inside = np.clip(magnitude - self.lo + 1, 0, self.hi - self.lo + 1)
        # With hi == NON_FINITE the clamp leaves infinities in "over"; the added one moves them on.
        bins: I64 = inside + (magnitude >= NON_FINITE) + (bits >> 31) * self.n
        return bins

    def values(self) -> F64:
        """Return the representative of every bin, float64[size], read-only.

        Resolved `[a, b)`: `2ab / (a + b)`, within `ALPHA` of every value of the bin. Under: 0.
        Over: its lower edge, a bound and not an estimate. Non-finite: infinity.
        """
        return _values(self)

    def edges(self) -> tuple[F64, F64]:
        """Return the real interval of every bin, read-only: two float64[size] with `low <= x <= high`.

        The edge of larger magnitude is excluded: positive bins are `[low, high)`, negative ones
        `(low, high]`. Over ends at `2**128`; non-finite bins are the point at infinity.
        """
        return _edges(self)

    def _resolved_bins(self) -> tuple[F64, F64]:
        """Return the edges of the resolved bins, one more than bins, and their representatives."""
        edge, centre = _all_resolved_bins()
        start, stop = self.lo - FIRST_NORMAL, self.hi - FIRST_NORMAL
        return edge[start : stop + 1], centre[start:stop]

    def bit_values(self) -> F64:
        """Return the representative magnitude in the bits domain, float64[size], the same for both signs, read-only.

        The bits domain is the magnitude bits read as an integer, over `2**23`: a piecewise linear
        `log2(|x|) + 127` for normal numbers. Resolved: the middle of the bin in that domain. The
        shared bins follow `values`: under is that of zero, 0; over its lower edge; non-finite infinity.
        """
        return _bit_values(self)


# All groups of a save, and each attempt of a search, ask for those of the same few windows.
@functools.lru_cache(maxsize=_WINDOWS)
def _values(window: KeyWindow) -> F64:
    edge, centre = window._resolved_bins()
    one_sign = np.concatenate(([0.0], centre, [edge[-1], np.inf]))
    return _read_only(np.concatenate((one_sign, -one_sign)))


@functools.lru_cache(maxsize=_WINDOWS)
def _edges(window: KeyWindow) -> tuple[F64, F64]:
    edge, _ = window._resolved_bins()
    inner = np.concatenate(([0.0], edge, [np.inf]))
    outer = np.concatenate((edge, [2.0**128, np.inf]))
    return _read_only(np.concatenate((inner, -outer))), _read_only(np.concatenate((outer, -inner)))


@functools.lru_cache(maxsize=_WINDOWS)
def _bit_values(window: KeyWindow) -> F64:
    centre = (np.arange(window.lo, window.hi) + 0.5) / KEYS_PER_OCTAVE
    one_sign = np.concatenate(([0.0], centre, [window.hi / KEYS_PER_OCTAVE, np.inf]))
    return _read_only(np.concatenate((one_sign, one_sign)))


def _read_only(array: F64) -> F64:
    array.flags.writeable = False
    return array


FULL = KeyWindow(FIRST_NORMAL, NON_FINITE)
"""Every normal number."""
