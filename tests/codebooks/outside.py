"""A codebook and a system that are no part of the package; importing this registers both, as a user's module does."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field

from dsq_ckpt.codebooks import CodebookConfig, Histogram, LevelFit, register_codebook
from dsq_ckpt.config.space import Axis, Space
from dsq_ckpt.config.systems import EXACT_MOMENTS, System, register_system


@register_codebook
class Powers(CodebookConfig):
    """Powers of `base` of either sign, from the largest value down; what is smaller is near zero, and becomes that."""

    fit: Literal["powers"] = "powers"
    count: int = Field(16, ge=1, le=127, description="levels on each side of zero")
    base: float = Field(2.0**0.5, gt=1, le=16, description="quotient of neighbours")

    def propose(self, histogram: Histogram) -> LevelFit:
        """Return the powers."""
        values, _ = histogram.merged()
        top = np.ceil(np.log(max(np.abs(values).max(initial=0.0), 1e-30)) / np.log(self.base))
        powers = self.base ** (top - np.arange(self.count))
        return LevelFit(np.concatenate([-powers, powers[::-1]]))


SYSTEM = register_system(System(
    "powers", "powers of a number", "this file",
    {"quantize": {"weights": {"codebook": {"fit": "powers"}, "refinement_bits": 0}, **EXACT_MOMENTS}},
    Space((Axis("base", ("quantize.weights.codebook.base",), (4.0, 2.0, 1.4, 1.2, 1.1)),)),
))


def state_at(step: int) -> dict[str, torch.Tensor]:
    """Two weights that move a little in each step."""
    def normal(seed: int) -> torch.Tensor:
        seeds = seed, seed + 50 + step
        first, moved = (torch.randn(96, 128, generator=torch.Generator().manual_seed(seed)) for seed in seeds)
        return 0.02 * (first + 0.02 * step * moved)

    return {"a.weight": normal(1), "b.weight": normal(2)}
