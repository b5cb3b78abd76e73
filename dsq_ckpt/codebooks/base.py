"""The contract of a codebook's configuration: its settings, and how levels follow from a histogram.

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

MOST_LEVELS = 254
"""Codes are bytes: zero, the levels, and what is protected."""


FINER_COSTS = (float("inf"), 1.15, 0.9, 0.8, 0.7)
"""Bits per element that a codebook may cost more than its `coarser` one, in the first, second, ... delta of a chain.

The last one is for all later deltas too; about a quarter of an average is new then. Twice as many levels cost 1.2 to
1.4 where all is. The first deltas may cost more, since in a young run a half, a third, ... of an average is new.
"""


@dataclass(frozen=True)
class LevelFit:
    """The decision of a codebook about the bins of a histogram. Code 0 is the value 0, code j is `levels[j - 1]`.

    Attributes:
        levels: float64[k], 1 <= k <= 254, ascending, on the axis where distance is measured. Zero is among them only
            if `zero_is_level` is False.
        forced: bool[bins], protected (kept in bf16) whatever their distance. Bins past the window always are.
        pruned: bool[bins], stored as zero whatever their distance.
        step: Distance of evenly spaced levels, 0 for others.
        zero_is_level: Whether zero competes for the values near it. False where `levels` serve all values, or where
            `pruned` says which become zero.
        codes: uint8[bins], where values are assigned otherwise than to the nearest level.
        centred: Whether each level then moves, by half a step at most, to the mean of the values that were assigned
            to it; on the logarithmic axis alone. A bias counts far more than the same error at random.
    """

    levels: F64
    forced: Mask | None = None
    pruned: Mask | None = None
    step: float = 0.0
    zero_is_level: bool = True
    codes: U8 | None = None
    centred: bool = False


NOTHING = LevelFit(np.array([1.0]))
"""For a group without a value: any level does."""


class RefinementFit(NamedTuple):
    """How cells are refined.

    Attributes:
        bits: Of a symbol: a cell has 2**bits parts.
        widened: Factor, at least 1, by which a cell is wider than its values. Its parts are too, and fewer are in use.
        error: Relative error of the optimizer's next update, None if it is not known.
    """

    bits: int
    widened: float = 1.0
    error: float | None = None


class Weighing(NamedTuple):
    """Fractions of a group that sensitivity, the size of averaged gradients, decides about element by element.

    Attributes:
        prune: Elements of least sensitivity that are stored as zero.
        protect: Elements of greatest sensitivity that are kept in bf16.
        prunes: False if `prune` goes by magnitude; a search may compare both on the same sketches.
    """

    prune: float
    protect: float
    prunes: bool


Coordinates = Literal["values", "update", "octaves", "relative"]
ONLY_FOR: dict[Coordinates, str] = {"update": "exp_avg", "octaves": "exp_avg_sq", "relative": "momentum"}
"""The kind of tensors that coordinates other than the values themselves exist for."""


class CodebookConfig(StrictModel, ABC):
    """Settings of one kind of codebook; `register_codebook` makes a subclass known to configurations.

    A subclass declares `fit`, a `Literal` of its name, and one field for each setting; values are those that JSON has.
    It implements `propose`. The properties say what the engine has to provide; their defaults ask for nothing.
    """

    coordinates: ClassVar[Coordinates] = "values"
    """Coordinates that are quantized: the values, first moments in units of Adam's update, second moments over
    scales of their rows and columns, or values in root mean squares of their tensor."""

    fit: str

    @abstractmethod
    def propose(self, histogram: Histogram) -> LevelFit:
        """Return the levels for a group; the same on every rank, so it may depend on nothing but its arguments."""

    @property
    def price(self) -> float:
        """Squared steps (without steps: 12 x mean squared errors) of distortion that one bit is worth; 0: nearest."""
        return 0.0

    @property
    def coarser(self) -> CodebookConfig | None:
        """The configuration for deltas where these levels cost too much more (`FINER_COSTS`); None: always this one."""
        return None

    @property
    def logarithmic(self) -> bool:
        """Whether distance is measured on the logarithmic axis, `Histogram.window.bit_values()`: positive values."""
        return False

    @property
    def gradient_power(self) -> float:
        """Scale tensors by (mean squared gradient)**-power before they are quantized; 0: not by gradients."""
        return 0.0

    @property
    def weighing(self) -> Weighing | None:
        """What is decided element by element, by averaged gradients; None: nothing. See `Histogram.rest`."""
        return None

    @property
    def turns(self) -> int:
        """In how many deltas each element is protected once, by its place; 0: never. Only for differences."""
        return 0

    @property
    def update_bound(self) -> float:
        """Relative error of the optimizer's next update that the refinement layer is to keep; 0: no bound."""
        return 0.0

    def refinement(self, most: int, squared_error: Callable[[int, float], float]) -> RefinementFit:
        """Choose how many bits refine a code.

        Args:
            most: Bits that are configured, at most.
            squared_error: Mean squared error with so many bits, in cells wider than their values by a factor; relative
                to the mean square of the values.
        """
        return RefinementFit(most)

    def as_fine_as(self, other: CodebookConfig) -> bool:
        """Return whether no value is stored with a larger error than by `other`; tied tensors take the finest."""
        return self == other
