"""Top-n: the largest values alone, for comparison. Chen et al., ICML 2020, sections 2 and 4.2."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from dsq_ckpt.codebooks.base import CodebookConfig, LevelFit
from dsq_ckpt.codebooks.histogram import Histogram, top_mask
from dsq_ckpt.codebooks.registry import register_codebook


@register_codebook
class Largest(CodebookConfig):
    """Top-n: the largest |x| kept in bf16, all else zero."""

    fit: Literal["largest"] = "largest"
    fraction: float = Field(0.05, gt=0, le=1, description="fraction of elements kept")

    def propose(self, histogram: Histogram) -> LevelFit:
        """Protect the bins of largest magnitude, and prune the others."""
        order = np.argsort(np.abs(histogram.values), kind="stable")
        forced = histogram.beyond.copy()
        forced[order[top_mask(histogram.counts[order], self.fraction)]] = True
        return LevelFit(np.array([1.0]), forced, ~forced)
