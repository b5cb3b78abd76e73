"""Weights of which some rows or columns are so much smaller than the others that one step for all loses them.

Such are tables whose columns are in different units, as positions beside quaternions, and first layers for inputs of
different sizes. Rows that training does not need, as those of tokens that never occur, are small too, after long weight
decay; the size of their gradients tells the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dsq_ckpt.quantization.nature import on_host

RATIO = 64
"""How many times smaller than the tensor's root mean square that of a row is which a refined step hardly resolves."""
_FEWEST = 6
"""Elements that a row must have: fewer may all be small by chance."""
_SAMPLE = 16
"""Elements of each row that tell which to look at."""
_MOST = 1 << 16
"""About how many rows are sampled, and how many elements of a row are looked at: it bounds the memory."""
_LOOKED_AT = 16
_BATCH = 1 << 20
"""Elements that are looked at together."""


def may_have_lost_rows(tensors: Sequence[torch.Tensor], wholes: Sequence[float | None]) -> list[bool]:
    """Return, for each tensor, whether `has_lost_rows` is to be asked; for most, few calls tell that it is not.

    Zeros in the samples count here. Tensors on a GPU are waited for once together, and those of one shape are looked at
    together: for a small tensor, the calls take longer than their work.

    Args:
        tensors: weights, or shards of them.
        wholes: as `has_lost_rows` has it, for each.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        for side in _sides(tensor):
            sample = _sample(_some_rows(side))
            alike.setdefault((sample.shape, sample.dtype, sample.device), []).append((place, sample))
    batches = []
    for (shape, *_), samples in alike.items():
        size = max(1, _BATCH // shape.numel())
        batches += [samples[start : start + size] for start in range(0, len(samples), size)]
    means = [torch.stack([sample for _, sample in batch]).float().square().mean(2) for batch in batches]
    found = on_host([torch.cat([mean.amin(1), mean.mean(1)]) for mean in means])
    asked = [False] * len(tensors)
    for batch, told in zip(batches, found, strict=True):
        for (place, _), least, usual in zip(batch, told[: len(batch)], told[len(batch) :], strict=True):
            whole = wholes[place]
            asked[place] |= not least * RATIO**2 >= (usual if whole is None else whole)
    return asked


def has_lost_rows(tensor: torch.Tensor, whole: float | None = None) -> bool:
    """Return whether a row (along the first dimension) or a column has a root mean square below the tensor's / `RATIO`.

    A sample of each row tells which to look at; zeros alone count for nothing.

    Args:
        tensor: weights, or a shard of them.
        whole: mean square of the tensor that a shard is of; None: a sample tells that of `tensor`.
    """
    sides = _sides(tensor)
    if not sides:
        return False
    limit = _limit(sides[0]) if whole is None else whole / RATIO**2
    return any(_has_small(side, limit) for side in sides)


def are_needed(tensor: torch.Tensor, squares: torch.Tensor, whole: float | None = None) -> bool | None:
    """Return whether training needs any of the rows or columns that `has_lost_rows` found; None where nothing tells.

    A row is needed if a change of it by a part of its size is felt at least 1 / `RATIO` times as much as one of the
    others: to second order, with squared gradients for the curvature, by the mean of squared values times those.

    Args:
        tensor: weights of two or more dimensions.
        squares: their squared gradients, or averages of such; the shape of `tensor`.
        whole: as `has_lost_rows` has it; the others are then those of the shard.
    """
    matrix, weighed = (one.detach().reshape(len(tensor), -1) for one in (tensor, squares))
    limit = _limit(matrix) if whole is None else whole / RATIO**2
    usual = float(_felt(_sample(_some_rows(matrix)), _sample(_some_rows(weighed))).mean())
    if not 0 < usual < math.inf:
        return None
    most = max(_most_felt(matrix, weighed, limit), _most_felt(matrix.t(), weighed.t(), limit))
    return most >= usual / RATIO


def _most_felt(matrix: torch.Tensor, squares: torch.Tensor, limit: float) -> float:
    """Return how much a change of one of the small rows is felt, of the one where this is most; 0 without any."""
    if matrix.shape[1] < _FEWEST:
        return 0.0
    matrix, squares = _some_rows(matrix), _some_rows(squares)
    mean, count = _mean_square(_sample(matrix))
    felt = _felt(_sample(matrix), _sample(squares)).nan_to_num().masked_fill((mean >= limit) | (count == 0), -1.0)
    rows = felt.topk(min(_LOOKED_AT, len(felt))).indices
    part, weighed = _some_rows(matrix.t()).t()[rows], _some_rows(squares.t()).t()[rows]
    mean, count = _mean_square(part)
    felt = _felt(part, weighed).masked_fill((mean >= limit) | (count < _FEWEST), 0.0)
    return float(felt.max())


def _felt(matrix: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the mean of squared values times squared gradients; float64, for what is tiny."""
    return (matrix.double().square() * squares.double()).mean(1)


def _sides(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return matrices whose rows are those of a tensor and its columns, where these have enough elements."""
    if tensor.ndim < 2 or not tensor.numel():
        return []
    matrix = tensor.detach().reshape(len(tensor), -1)
    return [side for side in (matrix, matrix.t()) if side.shape[1] >= _FEWEST]


def _limit(matrix: torch.Tensor) -> float:
    """Return the mean square below which a row is small."""
    return float(_sample(_some_rows(matrix)).float().square().mean()) / RATIO**2


def _sample(matrix: torch.Tensor) -> torch.Tensor:
    """Return some columns."""
    step = max(1, matrix.shape[1] // _SAMPLE)
    return matrix[:, : step * _SAMPLE : step]


def _some_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return all rows, or some of very many."""
    return matrix if len(matrix) < 2 * _MOST else matrix[:: len(matrix) // _MOST]


def _has_small(matrix: torch.Tensor, limit: float) -> bool:
    """Return whether the mean square of a row's elements that are not zero is below a limit."""
    matrix = _some_rows(matrix)
    mean, count = _mean_square(_sample(matrix))
    mean = mean.nan_to_num().masked_fill((mean >= limit) | (count == 0), math.inf)
    least, rows = mean.topk(min(_LOOKED_AT, len(mean)), largest=False)
    if not bool(least[0] < limit):
        return False
    mean, count = _mean_square(_some_rows(matrix.t()).t()[rows])
    return bool(((mean < limit) & (count >= _FEWEST)).any())


def _mean_square(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row, the mean square of the elements that are not zero, and how many these are."""
    squares, count = matrix.float().square(), matrix.count_nonzero(1)
    return squares.sum(1) / count.clamp(min=1), count
