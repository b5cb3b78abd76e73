"""Weights of which some rows or columns are so much smaller than the others that one step for all loses them.

Such are tables whose columns are in different units, as positions beside quaternions, and first layers for inputs of
different sizes. Rows that training does not need, as those of tokens that never occur, are small too, after long weight
decay; so they are told of, and no more.
"""

from __future__ import annotations

import torch

RATIO = 64
"""How many times smaller than the tensor's root mean square that of a row is which a refined step hardly resolves."""
_SAMPLE = 64
_LOOKED_AT = 16


def has_lost_rows(tensor: torch.Tensor) -> bool:
    """Return whether a row (along the first dimension) or a column has a root mean square below the tensor's / `RATIO`.

    A sample of each row tells which to look at; zeros alone count for nothing.
    """
    if tensor.ndim < 2 or not tensor.numel():
        return False
    matrix = tensor.detach().reshape(len(tensor), -1)
    limit = float(_sample(matrix).float().square().mean()) / RATIO**2
    return _has_small(matrix, limit) or _has_small(matrix.t(), limit)


def _sample(matrix: torch.Tensor) -> torch.Tensor:
    """Return some columns."""
    return matrix[:, :: max(1, matrix.shape[1] // _SAMPLE)][:, :_SAMPLE]


def _has_small(matrix: torch.Tensor, limit: float) -> bool:
    """Return whether a row's mean square is below a limit and not zero."""
    doubted = (_sample(matrix).float().square().mean(1) < limit).nonzero()[:, 0]
    found = matrix[doubted[:_LOOKED_AT]].float().square().mean(1)
    return bool(((found > 0) & (found < limit)).any())
