"""Checks of arguments, shared by all implementations of the kernels.

The compiled kernels index without bounds checks, and codes may come from a damaged file. A code past the end of a
table must be an error here, before it becomes a read or write outside the table.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from dsq_ckpt.core.arrays import Array


@functools.lru_cache
def scale_factor(inv_scale: float) -> np.float32:
    """Return `inv_scale` in fp32, the precision in which it is applied.

    Raises:
        ValueError: it is not a positive finite fp32 number.
    """
    with np.errstate(over="ignore"):
        factor = np.float32(inv_scale)
    if not (factor > 0 and np.isfinite(factor)):
        raise ValueError(f"inv_scale {inv_scale} is not a positive finite fp32 number")
    return factor


def check_array(name: str, array: Array, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None) -> None:
    """Require a C-contiguous array of this dtype and, unless None, of this shape.

    Raises:
        ValueError: the dtype, layout or shape is wrong.
    """
    if array.dtype != dtype or not array.flags.c_contiguous or (shape is not None and array.shape != shape):
        expected = f"{np.dtype(dtype)}{list(shape) if shape is not None else ''}"
        found = f"{array.dtype}{list(array.shape)} with strides {array.strides}"
        raise ValueError(f"{name}: expected C-contiguous {expected}, got {found}")


def check_output(name: str, array: Array, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    """Require an array as `check_array` does, and one that may be written to, which compiled code does not notice.

    Raises:
        ValueError: the dtype, layout or shape is wrong, or the array is read-only.
    """
    check_array(name, array, dtype, shape)
    if not array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only")


def check_below(name: str, symbols: Array, limit: int) -> None:
    """Require that every uint8 symbol is below `limit`.

    Raises:
        ValueError: a symbol is not; if codes were read from a file, the file is damaged.
    """
    if limit < 256 and symbols.size and int(symbols.max()) >= limit:
        raise ValueError(f"{name}: found {int(symbols.max())}, expected values below {limit}")


def check_rows(
    table_name: str, table: Array, parent: Array | None, context: int, n: int, size: int, below: bool = True
) -> None:
    """Require a table with rows of `size` bins and, unless `below` is False, with the row of every element.

    Raises:
        ValueError: the shape of the table is wrong, or it has no row for a parent code or `context`.
    """
    if table.ndim != 2 or table.shape[1] != size:
        raise ValueError(f"{table_name}: expected shape (rows, {size}), got {table.shape}")
    if parent is None:
        if not 0 <= context < table.shape[0]:
            raise ValueError(f"row {context} is outside {table_name}, which has {table.shape[0]} rows")
    else:
        check_array("parent", parent, np.uint8, (n,))
        if below:
            check_below("parent", parent, table.shape[0])


def check_bits(bits: int) -> None:
    """Require a refinement width that a uint8 symbol holds.

    Raises:
        ValueError: `bits` is not in 1..8.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"refinement bits is {bits}, expected 1..8")
