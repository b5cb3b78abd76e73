"""Interface of codebook configurations: settings, and the fit of levels to a histogram.

A codebook is added by one class:

    @register_codebook
    class Quantiles(CodebookConfig):
        fit: Literal["quantiles"] = "quantiles"
        bins: int = Field(16, ge=2, le=254, description="levels")

        def propose(self, histogram: Histogram) -> LevelFit:
            values, counts = histogram.merged()
            if not len(values):
                return NOTHING
            ranks = (np.arange(self.bins) + 0.5) / self.bins * counts.sum()
            return LevelFit(np.unique(values[np.searchsorted(counts.cumsum(), ranks)]), zero_is_level=False)

Its fields are keys of the configuration, `{"fit": "quantiles", "bins": 32}`. Everything after the levels (the table of
codes, rate-distortion choice, cells for the refinement layer, deltas) is the same for all codebooks. Files hold the
levels, so a checkpoint is loaded where the class is not known.

Reading a configuration imports the codebooks of the package, so these import Numba and torch inside functions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.core.arrays import F64, U8, Mask
from dsq_ckpt.core.strict_model import StrictModel

MAX_LEVELS = 254
"""Largest number of levels: codes are bytes, and two are reserved for zero and protected elements."""


MAX_EXTRA_BITS = (float("inf"), 1.15, 0.9, 0.8, 0.7)
"""Most bits per element that a codebook may cost over its `coarser` one, in the first, second, ... delta of a chain.

The last entry also applies to all later deltas, in which about a quarter of an average is new. Twice as many levels
cost 1.2 to 1.4 bits if all is new. The first deltas may cost more, since in a young run a half, a third, ... of an
average is new.
"""


@dataclass(frozen=True)
class LevelFit:
    """Levels and codes that a codebook chooses for a histogram. Code 0 is the value 0, code j is `levels[j - 1]`.

    Attributes:
        levels: float64[k], 1 <= k <= 254, ascending, on the axis of distance. They include zero only if `zero_is_level`
            is False.
        forced: bool[bins], protected (kept in bf16) whatever their distance. Bins past the window always are.
        pruned: bool[bins], stored as zero whatever their distance.
        step: Distance of evenly spaced levels, 0 for others.
        zero_is_level: Whether zero competes for values near it. False if `levels` serve all values, or if `pruned`
            selects the values that become zero.
        codes: uint8[bins], code of each bin; None: code of the nearest level.
        centred: Whether each level then moves, by half a step at most, to the mean of its values; only on the
            logarithmic axis. A bias degrades the model far more than a random error of the same size.
    """

    levels: F64
    forced: Mask | None = None
    pruned: Mask | None = None
    step: float = 0.0
    zero_is_level: bool = True
    codes: U8 | None = None
    centred: bool = False


NOTHING = LevelFit(np.array([1.0]))
"""Fit of a group without values, for which any level will do."""


class RefinementFit(NamedTuple):
    """Refinement of cells.

    Attributes:
        bits: Width of a symbol; a cell has 2**bits parts.
        widened: Factor, at least 1, by which a cell is wider than its values. Parts are wider too, and fewer are used.
        error: Relative error of the optimizer's next update, None if it is not known.
    """

    bits: int
    widened: float = 1.0
    error: float | None = None


class Weighing(NamedTuple):
    """Fractions of a group whose codes are decided element by element, by sensitivity to averaged gradients.

    Attributes:
        prune: Elements of least sensitivity that are stored as zero.
        protect: Elements of greatest sensitivity that are kept in bf16.
        prunes: False if `prune` goes by magnitude; a search may compare both on the same sketches.
    """

    prune: float
    protect: float
    prunes: bool


Coordinates = Literal["values", "update", "octaves", "relative"]
KIND_OF_COORDINATES: dict[Coordinates, str] = {"update": "exp_avg", "octaves": "exp_avg_sq", "relative": "momentum"}
"""Kind of tensors that has the coordinates, for coordinates other than the values."""


class CodebookConfig(StrictModel, ABC):
    """Settings of one kind of codebook; `register_codebook` makes a subclass known to configurations.

    A subclass declares `fit`, a `Literal` of its name, and one field for each setting; values are those that JSON has.
    It implements `propose`. Properties request features of the engine; their defaults request none.
    """

    coordinates: ClassVar[Coordinates] = "values"
    """Coordinates that are quantized: values, first moments in units of Adam's update, second moments over scales of
    their rows and columns, or values in root mean squares of their tensor."""

    fit: str

    @abstractmethod
    def propose(self, histogram: Histogram) -> LevelFit:
        """Return the levels of a group. They must be the same on every rank, so depend on the arguments only."""

    @property
    def price(self) -> float:
        """Distortion that one bit is worth, in squared steps (without steps: 12 x mean squared errors); 0: nearest."""
        return 0.0

    @property
    def coarser(self) -> CodebookConfig | None:
        """Configuration for deltas in which these levels cost too much (`MAX_EXTRA_BITS`); None: always this one."""
        return None

    @property
    def logarithmic(self) -> bool:
        """Whether distance is measured on the logarithmic axis, `Histogram.window.bit_values()`; for values > 0."""
        return False

    @property
    def gradient_power(self) -> float:
        """Exponent of the scale of tensors, (mean squared gradient)**-power; 0: not scaled by gradients."""
        return 0.0

    @property
    def weighing(self) -> Weighing | None:
        """Fractions decided element by element by averaged gradients; None: none. See `Histogram.rest`."""
        return None

    @property
    def turns(self) -> int:
        """Number of deltas in which each element is protected once, by position; 0: never. Only for differences."""
        return 0

    @property
    def update_bound(self) -> float:
        """Bound on the relative error of the next optimizer update, which the refinement layer keeps; 0: no bound."""
        return 0.0

    def refinement(self, most: int, squared_error: Callable[[int, float], float]) -> RefinementFit:
        """Choose the refinement of cells.

        Args:
            most: Largest number of bits, as configured.
            squared_error: Function of a number of bits and of a factor by which cells are wider than their values.
                It returns the mean squared error relative to the mean square of the values.
        """
        return RefinementFit(most)

    def explain_misfit(self, kind: str, in_use: bool = True) -> str | None:
        """Return why tensors of a kind, or of a group of weights, cannot be stored by these levels; None if they can.

        Second moments span many powers of two. A cell next to zero of evenly spaced levels holds most of them, and may
        be restored as zero, by whose square root Adam divides. A codebook on the linear axis that restores no number
        but zero as zero overrides this method. `in_use` is False where the tensors are stored otherwise.
        """
        if KIND_OF_COORDINATES.get(self.coordinates, kind) != kind:
            return f"fit '{self.fit}' is for {KIND_OF_COORDINATES[self.coordinates]} alone; choose another codebook"
        if in_use and kind == "exp_avg_sq" and self.coordinates == "values" and not self.logarithmic:
            return (
                f"fit '{self.fit}' measures distance on a linear axis, so small second moments would be restored as "
                "zero, and Adam's next update would be thousands of times too large; choose fit 'octaves', or 'kmeans' "
                "with domain 'log'"
            )
        return None

    def as_fine_as(self, other: CodebookConfig) -> bool:
        """Return whether no value has a larger error than with `other`; tied tensors take the finest configuration."""
        return self == other
