"""Check-N-Run: equal cells over the best part of the range, for comparison. Eisenman et al., NSDI 2022."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dsq_ckpt.codebooks.base import NOTHING, CodebookConfig, LevelFit
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.registry import register_codebook
from dsq_ckpt.codebooks.uniform import uniform_levels


@register_codebook
class Adaptive(CodebookConfig):
    """Check-N-Run: equal cells over the part of the range that a greedy search finds best; the rest is clipped."""

    fit: Literal["adaptive"] = "adaptive"
    bins: int = Field(16, ge=2, le=254, description="levels")
    step_bins: int = Field(25, ge=1, le=1000, description="the search gives up 1 / step_bins of the range at a time")
    search_range: float = Field(0.3, ge=0, lt=1, description="part of the range that may be given up")

    def propose(self, histogram: Histogram) -> LevelFit:
        """Search the range (`algorithms/greedy_range.py`), and divide it evenly."""
        from dsq_ckpt.codebooks.algorithms.greedy_range import adaptive_range

        values, counts = histogram.merged()
        if not len(values):
            return NOTHING
        low, high = adaptive_range(values, counts, self.bins, self.step_bins, self.search_range)
        return LevelFit(uniform_levels(low, high, self.bins), zero_is_level=False)
