"""Adam's moments on the scales that its update is sensitive to.

Adam moves a parameter by u = m / (sqrt(v) + eps). What counts about v is its ratio to the true value, and about m its
error in units of sqrt(v) of the *same element*: a cell of fixed width is too coarse for one element and wasted on the
next. So v is coded as its octave, and m is divided by sqrt(v) before it is quantized.

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
from dsq_ckpt.kernels.keys import FIRST_NORMAL, SHIFT, KeyWindow

WINDOW = KeyWindow(FIRST_NORMAL, FIRST_NORMAL + 256)
"""Window of the keys that octaves become: one key for each biased exponent."""
_NOT_FINITE = 255
_LARGEST = np.float32(np.finfo(np.float32).max)
_SIGN = -(1 << 31)



def _units() -> F32:
    exponent = np.arange(256, dtype=np.float64)
    # Of zero and subnormal numbers too: a first moment there is past all levels, so it is protected, and not lost.
    return np.exp2((exponent - 127 + 0.5) / 2).astype(np.float32)


UNITS = _units()
"""float32[256]: what a reader multiplies a first moment by, by the biased exponent of its decoded second moment:
sqrt(v) of the middle of the octave, in float32."""


class Frame(Protocol):
    """The coordinates that a chunk's values are sketched and quantized in, instead of their own."""

    @property
    def second_moment(self) -> str | None:
        """Name of the tensor that a reader needs for the way back; None if codes alone lead back."""

    def coded(self, flat: torch.Tensor, where: slice) -> torch.Tensor:
        """Return values in these coordinates, float32.

        Args:
            flat: The values, in any floating dtype and on any device; elements `where` of the chunk.
            where: See above.
        """

    def part(self, where: slice) -> Frame:
        """Return the frame of some elements of the chunk, as a chunk of their own."""


@dataclass(frozen=True)
class OctaveFrame:
    """A value becomes the number whose key is its octave: second moments."""

    second_moment: str | None = None

    def coded(self, flat: torch.Tensor, where: slice) -> torch.Tensor:
        """Return the numbers; zero for zero and subnormal numbers, infinities and NaN as they are."""
        values = flat.to(torch.float32)
        if values.device.type == "cpu":
            out = np.empty(len(values), np.float32)
            _octave_keys(values.numpy().view(np.uint32), out.view(np.uint32))
            return torch.from_numpy(out)
        bits = values.view(torch.int32)
        exponent = (bits >> 23) & 0xFF
        key = ((exponent + FIRST_NORMAL) << SHIFT) | (bits & _SIGN)
        key = torch.where(exponent == 0, 0, key)
        return torch.where(exponent == _NOT_FINITE, values, key.view(torch.float32))

    def part(self, where: slice) -> OctaveFrame:
        """Return this: every element is its own."""
        return self


@dataclass(frozen=True)
class UpdateFrame:
    """A value is divided by the root of its second moment: first moments.

    Attributes:
        second_moment: Name of the tensor of second moments.
        squares: Its chunk, flat, on the device of the values.
        exact: Whether second moments are stored as they are. A reader still goes by their octaves, and so does this.
    """

    second_moment: str
    squares: torch.Tensor
    exact: bool = False

    def coded(self, flat: torch.Tensor, where: slice) -> torch.Tensor:
        """Return m / sqrt(v), float32; NaN where v is negative, infinite or NaN: then m is stored exactly, as v is."""
        squares = self.squares[where].to(torch.float32)
        if flat.device.type == "cpu":
            out = np.empty(len(flat), np.float32)
            _divide(flat.to(torch.float32).numpy(), squares.numpy(), UNITS, self.exact, out)
            return torch.from_numpy(out)
        exponent = (squares.view(torch.int32) >> 23) & 0xFF
        units = units_on(flat.device)[exponent]
        if not self.exact:
            units = torch.where(exponent == 0, units, torch.sqrt(squares))
        return flat.to(torch.float32) / torch.where((squares >= 0) & (exponent != _NOT_FINITE), units, torch.nan)

    def part(self, where: slice) -> UpdateFrame:
        """Return the frame of the same elements of the second moments."""
        return replace(self, squares=self.squares[where])


def units_on(device: torch.device) -> torch.Tensor:
    """Return `UNITS` on a device."""
    return torch.from_numpy(UNITS).to(device)


def from_units(values: F32, squares: F32) -> None:
    """Multiply decoded first moments by the units of their second moments, in place; both float32, flat.

    Products past the largest finite number become that number.
    """
    _multiply(values, squares.view(np.uint32), UNITS)


@jit
def _octave_keys(bits: Any, out: Any) -> None:
    for i in range(len(bits)):
        exponent = (bits[i] >> np.uint32(23)) & np.uint32(0xFF)
        if exponent == 0:
            out[i] = 0
        elif exponent == 255:
            out[i] = bits[i]
        else:
            out[i] = ((exponent + np.uint32(FIRST_NORMAL)) << np.uint32(SHIFT)) | (bits[i] & np.uint32(1 << 31))


@jit(error_model="numpy")
def _divide(values: Any, squares: Any, units: Any, by_octave: bool, out: Any) -> None:
    bits = squares.view(np.uint32)
    for i in range(len(values)):
        exponent = (bits[i] >> np.uint32(23)) & np.uint32(0xFF)
        unit = units[exponent] if by_octave or exponent == 0 else np.sqrt(squares[i])
        out[i] = values[i] / unit if squares[i] >= 0 and exponent != _NOT_FINITE else np.float32(np.nan)


@jit(error_model="numpy")
def _multiply(values: Any, squares: Any, units: Any) -> None:
    for i in range(len(values)):
        product = values[i] * units[(squares[i] >> np.uint32(23)) & np.uint32(0xFF)]
        values[i] = min(max(product, -_LARGEST), _LARGEST)
