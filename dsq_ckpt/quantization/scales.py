"""Scales of tensors for quantization, from the octaves of their values and of their gradients.

The `exponent` of a tensor is log2 of the factor that it is divided by, a multiple of 1/4. In k-means groups it only
moves outliers into the range of their group. Momentum, and first moments over the square roots of second moments, are
scaled by the size of their own tensor. On a lattice the exponent sets the step. Rate theory asks for a step in inverse
proportion to the square root of the curvature, which the root mean square of the gradient approximates (measurements:
docs/design/weights.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dsq_ckpt.config.schema import TensorConfig
from dsq_ckpt.core.arrays import F64, Counts
from dsq_ckpt.core.wrappers import strip_wrappers
from dsq_ckpt.kernels.keys import FULL, KEYS_PER_OCTAVE
from dsq_ckpt.quantization.codebook import Codebook
from dsq_ckpt.quantization.groups import parameter_of
from dsq_ckpt.quantization.layout import GRADIENT_PREFIX, Layout
from dsq_ckpt.quantization.numbered_state import is_numbered_name, match_state_to_weights

OCTAVES = 256
OCTAVE_CENTRES = np.arange(OCTAVES, dtype=np.float64) - 127 + 0.5
_REACH = 2.0  # a step is within this many octaves of the median one
_WIDEST = 1.0  # log2: a unit is at most two root mean squares of the tensor
_UNKNOWN = -1.0  # log2: the unit of a tensor without gradients, half its root mean square
_UPDATE = -2.0  # log2: the usual root mean square of Adam's m / sqrt(v), of noise: sqrt((1 - b) / (1 + b)), b = 0.9
_NO_UPDATE = 127 + 3  # biased exponent from which m / sqrt(v) cannot be Adam's: v is zero, or was
_FEW = 1000  # one value in so many may be far larger than all others
_LOST = 2.0**-8  # fraction of a tensor's energy that rounding may lose in a base layer with fine steps
_COARSEST = 32.0  # in units, twice the largest configurable step: a larger step of the parent means a larger unit
_DRIFT = 0.75  # octaves by which a scale may be off before it is corrected
_OWN_DRIFT = 0.25  # same, for a tensor scaled by its own size: a bound on its error depends on it
_BELOW = 6.0  # octaves below the root mean square from which elements hardly count for it
_MOST = 100.0  # largest magnitude of an exponent in the format


class Gauge(NamedTuple):
    """A tensor that measures the gradients of a weight: squared gradients (power 1) or gradients (power 2)."""

    name: str
    power: int


@dataclass
class Scales:
    """Scales of the tensors of a save.

    Attributes:
        exponents: exponents by tensor; 0 for tensors that are absent.
        refit: groups to fit on full sketches, without their parent.
        rescaled: groups whose exponents changed; their joint sketch must be computed again.
        units: unit of a lattice's step by group; the group's root mean square for groups that are absent.
        out_of_range: tensors whose scale is outside the range of exponents; they cannot be quantized with their group.
    """

    exponents: dict[str, float] = field(default_factory=dict)
    refit: frozenset[str] = frozenset()
    rescaled: frozenset[str] = frozenset()
    units: dict[str, float] = field(default_factory=dict)
    out_of_range: frozenset[str] = frozenset()


def choose_scales(
    octaves: dict[str, Counts], layout: Layout, books: dict[str, Codebook], before: dict[str, float],
    outlier_octaves: int,
) -> Scales:
    """Return the scales of all tensors. They are the same on every rank, since the octaves are global.

    A group is refit without its parent if one of these holds:

    * It has no parent.
    * A scaled tensor of the group now differs from the group by as much as an outlier does.
    * Most of the energy of the group is below the resolution of its window. If the common unit of tensors has fallen,
      a small part of the energy of any tensor is enough.

    Without a refit, values that shrink, or tensors that were zero before, would all be coded as zero.

    Args:
        octaves: number of elements by biased exponent, int64[256], for every tensor and gauge.
        layout: the lossy tensors and their groups.
        books: codebooks of the parent, by group; groups without one are absent.
        before: exponents of the parent, by tensor.
        outlier_octaves: distance in octaves from which a tensor is an outlier of its group (0: never).
    """
    tensors, groups = layout.tensors, layout.groups
    scaled, unit, wanted = _scale_by_gradient(octaves, tensors, groups, find_gauges(layout))
    updates = {group for group, config in groups.items() if config.codebook.coordinates == "update"}
    relative = updates | {group for group, config in groups.items() if config.codebook.coordinates == "relative"}
    sized = {fqn: octaves[fqn].copy() for fqn, group in tensors.items() if group in relative}
    for fqn in sized:
        if tensors[fqn] in updates:
            sized[fqn][_NO_UPDATE:] = 0
    for fqn, energy in _mean_squares_of_used(sized, list(sized)).items():
        if energy:
            log_rms = _UPDATE if tensors[fqn] in updates else 0.0
            wanted[fqn] = round(2 * float(np.log2(energy)) - 4 * log_rms) / 4
    refit = {group for group in groups if group not in books}
    rescaled, corrected, out_of_range = set(), set[str](), set[str]()
    members = {group: [fqn for fqn in tensors if tensors[fqn] == group] for group in groups}
    for group in groups:
        names = members[group]
        if group in scaled or group in relative:
            max_drift = _OWN_DRIFT if group in relative else _DRIFT
            moved = {fqn for fqn in names if fqn in wanted and abs(wanted[fqn] - before.get(fqn, 0.0)) >= max_drift}
            out_of_range |= {fqn for fqn in moved if abs(wanted[fqn]) > _MOST}
            if moved - out_of_range:
                rescaled.add(group)
                corrected |= moved  # a tensor that keeps its scale keeps the codes of elements that did not move
            continue
        distances = _distances(octaves, names)
        if not outlier_octaves or groups[group].codebook.coordinates != "values":  # others have their own units
            distances = {}
        wanted |= {fqn: float(round(d)) for fqn, d in distances.items() if abs(d) >= outlier_octaves}
        moved = {fqn for fqn, d in distances.items() if abs(d - before.get(fqn, 0.0)) >= outlier_octaves}
        out_of_range |= {fqn for fqn in moved if abs(wanted.get(fqn, 0.0)) > _MOST}
        refit |= {group} if moved - out_of_range else set()
    rescaled -= refit
    exponents = {
        fqn: wanted.get(fqn, 0.0) if group in refit or fqn in corrected else before.get(fqn, 0.0)
        for fqn, group in tensors.items()
    }
    fallen = {
        group for group in groups
        if group not in refit
        and _is_unresolved(
            octaves, [fqn for fqn in members[group] if fqn not in out_of_range], exponents, books[group],
            group in scaled and books[group].step > _COARSEST * unit,
        )
    }
    exponents |= {fqn: wanted.get(fqn, 0.0) for fqn, group in tensors.items() if group in fallen}
    out_of_range |= {fqn for fqn, exponent in exponents.items() if abs(exponent) > _MOST}
    exponents |= dict.fromkeys(out_of_range, 0.0)
    return Scales(
        exponents, frozenset(refit | fallen), frozenset(rescaled - fallen), dict.fromkeys(scaled, unit),
        frozenset(out_of_range),
    )


def find_gauges(layout: Layout) -> dict[str, Gauge]:
    """Return the gauge of the gradients of each weight that has one.

    Averages of gradients are preferred. Optimizer state keyed by parameter number is matched by shape.
    """
    weights = [fqn for fqn, group in layout.tensors.items() if group.startswith("weights/")]
    if layout.has_gradients:
        return {fqn: Gauge(GRADIENT_PREFIX + fqn, 2) for fqn in weights}
    kinds = set(layout.state.values())
    kind, power = ("exp_avg_sq", 1) if "exp_avg_sq" in kinds else ("momentum", 2)
    state = [fqn for fqn, state_kind in layout.state.items() if state_kind == kind]
    numbered = match_state_to_weights(state, layout.shapes, layout.model_tensors)
    by_parameter = {parameter_of(fqn): fqn for fqn in state if not is_numbered_name(fqn)}
    gauges = {}
    for fqn in weights:
        tail = strip_wrappers(fqn)
        while tail and tail not in by_parameter:
            tail = tail.partition(".")[2]
        if name := by_parameter.get(tail) or numbered.get(fqn):
            gauges[fqn] = Gauge(name, power)
    return gauges


def _scale_by_gradient(
    octaves: dict[str, Counts], tensors: dict[str, str], groups: dict[str, TensorConfig], gauges: dict[str, Gauge]
) -> tuple[set[str], float, dict[str, float]]:
    """Return the groups scaled by gradients, the unit of their steps and the exponents of their tensors."""
    strength = {
        group: config.codebook.gradient_power for group, config in groups.items() if config.codebook.gradient_power > 0
    }
    names = [fqn for fqn, group in tensors.items() if group in strength]
    energy = mean_squares(octaves, names)
    size = {fqn: int(octaves[fqn][:255].sum()) for fqn in names}
    gradient = {fqn: float(_mean_power(octaves[gauges[fqn].name], gauges[fqn].power)) for fqn in names if fqn in gauges}
    members = [
        fqn for fqn, mean in gradient.items()
        if mean > 0 and energy[fqn] > 0 and not octaves[fqn][-1] and not octaves[gauges[fqn].name][-1]
    ]
    if not members:
        return set(), 0.0, {}
    count = sum(size[fqn] for fqn in members)
    # The geometric mean of the tensors' root mean squares: a few large ones (embeddings) do not dominate it.
    unit = float(2.0 ** (sum(0.5 * np.log2(energy[fqn]) * size[fqn] for fqn in members) / count))
    logs = {fqn: float(np.log2(gradient[fqn])) for fqn in members}
    middle = sum(logs[fqn] * size[fqn] for fqn in members) / count
    exponents = {}
    for fqn in names:
        if not energy[fqn]:
            continue
        log_rms = 0.5 * float(np.log2(energy[fqn])) - float(np.log2(unit))
        if fqn in logs:
            wish = float(np.clip(strength[tensors[fqn]] * (middle - logs[fqn]), -_REACH, _REACH))
            wish = min(wish, log_rms + _WIDEST)
        else:
            wish = log_rms + _UNKNOWN
        exponents[fqn] = round(4 * wish) / 4
    return set(strength), unit, exponents


def mean_squares(octaves: dict[str, Counts], names: list[str]) -> dict[str, float]:
    """Return the mean square of each tensor, without its few largest values."""
    if not names:
        return {}
    means = _mean_power(_without_largest(np.stack([octaves[fqn] for fqn in names])), 2)
    return dict(zip(names, means.tolist(), strict=True))


def _mean_squares_of_used(octaves: dict[str, Counts], names: list[str]) -> dict[str, float]:
    """Return the mean square of each tensor; of its larger elements alone where most are zero or far smaller.

    Most first moments are zero where few elements have gradients: in pruned layers, and in tables most of whose rows
    were not used lately. Scaled by all of them, a few large values would decide how coarse the parts of cells are, and
    dense tensors of the group would lose all they have.
    """
    means = mean_squares(octaves, names)
    for fqn, mean in means.items():
        counts = octaves[fqn][:255]
        total, used = int(counts.sum()), -1
        while mean and (count := int(counts[1:][OCTAVE_CENTRES[1:255] >= np.log2(mean) / 2 - _BELOW].sum())) != used:
            used = count
            if 0 < 2 * used < total:  # these have nearly all of the energy
                mean = means[fqn] * total / used
        means[fqn] = mean
    return means


def _without_largest(octaves: Counts) -> Counts:
    """Return counts by octave, [..., 256], without the few largest values, which must not set the scale of all others.

    A single value 10,000 times the others, for example of a bug or an attention sink, is protected in any case.
    """
    remaining, descending = octaves.copy(), octaves[..., 254:0:-1]  # the largest first
    larger = np.cumsum(descending, axis=-1) - descending
    remaining[..., 254:0:-1] -= np.clip(descending.sum(-1, keepdims=True) // _FEW - larger, 0, descending)
    return remaining


def _mean_power(octaves: Counts, power: int) -> F64:
    """Return means of |x|**power, float64[...], from counts by octave, int64[..., 256]."""
    counts = octaves[..., :255]
    means: F64 = (counts[..., 1:] * 2.0 ** (power * OCTAVE_CENTRES[1:255])).sum(-1) / np.maximum(counts.sum(-1), 1)
    return means


def _is_unresolved(
    octaves: dict[str, Counts], names: list[str], exponents: dict[str, float], book: Codebook, each: bool
) -> bool:
    """Return whether most of the energy of a group is below the resolution of its window.

    With `each`, a small part of the energy of any tensor is enough. It is set if the common unit of tensors has fallen,
    for example because one of them has collapsed; a new tensor is scaled to that unit alone.
    """
    names = [fqn for fqn in names if not octaves[fqn][-1]]
    if not names:
        return False
    first = book.window.lo // KEYS_PER_OCTAVE
    if each:  # the octave in which the window begins is only partly resolved
        first += 1
    exponent = np.arange(1, 255) - np.array([exponents[fqn] for fqn in names])[:, None]
    parts = _without_largest(np.stack([octaves[fqn] for fqn in names]))[:, 1:255] * 4.0 ** (exponent - 127.0)
    energy, resolved = parts.sum(1), np.where(exponent >= first, parts, 0.0).sum(1)
    if each and (energy - resolved > _LOST * energy).any():
        return True
    return bool(resolved.sum() < energy.sum() / 2)


def _distances(octaves: dict[str, Counts], names: list[str]) -> dict[str, float]:
    """Return log2 of the ratio of each tensor's root mean square to that of its group; empty for a group of one tensor.

    The value of a group is the median over its elements, which one outlier does not change. All-zero tensors have no
    entry.
    """
    names = [fqn for fqn in names if not octaves[fqn][-1] and octaves[fqn][1:255].any()]
    if len(names) < 2:
        return {}
    counts = np.stack([octaves[fqn] for fqn in names])
    counts_held = dict(zip(names, counts[:, 1:255].sum(1).tolist(), strict=True))
    remaining = _without_largest(counts)
    squares = _mean_power(remaining, 2) * remaining[:, :255].sum(1) / np.maximum(remaining[:, 1:255].sum(1), 1)
    size = dict(zip(names, (0.5 * np.log2(squares)).tolist(), strict=True))
    names.sort(key=lambda fqn: size[fqn])
    cumulative = np.cumsum([counts_held[fqn] for fqn in names])
    median = size[names[int(np.searchsorted(cumulative, cumulative[-1] / 2))]]
    return {fqn: size[fqn] - median for fqn in names}


def count_octaves_of_bins(bins: Counts, counts: Counts) -> Counts:
    """Return the number of elements by biased exponent, int64[256]; 0: zeros and subnormals, 255: Inf and NaN."""
    key = bins % FULL.n  # 0: under, 1..: key - 63, n - 2: over (none), n - 1: non-finite
    exponent = np.where(key == FULL.n - 1, 255, (key + KEYS_PER_OCTAVE - 1) // KEYS_PER_OCTAVE)
    return np.bincount(exponent, weights=counts, minlength=OCTAVES).astype(np.int64)
