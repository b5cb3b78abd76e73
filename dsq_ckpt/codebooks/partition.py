"""SCAR: parts of the elements that take turns, for comparison. Qiao et al., ICML 2019."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from dsq_ckpt.codebooks.base import CodebookConfig, LevelFit
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.registry import register_codebook


@register_codebook
class Partition(CodebookConfig):
    """SCAR: one part of every chunk kept in bf16, a different one in every checkpoint of a chain, all else zero."""

    fit: Literal["partition"] = "partition"
    parts: int = Field(20, ge=1, le=100_000, description="parts, of nearly equal size")

    def propose(self, histogram: Histogram) -> LevelFit:
        """Prune all; the protected elements are chosen by position."""
        return LevelFit(np.array([1.0]), pruned=~histogram.beyond)

    @property
    def turns(self) -> int:
        """The number of parts."""
        return self.parts
