"""The tensor of a group with the largest relative error, estimated from sketches before anything is written.

The error of a group is relative to the group's energy. A tensor far smaller than the others is quantized with the same
steps and has a larger relative error, which the group's figure does not show.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsq_ckpt.core.arrays import F64, Counts
from dsq_ckpt.quantization.codebook import GroupFit
from dsq_ckpt.quantization.codebook.table import OccupiedBins
from dsq_ckpt.quantization.scales import OCTAVE_CENTRES, OCTAVES

_AT_ONCE = 1024  # tensors


class WorstTensor(NamedTuple):
    """A tensor with its relative root mean square error, and factors for the group's errors.

    Attributes:
        tensor: name of the tensor.
        error: its relative error, with the refinement layer if there is one.
        plain: factor from the group's relative error, which is measured on scaled values, to that of unscaled values.
        plain_refined: the same with the refinement layer.
    """

    tensor: str
    error: float
    plain: float = 1.0
    plain_refined: float = 1.0


def find_worst_tensor(
    fitted: GroupFit, joint: Counts, octaves: dict[str, Counts], exponents: dict[str, float]
) -> WorstTensor | None:
    """Return the tensor of a group with the largest relative error, with the refinement layer if there is one.

    Values are assumed to be coded like all values of the group in the same octave; the estimate is within a fifth or
    so.

    Args:
        fitted: fit of the group.
        joint: int64[rows, bins], the sketch that `fitted` was fitted to.
        octaves: int64[256] elements by biased exponent, of each tensor of the group.
        exponents: log2 of the factor taken out of tensors; 0 if absent.

    Returns:
        None if all tensors are zero.
    """
    bits = fitted.refinement_bits
    occupied = _finite_entries(fitted, joint)
    errors = [_error_by_octave(fitted, occupied, bit_count) for bit_count in ([0, bits] if bits else [0])]
    result, names, sums = None, list(octaves), np.zeros((1 + len(errors), 2))  # scaled and plain: energy, errors
    for start in range(0, len(names), _AT_ONCE):
        batch = names[start : start + _AT_ONCE]
        elements = np.stack([octaves[fqn][1:255] for fqn in batch])
        shifts = np.array([exponents.get(fqn, 0.0) for fqn in batch])[:, None]
        energies = elements * 4.0 ** (OCTAVE_CENTRES[1:255] - shifts)
        places = np.clip(np.arange(1, 255) - np.rint(shifts).astype(np.int64), 0, OCTAVES - 1)
        total = energies.sum(1)
        squares = [(elements * factor[places]).sum(1) for factor in errors]
        last = np.minimum(elements * errors[-1][places], energies).sum(1)
        relative = np.sqrt(last / np.where(total > 0, total, 1.0))
        for index, values in enumerate((total, *squares)):
            sums[index] += values.sum(), (values * 4.0 ** shifts[:, 0]).sum()
        worst = int(relative.argmax())
        if total.any() and (result is None or relative[worst] > result.error):
            result = WorstTensor(batch[worst], float(relative[worst]))
    if result is None:
        return None
    total, *squares = sums
    factors = [
        float(np.sqrt(pair[1] / total[1] / (pair[0] / total[0]))) if pair.all() and total.all() else 1.0
        for pair in squares
    ]
    return result._replace(plain=factors[0], plain_refined=factors[-1])


def _finite_entries(fitted: GroupFit, joint: Counts) -> OccupiedBins:
    """Return the finite entries of the sketch of a group, by the rows of its table."""
    if len(fitted.table) < len(joint):  # the previous codes did not pay
        joint = joint.sum(0, keepdims=True)
    occupied = OccupiedBins.from_joint(joint)
    return occupied.where(np.isfinite(fitted.window.values())[occupied.bins])


def _error_by_octave(fitted: GroupFit, occupied: OccupiedBins, bits: int) -> F64:
    """Return the mean squared error of values by octave, float64[256]; for empty octaves, that of the nearest one
    below.

    Args:
        fitted: fit of the group.
        occupied: the sketch that it was fitted to.
        bits: bits of the refinement layer; 0: without.
    """
    book = fitted.codebook
    codes, values = occupied.codes(fitted.table), fitted.window.values()[occupied.bins]
    square = (values - np.append(book.levels, 0.0)[codes]) ** 2
    if bits:
        part_width = np.append(book.cell_high - book.cell_low, 0.0) / 2.0**bits
        width = part_width[codes] * (np.log(2) * np.abs(values) if book.domain == "log" else 1.0)
        square = np.where((book.domain == "log") & (codes == 0), square, width**2 / 12)
    square[codes == book.protected] = 0.0
    with np.errstate(divide="ignore"):
        places = np.clip(np.floor(np.log2(np.abs(values))) + 127, 0, OCTAVES - 1).astype(np.int64)
    parts = square * occupied.counts, occupied.counts
    total, count = (np.bincount(places, weights=each, minlength=OCTAVES) for each in parts)
    octaves = np.flatnonzero(count)
    if not len(octaves):
        return np.zeros(OCTAVES)
    nearest = octaves[np.clip(np.searchsorted(octaves, np.arange(OCTAVES), side="right") - 1, 0, None)]
    return np.asarray((total / np.maximum(count, 1))[nearest])
