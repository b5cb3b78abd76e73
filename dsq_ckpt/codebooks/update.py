"""First moments in units of Adam's update: the default for `exp_avg`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from dsq_ckpt.codebooks.base import CodebookConfig, Coordinates, LevelFit
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.lattice import multiples
from dsq_ckpt.codebooks.octaves import UNIT_ERROR
from dsq_ckpt.codebooks.registry import register_codebook

_LEVELS = 31  # on each side; Adam's update is seldom above one and hardly ever above ten


@register_codebook
class Update(CodebookConfig):
    """First moments in units of the update: cells of m / sqrt(v), with sqrt(v) of the same element by its octave."""

    coordinates: ClassVar[Coordinates] = "update"

    fit: Literal["update"] = "update"
    step: float = Field(1.0, gt=0, le=4, description="cell width; the refinement layer divides cells evenly")
    error: float = Field(
        0.25, ge=0, le=1, description="relative error that a restore may give Adam's next update: the refinement takes "
        "as few bits as keep it, at most refinement_bits; 0: refinement_bits as they are"
    )

    rate_distortion: float = Field(
        0.02, ge=0, le=2, description="lambda: squared steps of distortion that one bit is worth"
    )

    @model_validator(mode="after")
    def _error_can_be_kept(self) -> Update:
        if 0 < self.error <= 0.1:  # somewhat above UNIT_ERROR
            raise ValueError(
                f"error is {self.error:g}, and the octaves of second moments alone change the update by 10%: choose "
                "more, 0 (no bound), or store exp_avg and exp_avg_sq with method exact"
            )
        return self

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

    def refinement(self, most: int, squared_error: Callable[[int], float]) -> tuple[int, float | None]:
        """Choose as few bits as keep the bound, by the error of Adam's next update, m / sqrt(v).

        The quantized value is m over the unit of v; what is lost besides is the place of v within its octave.
        """
        for bits in range(0 if self.error else most, most + 1):
            error = (squared_error(bits) + UNIT_ERROR**2) ** 0.5
            if error <= self.error:
                break
        return bits, error
