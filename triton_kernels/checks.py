"""Checks of the kernels' arguments, and reports of codes past the end of a table.

Shapes and dtypes are checked before a launch, on the host. Codes are on the device: a kernel replaces one that is past
the end of a table by the last entry, so that it never reads or writes outside, and marks it in `Faults`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dsq_ckpt.kernels.checks import scale_factor

from .launch import INTERPRETED

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantized."""


class Faults:
    """Marks of arguments in which kernels met values past the end of a table, on the device until they are checked.

    It is an argument of operations, `faults`. Without it they check before they return, which waits for the device;
    with it they do not, and their results are valid if `check` does not raise.

    Args:
        device: device of the tensors.
    """

    NAMES = ("parent", "codes", "refinement", "symbols", "positions")

    def __init__(self, device: torch.device) -> None:
        self.marks = torch.zeros(len(self.NAMES), dtype=torch.int32, device=device)

    def flag(self, name: str) -> torch.Tensor:
        """Return the mark of the argument of this name, which kernels set: int32[1]."""
        at = self.NAMES.index(name)
        return self.marks[at : at + 1]

    def check(self) -> None:
        """Wait for the current stream, and clear the marks.

        Raises:
            ValueError: an argument of an operation since the last `check` held a value past the end of a table.
        """
        marks = self.marks.tolist()
        self.marks.zero_()
        found = [name for name, mark in zip(self.NAMES, marks, strict=True) if mark]
        if found:
            raise ValueError(f"{', '.join(found)}: found values past the end of their table")


@contextmanager
def collect_faults(caller_faults: Faults | None, device: torch.device) -> Iterator[Faults]:
    """Yield the marks of an operation: the caller's, or its own, which are checked at the end."""
    faults = caller_faults or Faults(device)
    yield faults
    if caller_faults is None:
        faults.check()


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int, ...] | None = None,
    like: torch.Tensor | None = None,
) -> None:
    """Require a contiguous tensor that kernels can access, of this dtype, and optionally of a shape and on a device.

    Raises:
        ValueError: the dtype, layout, shape or device is wrong.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.device.type != ("cpu" if INTERPRETED else "cuda"):
        expected = "CPU tensors, being interpreted" if INTERPRETED else "CUDA tensors"
        raise ValueError(f"{name}: is on {tensor.device}, but these kernels take {expected}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: is on {tensor.device}, expected {like.device}")
    if tensor.dtype not in dtypes or not tensor.is_contiguous() or (shape is not None and tensor.shape != shape):
        expected = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        found = f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name}: expected contiguous {expected}{'' if shape is None else list(shape)}, got {found}")


def check_flat(name: str, tensor: torch.Tensor, dtype: torch.dtype | tuple[torch.dtype, ...]) -> None:
    """Require as `check_tensor` does, with one dimension of any length."""
    check_tensor(name, tensor, dtype, (tensor.numel(),))


def check_entries(name: str, entries: int) -> None:
    """Require a table that is not empty: a code past its end is replaced by the last one.

    Raises:
        ValueError: it is empty.
    """
    if not entries:
        raise ValueError(f"{name}: expected at least one entry")


def check_rows(
    name: str, table: torch.Tensor, dtype: torch.dtype, x: torch.Tensor, parent: torch.Tensor | None, context: int,
    size: int,
) -> None:
    """Require a table of rows of `size` bins, that has `context`, and a previous code for every element.

    Raises:
        ValueError: the shape or dtype is wrong, or there is no row `context`. The kernel checks codes.
    """
    check_tensor(name, table, dtype, like=x)
    if table.ndim != 2 or table.shape[1] != size:
        raise ValueError(f"{name}: expected shape (rows, {size}), got {tuple(table.shape)}")
    check_entries(name, table.shape[0])
    if parent is not None:
        check_tensor("parent", parent, torch.uint8, (x.numel(),), like=x)
    elif not 0 <= context < table.shape[0]:
        raise ValueError(f"row {context} is outside {name}, which has {table.shape[0]} rows")


def fp32_scale(inv_scale: float) -> float:
    """Return `inv_scale` in the precision in which it is applied.

    Raises:
        ValueError: it is not a positive finite fp32 number.
    """
    return float(scale_factor(inv_scale))
