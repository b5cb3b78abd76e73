"""K-means on the histogram: exact in one dimension, or Lloyd's iterations as in the papers."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from dsq_ckpt.codebooks.base import CodebookConfig, LevelFit, Weighing
from dsq_ckpt.codebooks.histogram import Histogram, top_mask
from dsq_ckpt.codebooks.registry import register_codebook
from dsq_ckpt.core.arrays import F64, I64, Mask


@register_codebook
class KMeans(CodebookConfig):
    """Levels by exact weighted one-dimensional k-means on the sketch, or by Lloyd's iterations as in the papers."""

    fit: Literal["kmeans", "lloyd"] = "kmeans"
    bins: int = Field(16, ge=2, le=254, description="levels, not counting pruned and protected")
    prune: float = Field(0.0, ge=0, le=0.9, description="fraction of the smallest |x| stored as zero")
    protect: float = Field(
        0.005, ge=0, le=0.2, description="fraction of the largest |x| kept in bf16; half of it by sensitivity where a "
        "Compressor averages gradients"
    )
    metric: Literal["magnitude", "sensitivity"] = Field(
        "magnitude", description="metric of pruning; sensitivity where a Compressor averages gradients"
    )
    sigma: float = Field(
        1.0, ge=0, le=1, description="sample weight sigma*frequency + (1-sigma)*|value|; the papers use 0.2"
    )
    rate_distortion: float = Field(
        0.05, ge=0, le=2, description="lambda, in units of 12 x the mean squared error of nearest-level coding"
    )
    domain: Literal["linear", "log"] = Field("linear", description="where distance is measured: x, or log2 |x|")
    seed: int = Field(0, ge=0, description="seed of k-means++ (fit='lloyd')")

    @model_validator(mode="after")
    def _check_log_domain(self) -> KMeans:
        if self.domain == "log" and (self.prune > 0 or self.sigma < 1):
            raise ValueError("domain='log' has no pruning (zeros are kept exactly) and no magnitude weight: "
                             "set prune=0 and sigma=1")
        return self

    def propose(self, histogram: Histogram) -> LevelFit:
        """Cluster the elements that are neither pruned nor protected."""
        log, n = self.logarithmic, histogram.window.n
        rest = histogram.counts if histogram.rest is None else histogram.rest
        by_sensitivity = histogram.rest is not None and self.metric == "sensitivity"
        points = histogram.window.bit_values() if log else histogram.values
        # Magnitude and sensitivity protect half of the fraction each (DynaQuant, section 4.2).
        protect = self.protect if histogram.rest is None else self.protect / 2
        forced, pruned = self._threshold_masks(histogram, 0.0 if by_sensitivity else self.prune, protect)
        if log:
            forced[n:] = True
            forced[[0, n]] = False  # zero of either sign is code 0
            pruned[[0, n]] = True
        chosen = (rest > 0) & ~forced & ~pruned
        if not log:
            chosen &= histogram.values != 0
        levels = self._cluster(points[chosen], rest[chosen])
        # With pruning, the configured fraction is pruned, and zero is not an additional level.
        zero_is_level = not self.prune if by_sensitivity else log or not pruned.any()
        return LevelFit(levels, forced, pruned, zero_is_level=zero_is_level)

    @property
    def price(self) -> float:
        """Value of `rate_distortion`."""
        return self.rate_distortion

    @property
    def logarithmic(self) -> bool:
        """As configured."""
        return self.domain == "log"

    @property
    def weighing(self) -> Weighing | None:
        """As configured, with the half of `protect` decided by sensitivity; None on the logarithmic axis."""
        return None if self.logarithmic else Weighing(self.prune, self.protect / 2, self.metric == "sensitivity")

    def _threshold_masks(self, histogram: Histogram, prune: float, protect: float) -> tuple[Mask, Mask]:
        """Return masks of protected and of pruned bins: at most these fractions of all elements (section 4.2)."""
        counts = histogram.counts
        order = np.argsort(np.abs(histogram.values), kind="stable")
        cumulative = np.cumsum(counts[order])
        total = cumulative[-1] if len(cumulative) else 0
        forced, pruned = histogram.beyond.copy(), np.zeros(len(counts), bool)
        if total:
            if prune:
                pruned[order[cumulative <= prune * total]] = True
            forced[order[top_mask(counts[order], protect)]] = True
        return forced, pruned & ~forced

    def _cluster(self, points: F64, counts: I64) -> F64:
        from dsq_ckpt.codebooks.algorithms.exact_kmeans import exact_kmeans
        from dsq_ckpt.codebooks.algorithms.lloyd import lloyd_kmeans, sample_weights

        if not len(points):
            return np.array([1.0])
        order = np.argsort(points)
        points, weights = points[order], counts[order].astype(np.float64)
        if self.sigma < 1:
            weights = sample_weights(weights, points, self.sigma)
        bins = min(self.bins, len(points))
        if self.fit == "lloyd":
            return np.unique(lloyd_kmeans(points, weights, bins, seed=self.seed))
        path = exact_kmeans(points, weights, bins)
        return path.levels(path.k_max)
