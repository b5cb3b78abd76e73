"""Tensors that count as weights by name and shape, but hold what no training leaves in weights.

These are masks, tables of few constants, counts, and variances that an optimizer of the user's own keeps: a code would
make of 1 something near it, and of a small variance zero. They are told by what they hold, and stored exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_GLANCE = 64
"""Elements that tell of nearly all weights that they are such."""
_FEW = 16
"""Distinct values up to which a tensor is a mask or a table of constants."""


def unlike_weights(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether none of its elements is negative, or few distinct values occur.

    Zeros alone are like weights, as training may begin with them. Tensors on a GPU are waited for once together, and
    each that a few elements leave in doubt once or twice more.
    """
    flat = [_flat(tensor) for tensor in tensors]
    return [
        bool((min(glance, default=0) >= 0 and (one >= 0).all()) or (_is_few(glance) and _few_values(one)))
        and bool(one.any())
        for one, glance in zip(flat, _glances(flat), strict=True)
    ]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in any order, if possible without a copy."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).reshape(-1)


def _glances(flat: Sequence[torch.Tensor]) -> list[list[float]]:
    """Return a few elements of each tensor."""
    some = [one[:: max(1, len(one) // _GLANCE)][:_GLANCE] for one in flat]
    for device in {one.device for one in some} - {torch.device("cpu")}:
        mine = [number for number, one in enumerate(some) if one.device == device]
        seen = torch.cat([some[number].double() for number in mine]).cpu()
        for number, glance in zip(mine, seen.split([len(some[number]) for number in mine]), strict=True):
            some[number] = glance
    return [one.tolist() for one in some]


def _is_few(values: Sequence[float]) -> bool:
    return len(set(values)) <= _FEW


def _few_values(values: torch.Tensor) -> bool:
    """Return whether few distinct values occur; False where there is NaN."""
    left = values
    for _ in range(_FEW):
        if not _is_few(left[:1024].tolist()):
            return False
        left = left[left != left[0]] if len(left) else left
    return not len(left)
