"""Decoding of the codes of a group to values, and addition of decoded differences."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch

from dsq_ckpt import kernels
from dsq_ckpt.coding.values import look_up_values
from dsq_ckpt.core.arrays import F32, Bits, Codes
from dsq_ckpt.kernels.dispatch import backend_for
from dsq_ckpt.quantization.codebook.base import Codebook
from dsq_ckpt.quantization.codebook.fit import pad_codes

_LARGEST = float(np.finfo(np.float32).max)


def scale_of(exponent: float) -> float:
    """Return 2**exponent with at most 16 bits of mantissa: products with bounds of cells are then exact."""
    integer = math.floor(exponent)
    return math.ldexp(round(2.0 ** (exponent - integer) * 2**15), integer - 15)


class Dequantizer:
    """Decoder from the codes of a group to values, block by block; safe to share between threads.

    Args:
        book: the group's codebook.
        exponent: log2 of the factor that was taken out of the tensor.
        bits: width of the refinement symbols.
    """

    def __init__(self, book: Codebook, exponent: float, bits: int) -> None:
        self._book, self._bits, factor = book, bits, scale_of(exponent)
        levels, low, width = np.append(book.levels, 0.0), book.cell_low, book.cell_high - book.cell_low
        if book.domain == "linear":  # in fp64, so that no intermediate result leaves the range of fp32
            reach = max(np.abs(levels).max(), np.abs(book.cell_low).max(), np.abs(book.cell_high).max()) * factor
            levels, low, width, self._scale = levels * factor, low * factor, width * factor, 1.0
        else:
            reach, self._scale = 2.0 ** (min(book.cell_high.max(), 255.0) - 126) * factor, factor
            reach = max(reach, np.abs(levels).max() * max(factor, 1.0))
        self._beyond = bool(reach >= _LARGEST)
        with np.errstate(over="ignore"):  # infinite, whatever the factor is, as docs/format.md has it
            self._levels = levels.astype(np.float32)
        self._low, self._width = pad_codes(low), pad_codes(width)
        self._sign = pad_codes(np.where(levels < 0, -1.0, 1.0))

    def block(
        self, codes: Codes, protected: Bits, refinement: Codes | None, out: F32, packed: bool = False,
        last: bool = False,
    ) -> None:
        """Dequantize a block.

        Args:
            codes: uint8[n].
            protected: fp32 bits of the block's protected values, in order.
            refinement: symbols, uint8[n], or None for the base layer alone.
            out: float32[n].
            packed: whether the symbols are packed bits, as `kernels.pack` makes them.
            last: whether the values are not read again soon.

        Raises:
            ValueError: codes, protected values and refinement do not match.
        """
        exact, protected_code = protected.view(np.float32), self._book.protected
        table = self._table if refinement is None else self._refined_table
        used = look_up_values(table, codes, refinement, packed, protected_code, out, last and not self._beyond)
        if used != len(exact):
            raise ValueError(f"{used} codes are protected but {len(exact)} protected values are stored")
        if self._beyond:
            np.nan_to_num(out, copy=False)  # a cell may reach past the largest number, its values do not
        if used:
            out[kernels.find_positions(codes, protected_code)] = exact

    @cached_property
    def _table(self) -> F32:
        return kernels.value_table(self._levels, self._scale)[:, None]

    @cached_property
    def _refined_table(self) -> F32:
        codes = slice(len(self._levels))
        return kernels.refined_value_table(
            self._bits, self._low[codes], self._width[codes], self._sign[codes], self._levels, self._scale,
            self._book.domain == "log",
        )

    def on_device(self, codes: torch.Tensor, protected: torch.Tensor, refinement: torch.Tensor | None) -> torch.Tensor:
        """Dequantize with the kernels of the device of the codes.

        Args:
            codes, refinement: uint8[n].
            protected: float32[m].

        Returns:
            float32[n].
        """
        book, out = self._book, torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        backend = backend_for(codes.device)
        levels, low, width, sign = self.tables(codes.device)
        if refinement is None:
            backend.dequantize(codes, levels, self._scale, book.protected, protected, out)
        else:
            backend.dequantize_refined(
                codes, refinement, self._bits, low, width, sign, levels, self._scale, book.protected, protected,
                book.domain == "log", out,
            )
        backend.check()
        if self._beyond:
            out = torch.where(codes == book.protected, out, out.nan_to_num())
        return out

    def tables(self, device: torch.device) -> list[torch.Tensor]:
        """Return the tables of the kernels on a device: levels, then lower edges, widths and signs of cells."""
        return [torch.from_numpy(table).to(device) for table in (self._levels, self._low, self._width, self._sign)]


def add_residual(values: F32, residual: F32, out: F32) -> None:
    """Add fp32 numbers as every reader does; sums past the largest finite number become that number."""
    with np.errstate(over="ignore"):
        np.add(values, residual, out=out)
    np.clip(out, np.float32(-_LARGEST), np.float32(_LARGEST), out=out)
