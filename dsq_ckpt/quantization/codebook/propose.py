"""From a sketch to levels, by each of the fits: what is protected, what is pruned, which levels serve the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

import numpy as np
import numpy.typing as npt

from dsq_ckpt.config.schema import (
    Adaptive,
    AnyCodebook,
    Exponent,
    Gobo,
    KMeans,
    Largest,
    Lattice,
    Partition,
    Uniform,
    Update,
)
from dsq_ckpt.kernels.keys import KeyWindow
from dsq_ckpt.quantization.codebook.adaptive import adaptive_range
from dsq_ckpt.quantization.codebook.base import Codebook, Floats, Proposal
from dsq_ckpt.quantization.codebook.exponent import exponent_buckets
from dsq_ckpt.quantization.codebook.gobo import gobo_outliers, l1_kmeans
from dsq_ckpt.quantization.codebook.kmeans import exact_kmeans
from dsq_ckpt.quantization.codebook.lloyd import lloyd_kmeans, sample_weights
from dsq_ckpt.quantization.codebook.table import Counts
from dsq_ckpt.quantization.codebook.uniform import entropy_bins, uniform_levels

Mask = npt.NDArray[np.bool_]

_UPDATE_LEVELS = 31  # on each side; Adam's update is seldom above one and hardly ever above ten
_KEEP_STEP = 2**0.25  # a lattice keeps its parent's step while the fresh one is this near; a search moves it by more


class Occupied:
    """The finite bins of a sketch that hold something, in ascending order of value.

    Attributes:
        place: int64[n], their bins.
        values, counts: float64[n] representatives and int64[n] occurrences.
    """

    def __init__(self, held: Counts, window: KeyWindow) -> None:
        values = window.values()
        n = window.n
        usable = np.isfinite(values) & (held > 0)
        usable[[n - 2, 2 * n - 2]] = False  # over: a bound, not an estimate
        self.place = np.flatnonzero(usable)
        order = np.argsort(values[self.place], kind="stable")
        self.place = self.place[order]
        self.values, self.counts = values[self.place], held[self.place]

    def merged_zero(self) -> tuple[Floats, Counts]:
        """Values and counts with zeros of both signs as one."""
        values, inverse = np.unique(self.values + 0.0, return_inverse=True)
        return values, np.bincount(inverse, weights=self.counts).astype(np.int64)


def propose(
    config: AnyCodebook, held: Counts, window: KeyWindow, parent: Codebook | None, unit: float
) -> Proposal:
    """Levels and forced bins.

    Args:
        config: which fit.
        held: int64[window.size], occurrences of finite values.
        window: of the sketch.
        parent: the parent's codebook; a lattice keeps its step while that is about right.
        unit: what a lattice's step is measured in; 0: the root mean square of `held`.
    """
    return _propose(config, held, window, _over(window), parent, unit)


def _over(window: KeyWindow) -> Mask:
    """Bins past the window, which no level can serve."""
    n = window.n
    over = np.zeros(window.size, bool)
    over[[n - 2, n - 1, 2 * n - 2, 2 * n - 1]] = True
    return over


@singledispatch
def _propose(
    config: AnyCodebook, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    raise TypeError(f"no fit for {type(config).__name__}")


@_propose.register
def _lattice(
    config: Lattice, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    fresh = config.step * (unit or _body(held, window.values())) or 1.0
    step = fresh
    if parent is not None and parent.step and 1 / _KEEP_STEP < fresh / parent.step < _KEEP_STEP:
        step = parent.step
    return _multiples(step, config.bins // 2, window, over)


def _multiples(step: float, half: int, window: KeyWindow, over: Mask) -> Proposal:
    """Levels at so many multiples of a step on each side of zero; what is beyond them is protected."""
    levels = step * np.concatenate([np.arange(-half, 0), np.arange(1, half + 1)])
    beyond = over | (np.abs(window.values()) > (half + 0.5) * step)
    return Proposal(levels, beyond, np.zeros(window.size, bool), step)


@_propose.register
def _update(
    config: Update, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    return _multiples(config.step, _UPDATE_LEVELS, window, over)


def _body(held: Counts, values: Floats) -> float:
    """Root mean square without the top 0.5 % of |x|, which a few wild values would own."""
    order = np.argsort(np.abs(values), kind="stable")
    cumulative = np.cumsum(held[order])
    kept = order[cumulative <= 0.995 * cumulative[-1]] if cumulative[-1] else order[:0]
    weight = held[kept]
    body = float((weight * values[kept] ** 2).sum() / max(int(weight.sum()), 1)) ** 0.5
    if body == 0.0:  # all zeros, or too few distinct values to leave any out
        finite = np.isfinite(values)
        body = float((held[finite] * values[finite] ** 2).sum() / max(int(held.sum()), 1)) ** 0.5
    return body


@_propose.register
def _kmeans(
    config: KMeans, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    return _split(config, held, held, window, over)


def propose_weighed(config: KMeans, held: Counts, rest: Counts, window: KeyWindow) -> Proposal:
    """K-means where sensitivity already decided about some elements.

    Args:
        config: its `metric` says whether these include all that is pruned.
        held: int64[window.size], occurrences of finite values, of which fractions are taken.
        rest: the same without those decided about, which shape the levels.
        window: of the sketch.
    """
    if config.metric == "sensitivity":
        return replace(_split(config.model_copy(update={"prune": 0.0}), held, rest, window, _over(window)),
                       zero_is_level=not config.prune)
    return _split(config, held, rest, window, _over(window))


def _split(config: KMeans, held: Counts, rest: Counts, window: KeyWindow, over: Mask) -> Proposal:
    log, n = config.domain == "log", window.n
    values = window.values()
    points = window.bit_values() if log else values
    forced, pruned = _thresholds(held, values, config, over)
    if log:
        forced[n:] = True
        forced[[0, n]] = False  # zero of either sign is code 0
        pruned[[0, n]] = True
    chosen = (rest > 0) & ~forced & ~pruned
    if not log:
        chosen &= values != 0
    levels = _levels(points[chosen], rest[chosen], config)
    # With pruning, the pruned fraction is what was asked for: zero is not a level beside it.
    return Proposal(levels, forced, pruned, zero_is_level=log or not pruned.any())


def _thresholds(held: Counts, values: Floats, config: KMeans, over: Mask) -> tuple[Mask, Mask]:
    """Masks of protected and of pruned bins: at most the configured fractions of all elements (section 4.2)."""
    order = np.argsort(np.abs(values), kind="stable")
    cumulative = np.cumsum(held[order])
    total = cumulative[-1] if len(cumulative) else 0
    forced, pruned = over.copy(), np.zeros(len(values), bool)
    if total:
        if config.prune:
            pruned[order[cumulative <= config.prune * total]] = True
        forced[order[_top(held[order], config.protect)]] = True
    return forced, pruned & ~forced


def _top(held: Counts, fraction: float) -> Mask:
    """The last bins, in the order given, that hold at most `fraction` of all elements."""
    from_top = np.cumsum(held[::-1])[::-1]
    return (from_top <= fraction * max(int(held.sum()), 1)) & (held > 0)


def _levels(points: Floats, held: Counts, config: KMeans) -> Floats:
    if not len(points):
        return np.array([1.0])
    order = np.argsort(points)
    points, weights = points[order], held[order].astype(np.float64)
    if config.sigma < 1:
        weights = sample_weights(weights, points, config.sigma)
    bins = min(config.bins, len(points))
    if config.fit == "lloyd":
        return np.unique(lloyd_kmeans(points, weights, bins, seed=config.seed))
    path = exact_kmeans(points, weights, bins)
    return path.levels(path.k_max)


@_propose.register
def _uniform(
    config: Uniform, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    values, counts = Occupied(held, window).merged_zero()
    if not len(values):
        return _nothing(over)
    bins = entropy_bins(values, counts, config.min_bins, config.max_bins)
    return _alone(uniform_levels(float(values[0]), float(values[-1]), bins), over)


@_propose.register
def _adaptive(
    config: Adaptive, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    values, counts = Occupied(held, window).merged_zero()
    if not len(values):
        return _nothing(over)
    low, high = adaptive_range(values, counts, config.bins, config.step_bins, config.search_range)
    return _alone(uniform_levels(low, high, config.bins), over)


@_propose.register
def _gobo(
    config: Gobo, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    occupied = Occupied(held, window)
    if not len(occupied.values):
        return _nothing(over)
    values, counts = occupied.merged_zero()
    outliers = gobo_outliers(values, counts, config.outlier_threshold)
    if outliers.all():
        outliers[:] = False
    forced = over.copy()
    forced[occupied.place] = outliers[np.searchsorted(values, occupied.values + 0.0)]
    levels = l1_kmeans(values[~outliers], counts[~outliers], config.bins, config.max_iterations)
    return _alone(levels, forced)


@_propose.register
def _exponent(
    config: Exponent, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    occupied = Occupied(held, window)
    if not len(occupied.values):
        return _nothing(over)
    low, high = (edge[occupied.place] for edge in window.edges())
    values, first, same = np.unique(occupied.values + 0.0, return_index=True, return_inverse=True)  # zeros as one
    counts = np.bincount(same, weights=occupied.counts).astype(np.int64)
    levels, codes = exponent_buckets(values, low[first], high[first], counts, config.bits)
    if not len(levels):
        return _nothing(over)
    full = np.zeros(window.size, np.uint8)
    full[occupied.place] = codes[same]
    return Proposal(levels, over, np.zeros(window.size, bool), codes=full)


@_propose.register
def _largest(
    config: Largest, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    values = window.values()
    order = np.argsort(np.abs(values), kind="stable")
    forced = over.copy()
    forced[order[_top(held[order], config.fraction)]] = True
    return Proposal(np.array([1.0]), forced, ~forced)


@_propose.register
def _partition(
    config: Partition, held: Counts, window: KeyWindow, over: Mask, parent: Codebook | None, unit: float
) -> Proposal:
    return Proposal(np.array([1.0]), over, ~over)  # zero; what is in its turn is decided element by element


def _alone(levels: Floats, forced: Mask) -> Proposal:
    """Levels beside which zero is none, unless it is one of them."""
    return Proposal(levels, forced, np.zeros(len(forced), bool), zero_is_level=False)


def _nothing(over: Mask) -> Proposal:
    return Proposal(np.array([1.0]), over, np.zeros(len(over), bool))
