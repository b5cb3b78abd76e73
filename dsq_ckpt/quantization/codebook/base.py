"""Fitted codebooks, which files hold: the meaning of the codes of a group, whatever the method of the fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dsq_ckpt.core.arrays import F64, I64
from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.kernels.keys import KeyWindow

MAX_REFINEMENT_BITS = 8
"""Largest width of a refinement symbol."""


@dataclass(frozen=True)
class SensitivitySplit:
    """Elements whose code is decided by their sensitivity, besides their value.

    Attributes:
        pruned, protected: int64[rows, bins], joint sketches of these elements.
        limits: sensitivity below which an element is pruned, and from which it is protected.
    """

    pruned: I64
    protected: I64
    limits: tuple[float, float]


@dataclass(frozen=True)
class PartitionTurn:
    """The part of every chunk that is protected by turns, whatever its values (SCAR).

    Attributes:
        parts: number of parts.
        number: index of the protected part, 0 <= number < parts.
        elements: number of protected elements over all chunks of the group.
    """

    parts: int
    number: int
    elements: int = 0

    def slice_of(self, elements: int) -> slice:
        """Return the protected slice of a chunk of that many elements; parts cover a chunk and have similar sizes."""
        return slice(elements * self.number // self.parts, elements * (self.number + 1) // self.parts)


@dataclass(frozen=True)
class Codebook:
    """Levels of the codes of a group, in the units of the group (the scale of a tensor multiplies them).

    Code 0 is pruned (value 0), codes 1..k are `levels[1..k]` ascending, code k + 1 is protected (the value is stored
    apart from the codes, in bf16).

    Attributes:
        levels: float64, k + 1 entries; levels[0] = 0.
        window: magnitudes that the sketch of this group resolves, also for the next checkpoint of the chain.
        domain: axis of distance and refinement: "linear" (x) or "log" (the bits of the float).
        step: distance of evenly spaced levels, 0 for others.
        cell_low, cell_high: float64, k + 1 entries, bounds of the values that each code represents, in x for "linear"
            and in bits(|x|) / 2^23 for "log" (the interpolated log2). A cell with equal bounds is not refined. The
            refinement layer divides a cell evenly, and values decode to the middle of a part.
    """

    levels: F64
    window: KeyWindow
    domain: Literal["linear", "log"]
    step: float
    cell_low: F64
    cell_high: F64

    @property
    def symbols(self) -> int:
        """Size of the alphabet, including pruned and protected (at most 256)."""
        return len(self.levels) + 1

    @property
    def protected(self) -> int:
        """The code of protected elements."""
        return len(self.levels)

    def divided(self, bits: int) -> Codebook:
        """Return the same levels with linear cells, divided by a refinement layer of another width."""
        low, high = self.cell_low.copy(), self.cell_high.copy()
        centre_zero(low, high, 2.0**bits)
        return replace(self, cell_low=low, cell_high=high)

    def to_json(self) -> dict[str, Any]:
        """Return the codebook as plain numbers; float64 values are exact in JSON."""
        return {
            "levels": self.levels.tolist(),
            "window": [self.window.lo, self.window.hi],
            "domain": self.domain,
            "step": self.step,
            "cells": [self.cell_low.tolist(), self.cell_high.tolist()],
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Codebook:
        """Invert `to_json`.

        Raises:
            CorruptCheckpoint: the numbers do not describe a codebook.
        """
        try:
            levels, low, high = (float_array(numbers) for numbers in (tree["levels"], *tree["cells"]))
            book = cls(levels, KeyWindow(*tree["window"]), tree["domain"], float(tree["step"]), low, high)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"codebook does not parse: {error!r}") from error
        consistent = 1 <= len(levels) <= 255 and len(low) == len(high) == len(levels)
        finite = consistent and bool(np.isfinite([levels, low, high]).all() and (low <= high).all())
        if not finite or tree["domain"] not in ("linear", "log"):
            raise CorruptCheckpoint(f"codebook is inconsistent: {len(levels)} levels, {len(low)} cells")
        return book


def float_array(tree: Any) -> F64:
    """Return JSON numbers, nested in arrays of equal lengths, as float64.

    Raises:
        TypeError, ValueError: an entry is not a number; NumPy would convert strings.
    """
    array = np.asarray(tree)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{str(tree)[:80]} are no numbers")
    return array.astype(np.float64)


def centre_zero(low: F64, high: F64, parts: float) -> None:
    """Widen cells that contain zero, in place, so that zero is the middle of one of their `parts`.

    Values are decoded to the middle of a part, and zeros must be restored as zeros. A first moment of 1e-6 instead of
    0, over a second moment of 0, would make an update of hundreds of times the learning rate.
    """
    width = high - low
    around = np.flatnonzero((low <= 0) & (high >= 0) & (width > 0))
    low_edge, high_edge = -low[around], high[around]
    offset = np.clip(np.round(low_edge / width[around] * parts - 0.5), 0, parts - 1) + 0.5
    mantissa, exponent = np.frexp(np.maximum(low_edge / offset, high_edge / (parts - offset)))
    part_width = np.ldexp(np.ceil(mantissa * 2.0**24) / 2.0**24, exponent)  # few bits: the products below are exact
    low[around], high[around] = -offset * part_width, (parts - offset) * part_width
