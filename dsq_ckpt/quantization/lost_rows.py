"""Find weights with rows or columns that vary so little, relative to the tensor, that one step for all loses them.

In tensors of more than two dimensions, these are slices along each dimension, such as input channels of kernels or
inputs of stacked models.

Such rows are small, or lie around a mean far from zero. Examples are tables whose columns have different units, such as
positions beside quaternions, first layers for inputs of different sizes, and positions on a map, far from its origin.
Rows that training does not need, such as those of tokens that never occur, are small too, after long weight decay; the
size of their gradients distinguishes the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch

from dsq_ckpt.quantization.exact_values import values_on_host

RATIO = 64
"""A row is small if its spread is this many times below the tensor's root mean square: refined steps hardly resolve it.
"""
_FEWEST = 6
"""Elements that a row must have; fewer may all be small, or equal, by chance."""
_SAMPLE = 16
"""Elements of each row in the sample that selects the rows to examine."""
_MOST = 1 << 16
"""Rows that are sampled at once, and elements of a row that are examined, about; a bound on memory."""
_EXAMINED = 16
_MEMBERS = 16
"""Length of a first dimension up to which rows and columns of each member are examined: it may stack models."""
_OF_MANY = 64
"""Elements that they must have if it is longer: it may stack experts, but in kernels they are a few taps."""
_ENOUGH = 8
"""Elements from which their mean is subtracted; fewer may lie close to each other by chance."""
_ROUNDING = 8
"""Units in the last place by which a mean may be off."""
_BATCH = 1 << 20
"""Elements that are processed together."""


def may_have_lost_rows(tensors: Sequence[torch.Tensor], mean_squares: Sequence[float | None]) -> list[bool]:
    """Return, for each tensor, whether `has_lost_rows` is needed; a cheap test that rules out most tensors.

    Rows of equal values count here. Each GPU is synchronized once, and tensors of one shape are processed together: for
    a small tensor, calls take longer than their work.

    Args:
        tensors: weights, or shards of them.
        mean_squares: for each, the argument `mean_square` of `has_lost_rows`.
    """
    by_shape: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        for view in chain.from_iterable(_slice_views(tensor.shape)):
            sample = view.sample(tensor)
            by_shape.setdefault((sample.shape, sample.dtype, sample.device), []).append((number, sample))
    batches = []
    for (shape, *_), samples in by_shape.items():
        size = max(1, _BATCH // shape.numel())
        batches += [samples[start : start + size] for start in range(0, len(samples), size)]
    results = values_on_host([_variances_and_sizes(torch.stack([sample for _, sample in batch])) for batch in batches])
    variances, sizes = [list[float]() for _ in tensors], [0.0 if mean is None else mean for mean in mean_squares]
    for batch, result in zip(batches, results, strict=True):
        for (number, _), smallest, mean in zip(batch, result[: len(batch)], result[len(batch) :], strict=True):
            variances[number].append(smallest)
            if mean_squares[number] is None:  # variance along few slices has few elements, and may miss the large ones
                sizes[number] = max(sizes[number], mean)
    return [
        any(not variance * RATIO**2 >= size for variance in rows)
        for rows, size in zip(variances, sizes, strict=True)
    ]


def _variances_and_sizes(samples: torch.Tensor) -> torch.Tensor:
    """Return the least variance of a row without its zeros for each matrix, followed by the mean square of each.

    A variance may be off by some 1e-6 of the mean square of its row, as for large values around a mean.
    """
    values = samples.float()
    ones = values.new_ones(values.shape[2])  # products are faster than sums over few elements
    count, squares = values.sign().abs_() @ ones, values.square() @ ones
    sums = (values @ ones).masked_fill_(count < _ENOUGH, 0.0)
    smallest = (squares - sums.square_() / count.clamp(min=1)).div_(count.clamp(min=1)).amin(1)
    return torch.cat([smallest, squares.mean(1) / len(ones)])


def has_lost_rows(tensor: torch.Tensor, mean_square: float | None = None) -> bool:
    """Return whether a row, a column or a slice along a dimension has a spread below the tensor's size / `RATIO`.

    The spread is the standard deviation of the nonzero elements, the size the root mean square. A sample of each row
    selects the rows to examine. Rows whose nonzero elements are equal do not count.

    Args:
        tensor: weights, or a shard of them.
        mean_square: mean square of the whole tensor of a shard; None: estimated from a sample of `tensor`.
    """
    sides = _slice_views(tensor.shape)
    if not sides:
        return False
    limit = _mean_square_limit(tensor, sides[0], mean_square)
    return any(_has_small_row(tensor, view, limit) for view in chain.from_iterable(sides))


def are_rows_needed(tensor: torch.Tensor, squares: torch.Tensor, mean_square: float | None = None) -> bool | None:
    """Return whether training needs any of the rows or columns found by `has_lost_rows`; None if gradients are unknown.

    A row is needed if a change of it by a fraction of its spread has at least 1 / `RATIO` of the effect on the loss
    that such a change has for other rows. To second order, with squared gradients for the curvature, the effect is the
    mean of squared deviations times squared gradients.

    Args:
        tensor: weights of two or more dimensions.
        squares: squared gradients, or averages of them, in the shape of `tensor`.
        mean_square: see `has_lost_rows`; the other rows are then those of the shard.
    """
    sides = _slice_views(tensor.shape)
    if not sides:
        return None
    limit, needed = _mean_square_limit(tensor, sides[0], mean_square), list[bool]()
    for side in sides:
        effects = [_measure_effects(tensor, squares, view, limit) for view in side]
        mean = sum(total for _, total, _ in effects) / sum(rows for *_, rows in effects)
        if 0 < mean < math.inf:
            needed.append(max(effect for effect, *_ in effects) >= mean / RATIO)
    return any(needed) if needed else None


def _measure_effects(
    tensor: torch.Tensor, squares: torch.Tensor, side: _SliceView, limit: float
) -> tuple[float, float, int]:
    """Return the largest effect of a change of a small row, the sum of the effects of all rows, and their number.

    The first is 0 without a small row.
    """
    spread = _RowSpread.from_matrix(side.sample(tensor))
    effects = spread.effects(side.sample(squares))
    total, number = float(effects.sum()), len(effects)
    effects = effects.nan_to_num().masked_fill((spread.variance >= limit) | (spread.number == 0), -1.0)
    rows = effects.topk(min(_EXAMINED, len(effects))).indices
    spread = _RowSpread.from_matrix(side.rows(tensor, rows))
    effects = spread.effects(side.rows(squares, rows))
    effects = effects.masked_fill((spread.variance >= limit) | (spread.number < _FEWEST), 0.0)
    return float(effects.max()), total, number


class _SliceView(NamedTuple):
    """Rows of a tensor, as slices along some dimensions, or a part of very many. Only selected rows are copied.

    Attributes:
        dims: permutation of the dimensions; those that the slices are along come first.
        leading: number of those dimensions.
        sample_index: index into the permuted tensor of some elements of all slices.
        row_index: index of all elements, or some of very many.
    """

    dims: tuple[int, ...]
    leading: int
    sample_index: tuple[slice, ...]
    row_index: tuple[slice, ...]

    def sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a few elements of each row, as a matrix."""
        sample = tensor.detach().permute(self.dims)[self.sample_index]
        return sample if sample.ndim == 2 else sample.reshape(math.prod(sample.shape[: self.leading]), -1)

    def rows(self, tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows with these numbers in the sample."""
        rows = tensor.detach().permute(self.dims)[self.row_index]
        return rows[torch.unravel_index(numbers, rows.shape[: self.leading])].flatten(1)


@lru_cache(maxsize=1024)
def _slice_views(shape: torch.Size) -> list[list[_SliceView]]:
    """Return the views of rows, columns and other slices of tensors of a shape, where slices have enough elements.

    Rows are slices along the first dimension, columns along all others together. Each entry lists views that together
    cover one kind of slice: very many rows of members are in several parts. Of other kinds with very many slices some
    are examined.
    """
    if len(shape) < 2 or not shape.numel():
        return []
    dims = [dim for dim in range(len(shape)) if shape[dim] > 1 or len(shape) == 2]  # else the slice is the whole
    dims += [dim for dim in range(len(shape)) if dim not in dims][: max(0, 2 - len(dims))]
    first, *others = dims
    along, stacked = [(first,), tuple(others)], list[int]()
    if len(others) > 1:
        along += [(dim,) for dim in others]
        min_slices = _SAMPLE if shape[first] <= _MEMBERS else _OF_MANY
        if shape[first] <= _MEMBERS or len(dims) == 3:
            stacked = [dim for dim in others if shape.numel() >= min_slices * shape[first] * shape[dim]]
    sides = [_views_along(shape, kept_dims) for kept_dims in dict.fromkeys(along)]
    sides += [_member_views(shape, first, dim) for dim in stacked]
    return list(filter(None, sides))


def _views_along(shape: torch.Size, along: tuple[int, ...]) -> list[_SliceView]:
    """Return the view of slices along some dimensions; empty if the slices have too few elements."""
    others = tuple(dim for dim in range(len(shape)) if dim not in along)
    lengths, sizes = [shape[dim] for dim in along], [shape[dim] for dim in others]
    if math.prod(sizes) < _FEWEST:
        return []
    sampled = (slice(None, step * count, step) for step, count in _sample_steps(sizes, _SAMPLE))
    return [_SliceView((*along, *others), len(along), (*_thin(lengths), *sampled), (*_thin(lengths), *_thin(sizes)))]


def _member_views(shape: torch.Size, first: int, dim: int) -> list[_SliceView]:
    """Return views of the rows of members along a dimension, of some members each if rows are very many.

    Of many members, adjacent elements are sampled, which takes a fraction of the time of others.
    """
    members, rows = shape[first], shape[dim]
    others = tuple(axis for axis in range(len(shape)) if axis not in (first, dim))
    sizes = [shape[axis] for axis in others]
    sampled = [slice(None, step * count, step) for step, count in _sample_steps(sizes, _SAMPLE)]
    if members > _MEMBERS and others[-1] == len(shape) - 1:
        sampled = [*[slice(1)] * (len(others) - 1), slice(_SAMPLE)]
    step = max(1, 2 * _MOST // rows)
    parts = [(slice(start, start + step), *_thin([rows])) for start in range(0, members, step)]
    return [_SliceView((first, dim, *others), 2, (*part, *sampled), (*part, *_thin(sizes))) for part in parts]


def _thin(sizes: Sequence[int]) -> list[slice]:
    """Return slices of all elements of some dimensions, or of about `_MOST` elements of very many."""
    if math.prod(sizes) < 2 * _MOST:
        return [slice(None)] * len(sizes)
    return [slice(None, None, step) for step, _ in _sample_steps(sizes, _MOST)]


def _sample_steps(sizes: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Return, for each dimension, a step and a count of steps, to sample about `number` elements, or somewhat fewer."""
    steps, remaining = [(1, 1)] * len(sizes), number
    for position, dim in enumerate(sorted(range(len(sizes)), key=lambda dim: sizes[dim])):
        count = max(1, min(sizes[dim], round(remaining ** (1 / (len(sizes) - position)))))
        steps[dim] = max(1, sizes[dim] // count), count
        remaining //= count
    return steps


def _mean_square_limit(tensor: torch.Tensor, side: Sequence[_SliceView], mean_square: float | None) -> float:
    """Return the mean square below which a row is small; see `has_lost_rows`."""
    if mean_square is None:
        samples = [view.sample(tensor).float().square() for view in side]
        mean_square = sum(float(sample.sum()) for sample in samples) / sum(sample.numel() for sample in samples)
    return mean_square / RATIO**2


def _has_small_row(tensor: torch.Tensor, side: _SliceView, limit: float) -> bool:
    """Return whether the variance of a row's nonzero elements is below a limit."""
    spread = _RowSpread.from_matrix(side.sample(tensor))
    variances = spread.variance.nan_to_num().masked_fill((spread.variance >= limit) | (spread.number == 0), math.inf)
    smallest, rows = variances.topk(min(_EXAMINED, len(variances)), largest=False)
    if not bool(smallest[0] < limit):
        return False
    spread = _RowSpread.from_matrix(side.rows(tensor, rows))
    return bool(((spread.variance < limit) & (spread.number >= _FEWEST)).any())


class _RowSpread(NamedTuple):
    """Deviations of the nonzero elements of each row from their mean.

    Attributes:
        deviations: differences to the mean of the row; 0 for zeros. Of few elements, the mean counts as 0.
        variance: mean square of the deviations, without zeros.
        number: number of nonzero elements; 0 if all are equal, up to rounding.
    """

    deviations: torch.Tensor
    variance: torch.Tensor
    number: torch.Tensor

    @classmethod
    def from_matrix(cls, matrix: torch.Tensor) -> _RowSpread:
        """Return the spread of the rows of a matrix."""
        values = matrix if matrix.dtype == torch.float64 else matrix.float()
        nonzero = values != 0
        count = nonzero.sum(1)
        mean = (values.sum(1) / count.clamp(min=1)).masked_fill_(count < _ENOUGH, 0.0)
        deviations = (values - mean[:, None]).mul_(nonzero)
        variance = deviations.square().sum(1) / count.clamp(min=1)
        equal = variance <= (_ROUNDING * torch.finfo(values.dtype).eps * mean).square_()
        return cls(deviations, variance, count.masked_fill_(equal, 0))

    def effects(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the mean of squared deviations times squared gradients of each row; float64, against underflow."""
        return (self.deviations.double().square() * squares.double()).mean(1)
