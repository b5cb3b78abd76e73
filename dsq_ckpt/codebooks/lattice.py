"""Evenly spaced levels around zero, whose step follows the size of gradients: the default for weights."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from dsq_ckpt.codebooks.base import CodebookConfig, LevelFit
from dsq_ckpt.codebooks.histogram import Histogram
from dsq_ckpt.codebooks.registry import register_codebook

_MAX_STEP_RATIO = 2**0.25  # within this ratio of the fitted step, the parent's is kept; a search moves it by more


@register_codebook
class Lattice(CodebookConfig):
    """Uniform lattice: code = round(x / step). The zero cell is pruned; beyond the alphabet is protected."""

    fit: Literal["lattice"] = "lattice"
    step: float = Field(
        0.5, gt=0, le=16, description="cell width in root mean squares: of all tensors of the kind where their "
        "gradients are known (then scaled by tensor), else of the group"
    )
    bins: int = Field(62, ge=2, le=62, description="levels besides zero, half of them negative (even number)")
    rate_distortion: float = Field(
        0.02, ge=0, le=2, description="lambda: squared steps of distortion that one bit is worth"
    )
    sensitivity: float = Field(
        0.25, ge=0, le=1, description="step of a tensor ~ (mean squared gradient)**-sensitivity; 0: not by gradients"
    )

    @model_validator(mode="after")
    def _check_bins_are_even(self) -> Lattice:
        if self.bins % 2:
            raise ValueError(f"bins of a lattice must be even (half of the levels are negative), not {self.bins}")
        return self

    def propose(self, histogram: Histogram) -> LevelFit:
        """Return multiples of the step. A step near the parent's is replaced by it, so that codes mean the same."""
        fitted = self.step * (histogram.unit or _trimmed_rms(histogram)) or 1.0
        parent_step = histogram.parent_step
        keep = parent_step and 1 / _MAX_STEP_RATIO < fitted / parent_step < _MAX_STEP_RATIO
        return lattice_levels(parent_step if keep else fitted, self.bins // 2, histogram)

    @property
    def price(self) -> float:
        """Value of `rate_distortion`."""
        return self.rate_distortion

    @property
    def gradient_power(self) -> float:
        """Value of `sensitivity`."""
        return self.sensitivity

    def as_fine_as(self, other: CodebookConfig) -> bool:
        """Return whether only the step differs, and is no larger."""
        if isinstance(other, Lattice) and self.step <= other.step:
            other = other.model_copy(update={"step": self.step})
        return self == other


def lattice_levels(step: float, levels_per_sign: int, histogram: Histogram) -> LevelFit:
    """Return levels at `levels_per_sign` multiples of a step on each side of zero; values past them are protected."""
    levels = step * np.concatenate([np.arange(-levels_per_sign, 0), np.arange(1, levels_per_sign + 1)])
    return LevelFit(levels, forced=np.abs(histogram.values) > (levels_per_sign + 0.5) * step, step=step)


def _trimmed_rms(histogram: Histogram) -> float:
    """Return the root mean square without the top 0.5 % of |x|, which a few outliers would dominate."""
    counts, values = histogram.counts, histogram.values
    order = np.arange(len(values)).reshape(2, -1).T.reshape(-1)  # by |x|: the bins of either sign ascend
    cumulative = np.cumsum(counts[order])
    kept = order[cumulative <= 0.995 * cumulative[-1]] if cumulative[-1] else order[:0]
    weight = counts[kept]
    rms = float((weight * values[kept] ** 2).sum() / max(int(weight.sum()), 1)) ** 0.5
    if rms == 0.0:  # all zero, or too few distinct values to leave any out
        finite = np.isfinite(values)
        rms = float((counts[finite] * values[finite] ** 2).sum() / max(int(counts.sum()), 1)) ** 0.5
    return rms
