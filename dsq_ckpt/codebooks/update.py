"""First moments in units of the optimizer's update: the defaults for `exp_avg` and for SGD's momentum."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field

from dsq_ckpt.codebooks.base import CodebookConfig, Coordinates, LevelFit, RefinementFit
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.lattice import multiples
from dsq_ckpt.codebooks.registry import register_codebook

_LEVELS = 31  # on each side, far beyond any update
_WIDER = (2**0.25, 2**0.5, 2**0.75)  # between one number of bits and the next


class _ByError(CodebookConfig, ABC):
    """Wide cells, which cost history next to nothing, and as few refinement bits as keep the error of the next update.

    A first moment of ten steps ago says nothing about today's. So most of it is in the refinement layer, which the
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
        return multiples(self.step, _LEVELS, histogram)

    @property
    def price(self) -> float:
        """As configured."""
        return self.rate_distortion

    @property
    def update_bound(self) -> float:
        """As configured."""
        return self.error

    def refinement(self, most: int, squared_error: Callable[[int, float], float]) -> RefinementFit:
        """Choose the widest parts that keep the bound. The quantized values are the update, so their error counts."""
        for bits in range(0 if self.error else most, most + 1):
            error, widened = squared_error(bits, 1.0) ** 0.5, 1.0
            if error <= self.error:
                break
        for wider in _WIDER if bits and self.error else ():
            if (larger := squared_error(bits, wider) ** 0.5) <= self.error:
                error, widened = larger, wider
        return RefinementFit(bits, widened, error)


@register_codebook
class Update(_ByError):
    """Adam's first moments: cells of m / sqrt(v) of the same element."""

    coordinates: ClassVar[Coordinates] = "update"

    fit: Literal["update"] = "update"


@register_codebook
class Relative(_ByError):
    """Momentum without a second moment, as of SGD: cells in root mean squares of each tensor."""

    coordinates: ClassVar[Coordinates] = "relative"

    fit: Literal["relative"] = "relative"
    step: float = Field(16.0, gt=0, le=64, description="cell width; the refinement layer divides cells evenly")
