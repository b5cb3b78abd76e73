"""Elements whose code has changed since the previous checkpoint, and the inverse operation, in NumPy."""

from __future__ import annotations

import numpy as np

from dsq_ckpt.core.arrays import U8, Integers
from dsq_ckpt.kernels.checks import check_array


def find_changes(codes: U8, parent: U8) -> tuple[Integers, U8]:
    """Return the elements whose code is not the previous one, in order.

    Args:
        codes, parent: uint8[n].

    Returns:
        Positions, int32[m] (int64 for more than 2**31 elements), and codes, uint8[m].

    Raises:
        ValueError: a dtype is wrong, or lengths differ.
    """
    check_array("codes", codes, np.uint8, (codes.size,))
    check_array("parent", parent, np.uint8, codes.shape)
    positions = np.flatnonzero(codes != parent)
    return positions.astype(np.int64 if codes.size > 1 << 31 else np.int32), codes[positions]


def apply_changes(parent: U8, positions: Integers, changed: U8, out: U8) -> None:
    """Invert `find_changes`: set `out` to `parent`, with `changed` at `positions`.

    Args:
        parent, out: uint8[n]; may be the same.
        positions: int32[m] or int64[m], each once.
        changed: uint8[m].

    Raises:
        ValueError: a dtype is wrong, lengths differ, or a position is past the end.
    """
    check_array("parent", parent, np.uint8, (parent.size,))
    check_array("out", out, np.uint8, parent.shape)
    check_array("positions", positions, np.int64 if positions.dtype == np.int64 else np.int32, (changed.size,))
    check_array("changed", changed, np.uint8, (changed.size,))
    if positions.size and not (positions.min() >= 0 and positions.max() < out.size):
        raise ValueError(f"positions: found {positions.min()} to {positions.max()}, expected 0 to {out.size - 1}")
    out[:] = parent
    out[positions] = changed
