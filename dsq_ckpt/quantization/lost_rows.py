"""Weights of which some rows or columns vary so little, for the size of the tensor, that one step for all loses them.

Of more than two dimensions, slices along each count: input channels of kernels, inputs of stacked models.

They are small, or lie around a mean far from zero. Such are tables whose columns are in different units, as positions
beside quaternions, first layers for inputs of different sizes, and positions on a map, far from its origin. Rows that
training does not need, as those of tokens that never occur, are small too, after long weight decay; the size of their
gradients tells the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch

from dsq_ckpt.quantization.exact_values import on_host

RATIO = 64
"""How many times smaller than the tensor's root mean square a row's spread is which a refined step hardly resolves."""
_FEWEST = 6
"""Elements that a row must have: fewer may all be small, or alike, by chance."""
_SAMPLE = 16
"""Elements of each row that tell which to look at."""
_MOST = 1 << 16
"""About how many rows are sampled at once, and how many elements of a row are looked at: it bounds the memory."""
_LOOKED_AT = 16
_MEMBERS = 16
"""Length of a first dimension up to which rows and columns of each member are looked at: it may stack models."""
_OF_MANY = 64
"""Elements that they must have where it is longer: it may stack experts, but of kernels they are a few taps."""
_ENOUGH = 8
"""Elements from which on their mean is taken off: fewer may lie close to each other by chance."""
_ROUNDING = 8
"""Units of the last place by which a mean may be off."""
_BATCH = 1 << 20
"""Elements that are looked at together."""


def may_have_lost_rows(tensors: Sequence[torch.Tensor], wholes: Sequence[float | None]) -> list[bool]:
    """Return, for each tensor, whether `has_lost_rows` is to be asked; for most, few calls tell that it is not.

    Rows of one value count here. Tensors on a GPU are waited for once together, and those of one shape are looked at
    together: for a small tensor, the calls take longer than their work.

    Args:
        tensors: weights, or shards of them.
        wholes: as `has_lost_rows` has it, for each.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        for part in chain.from_iterable(_sides(tensor.shape)):
            sample = part.sample(tensor)
            alike.setdefault((sample.shape, sample.dtype, sample.device), []).append((place, sample))
    batches = []
    for (shape, *_), samples in alike.items():
        size = max(1, _BATCH // shape.numel())
        batches += [samples[start : start + size] for start in range(0, len(samples), size)]
    found = on_host([_least_and_usual(torch.stack([sample for _, sample in batch])) for batch in batches])
    leasts, sizes = [list[float]() for _ in tensors], [0.0 if whole is None else whole for whole in wholes]
    for batch, told in zip(batches, found, strict=True):
        for (place, _), least, usual in zip(batch, told[: len(batch)], told[len(batch) :], strict=True):
            leasts[place].append(least)
            if wholes[place] is None:  # one along few slices has few elements, and may miss the large ones
                sizes[place] = max(sizes[place], usual)
    return [any(not one * RATIO**2 >= size for one in found) for found, size in zip(leasts, sizes, strict=True)]


def _least_and_usual(samples: torch.Tensor) -> torch.Tensor:
    """Return, for each matrix, the least variance of a row without its zeros, then, for each, the mean square.

    A variance may be off by some 1e-6 of the mean square of its row, as that of large values around a mean.
    """
    values = samples.float()
    ones = values.new_ones(values.shape[2])  # products are faster than sums over few elements
    count, squares = values.sign().abs_() @ ones, values.square() @ ones
    sums = (values @ ones).masked_fill_(count < _ENOUGH, 0.0)
    least = (squares - sums.square_() / count.clamp(min=1)).div_(count.clamp(min=1)).amin(1)
    return torch.cat([least, squares.mean(1) / len(ones)])


def has_lost_rows(tensor: torch.Tensor, whole: float | None = None) -> bool:
    """Return whether a row, a column or a slice along a dimension has a spread below the tensor's size / `RATIO`.

    The spread is the standard deviation of the elements that are not zero, the size the root mean square. A sample of
    each row tells which to look at; rows of one value, beside zeros, count for nothing.

    Args:
        tensor: weights, or a shard of them.
        whole: mean square of the tensor that a shard is of; None: a sample tells that of `tensor`.
    """
    sides = _sides(tensor.shape)
    if not sides:
        return False
    limit = _limit(tensor, sides[0], whole)
    return any(_has_small(tensor, part, limit) for part in chain.from_iterable(sides))


def are_needed(tensor: torch.Tensor, squares: torch.Tensor, whole: float | None = None) -> bool | None:
    """Return whether training needs any of the rows or columns that `has_lost_rows` found; None where nothing tells.

    A row is needed if a change of it by a part of its spread is felt at least 1 / `RATIO` times as much as one of the
    others: to second order, with squared gradients for the curvature, by the mean of squared deviations times those.

    Args:
        tensor: weights of two or more dimensions.
        squares: their squared gradients, or averages of such; the shape of `tensor`.
        whole: as `has_lost_rows` has it; the others are then those of the shard.
    """
    sides = _sides(tensor.shape)
    if not sides:
        return None
    limit, told = _limit(tensor, sides[0], whole), list[bool]()
    for side in sides:
        found = [_most_felt(tensor, squares, part, limit) for part in side]
        usual = sum(total for _, total, _ in found) / sum(rows for *_, rows in found)
        if 0 < usual < math.inf:
            told.append(max(most for most, *_ in found) >= usual / RATIO)
    return any(told) if told else None


def _most_felt(tensor: torch.Tensor, squares: torch.Tensor, side: _Side, limit: float) -> tuple[float, float, int]:
    """Return how much a change of the small row is felt where this is most, of all rows in sum, and their number.

    The first is 0 without a small row.
    """
    spread = _Spread.of(side.sample(tensor))
    felt = spread.felt(side.sample(squares))
    total, number = float(felt.sum()), len(felt)
    felt = felt.nan_to_num().masked_fill((spread.variance >= limit) | (spread.number == 0), -1.0)
    rows = felt.topk(min(_LOOKED_AT, len(felt))).indices
    spread = _Spread.of(side.rows(tensor, rows))
    felt = spread.felt(side.rows(squares, rows))
    felt = felt.masked_fill((spread.variance >= limit) | (spread.number < _FEWEST), 0.0)
    return float(felt.max()), total, number


class _Side(NamedTuple):
    """Rows of a tensor: its slices along some dimensions, or a part of very many. Only those asked for are copied.

    Attributes:
        order: all dimensions, those along which the slices lie first.
        along: how many these are.
        sampled: parts of the dimensions in that order: of all slices, some elements.
        looked_at: the same with all elements, or some of very many.
    """

    order: tuple[int, ...]
    along: int
    sampled: tuple[slice, ...]
    looked_at: tuple[slice, ...]

    def sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a few elements of each row, as a matrix."""
        some = tensor.detach().permute(self.order)[self.sampled]
        return some if some.ndim == 2 else some.reshape(math.prod(some.shape[: self.along]), -1)

    def rows(self, tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return rows of which the numbers, in the sample, are given."""
        every = tensor.detach().permute(self.order)[self.looked_at]
        return every[torch.unravel_index(numbers, every.shape[: self.along])].flatten(1)


@lru_cache(maxsize=1024)
def _sides(shape: torch.Size) -> list[list[_Side]]:
    """Return how rows and columns of tensors of a shape lie, and slices along others, where these have enough elements.

    Rows are slices along the first dimension, columns along all others together. Very many rows of members are in
    several parts; of other sides of very many some are looked at.
    """
    if len(shape) < 2 or not shape.numel():
        return []
    dims = [dim for dim in range(len(shape)) if shape[dim] > 1 or len(shape) == 2]  # along one of 1 lies the whole
    dims += [dim for dim in range(len(shape)) if dim not in dims][: max(0, 2 - len(dims))]
    first, *others = dims
    along, stacked = [(first,), tuple(others)], list[int]()
    if len(others) > 1:
        along += [(dim,) for dim in others]
        least = _SAMPLE if shape[first] <= _MEMBERS else _OF_MANY
        if shape[first] <= _MEMBERS or len(dims) == 3:
            stacked = [dim for dim in others if shape.numel() >= least * shape[first] * shape[dim]]
    sides = [_side(shape, some) for some in dict.fromkeys(along)]
    sides += [_of_members(shape, first, dim) for dim in stacked]
    return list(filter(None, sides))


def _side(shape: torch.Size, along: tuple[int, ...]) -> list[_Side]:
    """Return how slices along some dimensions lie; nothing where they have too few elements."""
    across = tuple(dim for dim in range(len(shape)) if dim not in along)
    lengths, sizes = [shape[dim] for dim in along], [shape[dim] for dim in across]
    if math.prod(sizes) < _FEWEST:
        return []
    sampled = (slice(None, step * count, step) for step, count in _parted(sizes, _SAMPLE))
    return [_Side((*along, *across), len(along), (*_some(lengths), *sampled), (*_some(lengths), *_some(sizes)))]


def _of_members(shape: torch.Size, first: int, dim: int) -> list[_Side]:
    """Return the rows of members along a dimension, some members at a time if rows are very many: none is left out.

    Of many members, elements that lie side by side are sampled, which takes a fraction of the time of others.
    """
    members, rows = shape[first], shape[dim]
    across = tuple(one for one in range(len(shape)) if one not in (first, dim))
    sizes = [shape[one] for one in across]
    sampled = [slice(None, step * count, step) for step, count in _parted(sizes, _SAMPLE)]
    if members > _MEMBERS and across[-1] == len(shape) - 1:
        sampled = [*[slice(1)] * (len(across) - 1), slice(_SAMPLE)]
    step = max(1, 2 * _MOST // rows)
    parts = [(slice(start, start + step), *_some([rows])) for start in range(0, members, step)]
    return [_Side((first, dim, *across), 2, (*part, *sampled), (*part, *_some(sizes))) for part in parts]


def _some(sizes: Sequence[int]) -> list[slice]:
    """Return all of some dimensions, or about `_MOST` elements of very many."""
    if math.prod(sizes) < 2 * _MOST:
        return [slice(None)] * len(sizes)
    return [slice(None, None, step) for step, _ in _parted(sizes, _MOST)]


def _parted(sizes: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Return, for each dimension, a step, and how many such to take, for a number of elements, or somewhat fewer."""
    found, left = [(1, 1)] * len(sizes), number
    for done, place in enumerate(sorted(range(len(sizes)), key=lambda place: sizes[place])):
        count = max(1, min(sizes[place], round(left ** (1 / (len(sizes) - done)))))
        found[place] = max(1, sizes[place] // count), count
        left //= count
    return found


def _limit(tensor: torch.Tensor, side: Sequence[_Side], whole: float | None) -> float:
    """Return the mean square below which a row is small; see `has_lost_rows`."""
    if whole is None:
        samples = [part.sample(tensor).float().square() for part in side]
        whole = sum(float(one.sum()) for one in samples) / sum(one.numel() for one in samples)
    return whole / RATIO**2


def _has_small(tensor: torch.Tensor, side: _Side, limit: float) -> bool:
    """Return whether the variance of a row's elements that are not zero is below a limit."""
    spread = _Spread.of(side.sample(tensor))
    asked = spread.variance.nan_to_num().masked_fill((spread.variance >= limit) | (spread.number == 0), math.inf)
    least, rows = asked.topk(min(_LOOKED_AT, len(asked)), largest=False)
    if not bool(least[0] < limit):
        return False
    spread = _Spread.of(side.rows(tensor, rows))
    return bool(((spread.variance < limit) & (spread.number >= _FEWEST)).any())


class _Spread(NamedTuple):
    """How far the elements of each row that are not zero lie from their mean.

    Attributes:
        deviations: differences to the mean of the row; 0 for zeros. Of few elements, the mean counts as 0.
        variance: mean square of the deviations, without zeros.
        number: of elements that are not zero; 0 where all are one value, but for rounding.
    """

    deviations: torch.Tensor
    variance: torch.Tensor
    number: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor) -> _Spread:
        """Return that of a matrix."""
        values = matrix if matrix.dtype == torch.float64 else matrix.float()
        some = values != 0
        count = some.sum(1)
        mean = (values.sum(1) / count.clamp(min=1)).masked_fill_(count < _ENOUGH, 0.0)
        deviations = (values - mean[:, None]).mul_(some)
        variance = deviations.square().sum(1) / count.clamp(min=1)
        alike = variance <= (_ROUNDING * torch.finfo(values.dtype).eps * mean).square_()
        return cls(deviations, variance, count.masked_fill_(alike, 0))

    def felt(self, squares: torch.Tensor) -> torch.Tensor:
        """Return, for each row, the mean of squared deviations times squared gradients; float64, for what is tiny."""
        return (self.deviations.double().square() * squares.double()).mean(1)
