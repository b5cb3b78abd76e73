"""Frames of Adam's moments: coordinates in which equal errors have equal effects on the update.

Adam moves a parameter by u = m / (sqrt(v) + eps). The update depends on the relative error of v, and on the error of m
in units of sqrt(v) of the *same element*. A cell of fixed width would be too coarse for one element and too fine for
the next. So v is divided by scales of its rows and columns and coded by octaves, and m is divided by sqrt(v) before it
is quantized.

Errors of v must have no bias, or Adam's next steps would be too long or too short on average (`step_lengths`).

A reader multiplies by the square root of the decoded v. So m / sqrt(v) is restored as it was quantized, and the error
of v does not add to the error of the next update. A rank that writes m only needs the values of v.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from dsq_ckpt import native
from dsq_ckpt.core.arrays import F32
from dsq_ckpt.kernels.checks import check_array, check_output
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.native import moments as compiled
from dsq_ckpt.quantization.matrix_scales import MatrixScales

_LARGEST = np.float32(np.finfo(np.float32).max)


def _octave_units() -> F32:
    exponent = np.arange(256, dtype=np.float64)
    # For zero and subnormal numbers too: a first moment there is past all levels, so it is protected and not lost.
    return np.exp2((exponent - 127 + 0.5) / 2).astype(np.float32)


OCTAVE_UNITS = _octave_units()
"""float32[256]: sqrt(v) of the middle of the octave, by the biased exponent of a second moment. First moments are in
these units up to format version 4."""
LEAST_ROOT = OCTAVE_UNITS[0]
"""Substitute for the square root of a second moment that is zero or subnormal."""


class Frame(Protocol):
    """Coordinates in which the values of a chunk are sketched and quantized."""

    @property
    def second_moment(self) -> str | None:
        """Name of the tensor whose square roots values are divided by; None if there is none."""

    @property
    def scales(self) -> MatrixScales | None:
        """Scales that values are divided by; None if there are none."""

    def coded(self, flat: torch.Tensor, span: slice) -> torch.Tensor:
        """Return values in these coordinates, float32.

        Args:
            flat: values of a part of the chunk, in any floating dtype and on any device.
            span: place of the part in the flat chunk.
        """

    def part(self, span: slice) -> Frame:
        """Return the frame of a part of the chunk, as a chunk of its own."""


@dataclass(frozen=True)
class ScaledFrame:
    """Frame of second moments: values divided by the scales of their rows and columns."""

    scales: MatrixScales
    start: int = 0
    second_moment: None = None

    def coded(self, flat: torch.Tensor, span: slice) -> torch.Tensor:
        """Return values divided by their scales; zero for zero and subnormal numbers."""
        return self.scales.divide(flat, self.start + (span.start or 0))

    def part(self, span: slice) -> ScaledFrame:
        """Return the frame of the elements `span`, whose scales keep their positions in the whole chunk."""
        return replace(self, start=self.start + span.start)


@dataclass(frozen=True)
class UpdateFrame:
    """Frame of first moments: values divided by the square roots of their second moments.

    Attributes:
        second_moment: name of the tensor of second moments.
        squares: second moments of the chunk, flat, on the device of the values.
    """

    second_moment: str
    squares: torch.Tensor
    scales: None = None

    def coded(self, flat: torch.Tensor, span: slice) -> torch.Tensor:
        """Return m / sqrt(v), float32; NaN where v is negative, infinite or NaN, as m is then stored exactly."""
        squares = self.squares[span].to(torch.float32)
        if flat.device.type == "cpu":
            values = flat.to(torch.float32).contiguous().numpy()
            return torch.from_numpy(_divide_by_roots(values, squares.contiguous().numpy()))
        roots = torch.where(squares < torch.finfo(torch.float32).tiny, float(LEAST_ROOT), torch.sqrt(squares))
        return flat.to(torch.float32) / torch.where((squares >= 0) & squares.isfinite(), roots, torch.nan)

    def part(self, span: slice) -> UpdateFrame:
        """Return the frame of the same elements of the second moments."""
        return replace(self, squares=self.squares[span])


def multiply_by_roots(values: F32, squares: F32) -> None:
    """Multiply decoded first moments by the square roots of their second moments, in place; both flat float32.

    Products past the largest finite number become that number.

    Raises:
        ValueError: the arrays are not flat float32 of the same length, or the first one is read-only.
    """
    path = _check_moments(values, squares)
    if path < 0:
        _multiply_by_roots(values, squares, LEAST_ROOT)
    else:
        compiled.multiply_by_roots(path, values, squares, LEAST_ROOT)


def multiply_by_octave_units(values: F32, squares: F32) -> None:
    """Multiply decoded first moments by the `OCTAVE_UNITS` of their second moments, like `multiply_by_roots`."""
    path = _check_moments(values, squares)
    if path < 0:
        _multiply_by_octaves(values, squares.view(np.uint32), OCTAVE_UNITS)
    else:
        compiled.multiply_by_octaves(path, values, squares, OCTAVE_UNITS)


def _check_moments(values: F32, squares: F32) -> int:
    """Check arrays of first moments, to be written, and of second moments; return the index of the path in use."""
    check_output("values", values, np.float32, (values.size,))
    check_array("squares", squares, np.float32, (values.size,))
    return native.path_index()


def _divide_by_roots(values: F32, squares: F32) -> F32:
    check_array("values", values, np.float32, (values.size,))
    check_array("squares", squares, np.float32, (values.size,))
    path, out = native.path_index(), np.empty_like(values)
    if path < 0:
        _divide(values, squares, LEAST_ROOT, out)
    else:
        compiled.divide_by_roots(path, values, squares, LEAST_ROOT, out)
    return out


@jit(error_model="numpy")
def _divide(values: Any, squares: Any, smallest: Any, out: Any) -> None:
    bits = squares.view(np.uint32)
    for i in range(len(values)):
        exponent = (bits[i] >> np.uint32(23)) & np.uint32(0xFF)
        root = smallest if exponent == 0 else np.sqrt(squares[i])
        out[i] = values[i] / root if squares[i] >= 0 and exponent != 255 else np.float32(np.nan)


@jit(error_model="numpy")
def _multiply_by_roots(values: Any, squares: Any, smallest: Any) -> None:
    bits = squares.view(np.uint32)
    for i in range(len(values)):
        normal = (bits[i] >> np.uint32(23)) & np.uint32(0xFF)
        product = values[i] * (np.sqrt(np.abs(squares[i])) if normal else smallest)
        values[i] = min(max(product, -_LARGEST), _LARGEST)


@jit(error_model="numpy")
def _multiply_by_octaves(values: Any, squares: Any, units: Any) -> None:
    for i in range(len(values)):
        product = values[i] * units[(squares[i] >> np.uint32(23)) & np.uint32(0xFF)]
        values[i] = min(max(product, -_LARGEST), _LARGEST)
