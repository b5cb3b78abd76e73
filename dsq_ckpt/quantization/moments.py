"""Adam's moments on the scales that its update is sensitive to.

Adam moves a parameter by u = m / (sqrt(v) + eps). What counts about v is its ratio to the true value, and about m its
error in units of sqrt(v) of the *same element*: a cell of fixed width is too coarse for one element and wasted on the
next. So v is divided by scales of its rows and columns and coded by octaves, and m is divided by sqrt(v) before it is
quantized.

What is lost of v must not have a sign: Adam's next steps would be too long or too short as a rule (`step_lengths`).

A reader multiplies by the root of v as it was decoded. So m / sqrt(v) comes back as it was quantized, and the error of
v does not add to that of the next update. A rank that writes m needs nothing of v but its values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from dsq_ckpt.core.arrays import F32
from dsq_ckpt.kernels.jit import jit
from dsq_ckpt.quantization.matrix_scales import MatrixScales

_LARGEST = np.float32(np.finfo(np.float32).max)


def _octave_units() -> F32:
    exponent = np.arange(256, dtype=np.float64)
    # Of zero and subnormal numbers too: a first moment there is past all levels, so it is protected, and not lost.
    return np.exp2((exponent - 127 + 0.5) / 2).astype(np.float32)


OCTAVE_UNITS = _octave_units()
"""float32[256]: by the biased exponent of a second moment, sqrt(v) of the middle of its octave. Up to format version 4
first moments are in these units."""
LEAST_ROOT = OCTAVE_UNITS[0]
"""What stands for the root of a second moment that is zero or subnormal."""


class Frame(Protocol):
    """The coordinates that a chunk's values are sketched and quantized in, instead of their own."""

    @property
    def second_moment(self) -> str | None:
        """Name of the tensor by whose roots values were divided; None if they were not."""

    @property
    def scales(self) -> MatrixScales | None:
        """Scales that values were divided by; None if there are none."""

    def coded(self, flat: torch.Tensor, where: slice) -> torch.Tensor:
        """Return values in these coordinates, float32.

        Args:
            flat: the values, in any floating dtype and on any device; elements `where` of the chunk.
            where: see above.
        """

    def part(self, where: slice) -> Frame:
        """Return the frame of some elements of the chunk, as a chunk of their own."""


@dataclass(frozen=True)
class ScaledFrame:
    """A value is divided by the scale of its row and column: second moments."""

    scales: MatrixScales
    start: int = 0
    second_moment: None = None

    def coded(self, flat: torch.Tensor, where: slice) -> torch.Tensor:
        """Return the ratios; zero for zero and subnormal numbers."""
        return self.scales.divide(flat, self.start + (where.start or 0))

    def part(self, where: slice) -> ScaledFrame:
        """Return the frame of elements that begin later."""
        return replace(self, start=self.start + where.start)


@dataclass(frozen=True)
class UpdateFrame:
    """A value is divided by the root of its second moment: first moments.

    Attributes:
        second_moment: name of the tensor of second moments.
        squares: its chunk, flat, on the device of the values.
    """

    second_moment: str
    squares: torch.Tensor
    scales: None = None

    def coded(self, flat: torch.Tensor, where: slice) -> torch.Tensor:
        """Return m / sqrt(v), float32; NaN where v is negative, infinite or NaN: then m is stored exactly, as v is."""
        squares = self.squares[where].to(torch.float32)
        if flat.device.type == "cpu":
            out = np.empty(len(flat), np.float32)
            _divide(flat.to(torch.float32).numpy(), squares.numpy(), LEAST_ROOT, out)
            return torch.from_numpy(out)
        roots = torch.where(squares < torch.finfo(torch.float32).tiny, float(LEAST_ROOT), torch.sqrt(squares))
        return flat.to(torch.float32) / torch.where((squares >= 0) & squares.isfinite(), roots, torch.nan)

    def part(self, where: slice) -> UpdateFrame:
        """Return the frame of the same elements of the second moments."""
        return replace(self, squares=self.squares[where])


def multiply_by_roots(values: F32, squares: F32) -> None:
    """Multiply decoded first moments by the roots of their second moments, in place; both float32, flat.

    Products past the largest finite number become that number.
    """
    _multiply_by_roots(values, squares, LEAST_ROOT)


def multiply_by_octave_units(values: F32, squares: F32) -> None:
    """Multiply decoded first moments by `OCTAVE_UNITS` of their second moments, in place; as `multiply_by_roots`."""
    _multiply_by_octaves(values, squares.view(np.uint32), OCTAVE_UNITS)


@jit(error_model="numpy")
def _divide(values: Any, squares: Any, least: Any, out: Any) -> None:
    bits = squares.view(np.uint32)
    for i in range(len(values)):
        exponent = (bits[i] >> np.uint32(23)) & np.uint32(0xFF)
        root = least if exponent == 0 else np.sqrt(squares[i])
        out[i] = values[i] / root if squares[i] >= 0 and exponent != 255 else np.float32(np.nan)


@jit(error_model="numpy")
def _multiply_by_roots(values: Any, squares: Any, least: Any) -> None:
    bits = squares.view(np.uint32)
    for i in range(len(values)):
        normal = (bits[i] >> np.uint32(23)) & np.uint32(0xFF)
        product = values[i] * (np.sqrt(np.abs(squares[i])) if normal else least)
        values[i] = min(max(product, -_LARGEST), _LARGEST)


@jit(error_model="numpy")
def _multiply_by_octaves(values: Any, squares: Any, units: Any) -> None:
    for i in range(len(values)):
        product = values[i] * units[(squares[i] >> np.uint32(23)) & np.uint32(0xFF)]
        values[i] = min(max(product, -_LARGEST), _LARGEST)
