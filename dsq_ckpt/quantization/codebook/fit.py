"""Fit of a group on its sketch: codebook, table of codes, and exact counts of the codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from dsq_ckpt.codebooks import CodebookConfig, Histogram, LevelFit
from dsq_ckpt.codebooks.base import MAX_EXTRA_BITS, MAX_LEVELS
from dsq_ckpt.codebooks.histogram import nearest_index
from dsq_ckpt.coding.codes import RefinedCells
from dsq_ckpt.core.arrays import F64, Codes, Counts, Mask
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.kernels.keys import KeyWindow
from dsq_ckpt.quantization.codebook.base import Codebook, PartitionTurn, SensitivitySplit, centre_zero
from dsq_ckpt.quantization.codebook.table import OccupiedBins, code_counts, entropy_bits, rate_distortion_table

_OCTAVE = 64  # keys per power of two
_PAYS = 0.98  # a delta must be at most this fraction of a keyframe to be worth the dependency
_CLEARLY_PAYS = 0.7  # at most this fraction: taken without a fit of the alternative


def pad_codes(per_code: F64) -> F64:
    """Pad an array with an entry per code to all 256 codes, as kernels take it: float64[256]."""
    full = np.zeros(256)
    full[: len(per_code)] = per_code
    return full


@dataclass(frozen=True)
class GroupFit:
    """Fit with which a group is quantized and coded; the same on every rank, since counts are global.

    Attributes:
        codebook: meaning of the codes.
        window: key window of the sketch and of `table`.
        table: uint8[rows, window.size]; one row per previous code, the last row for elements without one.
        counts: int64[rows, symbols], number of times each code follows each previous code, over all ranks.
        uses_parent: False if previous codes do not pay; then there is one row.
        bits: expected size of all codes of the group, over all ranks.
        mean_square: mean square of the finite values of the group, in the units of the group.
        error: mean squared error of the base layer over elements that are not protected.
        refinement_bits: the refinement layer divides cells into 2**bits parts; 0: there is none.
        update_error: relative error of the next optimizer update after a restore, for first moments in its units.
    """

    codebook: Codebook
    window: KeyWindow
    table: Codes
    counts: Counts
    uses_parent: bool
    bits: float
    mean_square: float
    error: float
    refinement_bits: int
    update_error: float | None = None
    limits: tuple[float, float] | None = None
    """Sensitivity below which elements are pruned, and from which they are protected."""
    partition_turn: PartitionTurn | None = None
    """Elements that are protected by their position."""

    @cached_property
    def cells(self) -> tuple[F64, F64]:
        """Lower edge and one over the width (0 for no width) of the cell of each code, as kernels take them."""
        width = self.codebook.cell_high - self.codebook.cell_low
        inverse = np.divide(1.0, width, where=width > 0, out=np.zeros_like(width))
        return pad_codes(self.codebook.cell_low), pad_codes(inverse)

    @cached_property
    def refined_cells(self) -> RefinedCells:
        """The same cells, with the parts of the refinement layer if there is one."""
        return RefinedCells(*self.cells, self.refinement_bits, self.codebook.domain == "log")

    @property
    def refined_error(self) -> float:
        """Mean squared error with the refinement layer, in the units of `mean_square`.

        Values are assumed to be uniform in the parts of their cells. Protected values have no error.
        """
        book = self.codebook
        part_width = (book.cell_high - book.cell_low) / 2.0**self.refinement_bits
        if book.domain == "log":  # cells are in log2
            part_width = part_width * np.log(2) * book.levels
        counts = self.counts.sum(0)[: len(part_width)]
        return float((counts * part_width**2).sum() / 12 / max(int(self.counts.sum()), 1))

    def refined(self, bits: int) -> GroupFit:
        """Return the same codes with more refinement bits; only for linear cells."""
        fine = replace(self, codebook=self.codebook.divided(bits), refinement_bits=bits)
        is_known = self.update_error is not None and self.mean_square > 0
        return replace(fine, update_error=math.sqrt(fine.refined_error / self.mean_square)) if is_known else fine

    def recounted(self, counts: Counts, error: float) -> GroupFit:
        """Return the same codebook for codes that were not chosen by the table alone.

        Args:
            counts: counts of the codes.
            error: mean squared error of the codes.
        """
        return replace(self, counts=counts, bits=entropy_bits(counts), error=error)


@dataclass(frozen=True)
class GroupSketch:
    """Counts of the elements of a group over all ranks, on which its codebook is fitted.

    Attributes:
        joint: int64[rows, window.size], counts of (previous code, key) pairs; the last row for elements without a
            previous code. One row if there is no parent.
        window: key window of `joint`.
        unit: unit of the step of a lattice; 0: root mean square of the group.
        split: elements that are decided by sensitivity, and not in `joint`.
        partition_turn: elements of `joint` that are protected by their position; only if all others become zero.
    """

    joint: Counts
    window: KeyWindow
    unit: float = 0.0
    split: SensitivitySplit | None = None
    partition_turn: PartitionTurn | None = None

    def without_parent(self) -> GroupSketch:
        """Return the sketch of the same elements, without their previous codes."""
        split = self.split
        if split is not None:
            split = replace(
                split, pruned=split.pruned.sum(0, keepdims=True), protected=split.protected.sum(0, keepdims=True)
            )
        return replace(self, joint=self.joint.sum(0, keepdims=True), split=split)


def fit_group(
    sketch: GroupSketch, config: CodebookConfig, parent: Codebook | None, refinement_bits: int = 0,
    deltas: int = 0,
) -> GroupFit:
    """Fit a group on its joint sketch.

    Args:
        sketch: counts of the elements of the group.
        config: settings of the codebook.
        parent: codebook of the group in the parent checkpoint; a lattice keeps its step.
        refinement_bits: largest width of refinement symbols, which divide cells into 2**bits parts; a codebook with a
            bound takes the least width that keeps the bound.
        deltas: number of deltas since the keyframe, before this one. Once the coarser codebook of `config` was chosen,
            it stays up to the next keyframe, because its codes say too little about codes of the finer one.

    Raises:
        ConfigError: the proposal of the codebook is invalid.
    """
    fitted = _fit_with_or_without_parent(sketch, config, parent, refinement_bits)
    if parent is None or config.coarser is None:
        return fitted
    factor = MAX_EXTRA_BITS[min(deltas, len(MAX_EXTRA_BITS) - 1)]
    coarser = fitted
    if math.isfinite(factor):
        coarser = _fit_with_or_without_parent(sketch, config.coarser, parent, refinement_bits)
    return coarser if fitted.bits - coarser.bits > factor * int(sketch.joint.sum()) else fitted


def _fit_with_or_without_parent(
    sketch: GroupSketch, config: CodebookConfig, parent: Codebook | None, refinement_bits: int
) -> GroupFit:
    """Fit with the previous codes, or without them if they do not pay."""
    fitted = _fit(sketch, config, parent, refinement_bits)
    if (turn := sketch.partition_turn) is not None:
        counts = fitted.counts.copy()
        counts[-1, 0] -= turn.elements
        counts[-1, fitted.codebook.protected] += turn.elements
        return replace(fitted, counts=counts, bits=entropy_bits(counts), partition_turn=turn)
    unconditional = entropy_bits(fitted.counts.sum(0, keepdims=True))
    if sketch.joint.shape[0] == 1 or fitted.bits < _CLEARLY_PAYS * unconditional:
        return fitted
    alternative = _fit(sketch.without_parent(), config, parent, refinement_bits)
    return fitted if fitted.bits < _PAYS * alternative.bits else alternative


def _fit(sketch: GroupSketch, config: CodebookConfig, parent: Codebook | None, refinement_bits: int) -> GroupFit:
    joint, window, split = sketch.joint, sketch.window, sketch.split
    occupied, total = OccupiedBins.from_joint(joint), joint.sum(0)
    if split is not None:  # fractions refer to all elements
        total = total + split.pruned.sum(0) + split.protected.sum(0)
    values = window.values()
    finite = np.isfinite(values)
    counts_held = total * finite
    count = max(int(counts_held.sum()), 1)
    mean_square = float((counts_held * np.square(values, where=finite, out=np.zeros_like(values))).sum() / count)
    histogram = Histogram(
        counts_held, window, sketch.unit, parent.step if parent is not None else 0.0,
        None if split is None else joint.sum(0) * finite,
    )
    proposal = config.propose(histogram)
    _check_proposal(config, proposal, window)
    levels, step, log = proposal.levels, proposal.step, config.logarithmic
    points = window.bit_values() if log else values
    no_bins = np.zeros(window.size, bool)
    forced = histogram.beyond | (no_bins if proposal.forced is None else proposal.forced)
    pruned = no_bins if proposal.pruned is None else proposal.pruned
    positions, codes = _sort_levels(levels, log)
    if proposal.codes is not None:
        base = proposal.codes.copy()
    elif proposal.zero_is_level:
        base = codes[nearest_index(np.where(finite, points, 0.0), positions)]
    else:
        base = (nearest_index(np.where(finite, points, 0.0), levels) + 1).astype(np.uint8)
    base[pruned] = 0
    protected = len(levels) + 1
    base[forced] = protected
    movable = ~forced & ~(pruned & log)
    if step:
        spread = step * step
    else:
        by_code = np.zeros(protected + 1)
        by_code[codes] = positions
        gap = np.where(movable, points - by_code[base], 0.0)
        spread = 12.0 * float((counts_held * gap * gap).sum() / count)
    price = config.price * spread
    table = rate_distortion_table(occupied, len(joint), points, base, movable, positions, codes, price)
    counts = code_counts(occupied, table, protected + 1)
    if split is not None:
        counts[:, protected] += split.protected.sum(1) + split.pruned[:, forced].sum(1)
        counts[:, 0] += split.pruned[:, ~forced].sum(1)
    if proposal.centred:
        levels = _centre_levels(occupied, table, values, levels, step)
    real_levels = np.concatenate([[0.0], _bits_to_floats(levels) if log else levels])
    low, high = _cells(occupied, table, window, protected, log)
    if split is not None and (zeros := np.flatnonzero(split.pruned[:, ~forced].any(0))).size:
        edges = np.stack(window.edges())[:, ~forced][:, zeros]
        low[0], high[0] = min(low[0], edges.min()), max(high[0], edges.max())
    error = _base_error(occupied, table, window, real_levels, protected, split, ~forced)
    max_bits = refinement_bits
    refinement_bits, widened, update_error = config.refinement(
        max_bits, _refined_error(occupied, table, values, error, low, high)
    )
    if not 0 <= refinement_bits <= max_bits:
        raise ConfigError(f"codebook '{config.fit}' asks for {refinement_bits} refinement bits, of {max_bits} at most")
    if not 1 <= widened < 256:
        raise ConfigError(f"codebook '{config.fit}' widens cells {widened} times, expected a factor from 1 on")
    low, high = _widen(low, high, widened)
    if refinement_bits and not log:  # on a log axis zero is code 0, which is not refined
        centre_zero(low, high, 2.0**refinement_bits)
    wanted_window = _next_window(counts_held, window, real_levels, log, max_bits if update_error is not None else 0)
    book = Codebook(real_levels, wanted_window, "log" if log else "linear", step, low, high)
    return GroupFit(
        book, window, table, counts, joint.shape[0] > 1, entropy_bits(counts), mean_square,
        error, refinement_bits, update_error, None if split is None else split.limits,
    )


def _check_proposal(config: CodebookConfig, proposal: LevelFit, window: KeyWindow) -> None:
    """Raise `ConfigError` if a proposal could not be stored or read correctly."""
    levels = np.asarray(proposal.levels)
    masks = [mask for mask in (proposal.forced, proposal.pruned) if mask is not None]
    if levels.dtype != np.float64 or levels.ndim != 1 or not 1 <= len(levels) <= MAX_LEVELS:
        form = f"{levels.dtype} of shape {levels.shape}, expected float64[1 to {MAX_LEVELS}]"
    elif not np.isfinite(levels).all() or (np.diff(levels) < 0).any():
        form = "levels that are not finite or do not ascend"
    elif config.logarithmic and not (levels > 0).all():
        form = "levels on the logarithmic axis that are not positive"
    elif proposal.centred and not (config.logarithmic and proposal.step > 0):
        form = "centred levels without a step, or not on the logarithmic axis"
    elif any(mask.shape != (window.size,) or mask.dtype.kind != "b" for mask in masks):
        form = f"masks that are not bool[{window.size}], one for each bin"
    elif (codes := proposal.codes) is not None and (
        codes.shape != (window.size,) or codes.dtype != np.uint8 or int(codes.max()) > len(levels)
    ):
        form = f"codes that are not uint8[{window.size}] up to {len(levels)}, the number of levels"
    else:
        return
    raise ConfigError(f"codebook '{config.fit}' ({type(config).__module__}) proposes {form}; correct its `propose`")


def _refined_error(
    occupied: OccupiedBins, table: Codes, values: F64, base: float, low: F64, high: F64
) -> Callable[[int, float], float]:
    """Return a function that maps bits and a widening of cells to the mean squared error relative to the mean square.

    Protected values are ignored: first moments that large, which no run of Adam has, would dominate the energy.

    Args:
        occupied, table, values: entries of the sketch, table of codes, and values of bins.
        base: mean squared error of the base layer over elements that are not protected.
        low, high: bounds of the cells.
    """
    @cache
    def load() -> tuple[Codes, F64, F64, float]:
        codes = occupied.codes(table)
        is_coded = codes < len(low)
        _, bins, counts = occupied.where(is_coded)
        weight = counts / max(int(counts.sum()), 1)
        return codes[is_coded], values[bins], weight, float((weight * values[bins] ** 2).sum()) or 1.0

    def error(bits: int, widened: float) -> float:
        codes, values, weight, energy = load()
        if not bits:
            return base / energy
        lower, upper = _widen(low, high, widened)
        centre_zero(lower, upper, 2.0**bits)
        width = (upper - lower)[codes] / 2.0**bits
        offset = np.clip(np.floor((values - lower[codes]) / np.where(width > 0, width, 1.0)), 0, 2**bits - 1) + 0.5
        return float((weight * (values - lower[codes] - offset * width) ** 2).sum()) / energy

    return error


def _sort_levels(levels: F64, log: bool) -> tuple[F64, Codes]:
    """Return the levels, including zero except on a log axis, in ascending order, and the code of each."""
    if log:
        return levels, np.arange(1, len(levels) + 1, dtype=np.uint8)
    positions = np.concatenate([[0.0], levels])
    order = np.argsort(positions, kind="stable")
    return positions[order], order.astype(np.uint8)


def _bits_to_floats(levels: F64) -> F64:
    """Return the floats whose bits, read as an integer, are level * 2^23."""
    return np.rint(levels * 2.0**23).astype(np.uint32).view(np.float32).astype(np.float64)


def _centre_levels(occupied: OccupiedBins, table: Codes, values: F64, levels: F64, step: float) -> F64:
    """Return levels moved to the means of their values, by half a step at most, so that their order is kept."""
    codes = occupied.codes(table)
    is_coded = (codes > 0) & (codes <= len(levels))
    codes, (_, bins, counts) = codes[is_coded] - 1, occupied.where(is_coded)
    weight = counts.astype(np.float64)
    weights = np.bincount(codes, weight, len(levels))
    means = np.bincount(codes, weight * values[bins], len(levels)) / np.maximum(weights, 1)
    octave = np.floor(np.log2(np.where(weights > 0, means, 1.0)))
    bits = octave + 127 + means / np.exp2(octave) - 1  # bits of a float approximate its logarithm piecewise linearly
    return np.where(weights > 0, bits.clip(levels - step / 2, levels + step / 2), levels)


def _cells(occupied: OccupiedBins, table: Codes, window: KeyWindow, protected: int, log: bool) -> tuple[F64, F64]:
    """Return the bounds of the values of each code over all occupied entries of the table."""
    if log:
        n = window.n
        keys = np.concatenate([[0], np.arange(window.lo, window.hi + 1), [window.hi + 1]]).astype(np.float64)
        low_edge = np.tile(keys * (2.0**17 / 2.0**23), 2)
        high_edge = np.tile(np.append(keys[1:], keys[-1] + 1) * (2.0**17 / 2.0**23), 2)
        assert len(low_edge) == 2 * n
    else:
        low_edge, high_edge = window.edges()
    codes = occupied.codes(table)
    low, high = np.full(256, np.inf), np.full(256, -np.inf)
    np.minimum.at(low, codes, low_edge[occupied.bins])
    np.maximum.at(high, codes, high_edge[occupied.bins])
    absent = np.isinf(low)
    absent[0] |= log
    low[absent] = high[absent] = 0.0
    return low[:protected], high[:protected]


def _widen(low: F64, high: F64, factor: float) -> tuple[F64, F64]:
    """Return the bounds of cells `factor` times as wide, with the same centres."""
    margin = (factor - 1) / 2 * (high - low)
    return low - margin, high + margin


def _next_window(counts: Counts, window: KeyWindow, levels: F64, log: bool, finer: int) -> KeyWindow:
    """Return the window for the next save: the magnitudes seen, with a margin of three octaves for growth.

    Magnitudes below a 64th of the smallest level are usually not resolved. They are on a log axis, where only true
    zeros may be below the window, and where the sketch decides on refinement, which is finer by `finer` bits.
    """
    n = window.n
    resolved = counts[1 : n - 2] + counts[n + 1 : 2 * n - 2]
    occupied = np.flatnonzero(resolved)
    top = window.lo + int(occupied[-1]) if len(occupied) else 127 * _OCTAVE
    if counts[n - 2] or counts[2 * n - 2]:
        top = window.hi + 8 * _OCTAVE
    hi = min(top + 3 * _OCTAVE, 255 * _OCTAVE)
    if log:
        return KeyWindow(_OCTAVE, max(hi, 2 * _OCTAVE))
    smallest = np.abs(levels[1:]).min()
    bits = int(np.float32(min(smallest, 3e38)).view(np.uint32)) >> 17
    lo = min(max(bits - (6 + finer) * _OCTAVE, _OCTAVE), hi - _OCTAVE)
    return KeyWindow(max(lo, _OCTAVE), max(hi, max(lo, _OCTAVE) + _OCTAVE))


def _base_error(
    occupied: OccupiedBins, table: Codes, window: KeyWindow, levels: F64, protected: int,
    split: SensitivitySplit | None, unforced: Mask,
) -> float:
    """Return the mean squared error of unprotected values, assumed to be uniform in their bins."""
    values, (low, high) = window.values(), window.edges()
    codes = occupied.codes(table)
    is_coded = codes != protected
    codes, (_, bins, weight) = codes[is_coded], occupied.where(is_coded)
    square = (values[bins] - levels[codes]) ** 2 + (high[bins] - low[bins]) ** 2 / 12
    total, elements = float((weight * square).sum()), int(weight.sum())
    if split is not None:
        zeros = split.pruned.sum(0) * unforced
        total += float((zeros * np.square(values, where=zeros > 0, out=np.zeros_like(values))).sum())
        elements += int(zeros.sum())
    return total / max(elements, 1)
