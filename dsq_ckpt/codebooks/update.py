"""First moments in units of the optimizer's update: the defaults for `exp_avg` and for SGD's momentum."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field

from dsq_ckpt.codebooks.base import CodebookConfig, Coordinates, LevelFit, RefinementFit
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.lattice import lattice_levels
from dsq_ckpt.codebooks.registry import register_codebook

_LEVELS_PER_SIGN = 31  # on each side, far beyond any update
_WIDENING_FACTORS = (2**0.25, 2**0.5, 2**0.75)  # between one number of bits and the next


class _FirstMomentCodebook(CodebookConfig, ABC):
    """Wide cells, which cost history next to nothing, and as few refinement bits as keep the error of the next update.

    A first moment does not predict the one ten steps later. So most of it is in the refinement layer, which the
    newest checkpoints alone have.
    """

    step: float = Field(4.0, gt=0, le=8, description="cell width; the refinement layer divides cells evenly")
    error: float = Field(
        0.25, ge=0, le=1, description="relative error that a restore may give the optimizer's next update: the "
        "refinement takes as few bits as keep it, at most refinement_bits; 0: refinement_bits as they are"
    )
    rate_distortion: float = Field(
        0.02, ge=0, le=2, description="lambda: squared steps of distortion that one bit is worth"
    )

    def propose(self, histogram: Histogram) -> LevelFit:
        """Return multiples of the step."""
        return lattice_levels(self.step, _LEVELS_PER_SIGN, histogram)

    @property
    def price(self) -> float:
        """Value of `rate_distortion`."""
        return self.rate_distortion

    @property
    def update_bound(self) -> float:
        """Value of `error`."""
        return self.error

    def refinement(self, most: int, squared_error: Callable[[int, float], float]) -> RefinementFit:
        """Choose the widest parts that keep the bound. The quantized values are the update, so their error counts."""
        for bits in range(0 if self.error else most, most + 1):
            error, widened = squared_error(bits, 1.0) ** 0.5, 1.0
            if error <= self.error:
                break
        for factor in _WIDENING_FACTORS if bits and self.error else ():
            if (factor_error := squared_error(bits, factor) ** 0.5) <= self.error:
                error, widened = factor_error, factor
        return RefinementFit(bits, widened, error)


@register_codebook
class Update(_FirstMomentCodebook):
    """Adam's first moments: cells of m / sqrt(v) of the same element."""

    coordinates: ClassVar[Coordinates] = "update"

    fit: Literal["update"] = "update"


@register_codebook
class Relative(_FirstMomentCodebook):
    """Momentum without a second moment, as in SGD: cells in root mean squares of each tensor."""

    coordinates: ClassVar[Coordinates] = "relative"

    fit: Literal["relative"] = "relative"
    step: float = Field(16.0, gt=0, le=64, description="cell width; the refinement layer divides cells evenly")
