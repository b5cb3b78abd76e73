"""Weights of which some rows or columns are so much smaller than the others that one step for all loses them.

Such are tables whose columns are in different units, as positions beside quaternions, and first layers for inputs of
different sizes. Rows that training does not need, as those of tokens that never occur, are small too, after long weight
decay; so they are told of, and no more.
"""

from __future__ import annotations

import torch

RATIO = 64
"""How many times smaller than the tensor's root mean square that of a row is which a refined step hardly resolves."""
_FEWEST = 6
"""Elements that a row must have: fewer may all be small by chance."""
_SAMPLE = 64
"""Elements of each row that tell which to look at."""
_MOST = 1 << 16
"""About how many rows are sampled, and how many elements of a row are looked at: it bounds the memory."""
_LOOKED_AT = 16


def has_lost_rows(tensor: torch.Tensor) -> bool:
    """Return whether a row (along the first dimension) or a column has a root mean square below the tensor's / `RATIO`.

    A sample of each row tells which to look at; zeros alone count for nothing.
    """
    if tensor.ndim < 2 or not tensor.numel():
        return False
    matrix = tensor.detach().reshape(len(tensor), -1)
    limit = float(_sample(_some_rows(matrix)).float().square().mean()) / RATIO**2
    return _has_small(matrix, limit) or _has_small(matrix.t(), limit)


def _sample(matrix: torch.Tensor) -> torch.Tensor:
    """Return some columns."""
    return matrix[:, :: max(1, matrix.shape[1] // _SAMPLE)][:, :_SAMPLE]


def _some_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return all rows, or some of very many."""
    return matrix[:: max(1, len(matrix) // _MOST)]


def _has_small(matrix: torch.Tensor, limit: float) -> bool:
    """Return whether the mean square of a row's elements that are not zero is below a limit."""
    if matrix.shape[1] < _FEWEST:
        return False
    matrix = _some_rows(matrix)
    mean, count = _mean_square(_sample(matrix))
    doubted = ((mean < limit) & (count > 0)).nonzero()[:_LOOKED_AT, 0]
    mean, count = _mean_square(_some_rows(matrix.t()).t()[doubted])
    return bool(((mean < limit) & (count >= _FEWEST)).any())


def _mean_square(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row, the mean square of the elements that are not zero, and how many these are."""
    squares, count = matrix.float().square(), matrix.count_nonzero(1)
    return squares.sum(1) / count.clamp(min=1), count
