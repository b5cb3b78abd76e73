"""Tensors that count as weights by name and shape, but hold what no training leaves in weights.

These are masks, tables of few constants, counts, numbers of tokens or classes, variances that an optimizer of the
user's own keeps, symmetric matrices such as covariances, and matrices that keep signs on their diagonal, as those of
Householder reflections: a code would make of 1 something near it, of a small variance zero, and of a covariance a
matrix with negative eigenvalues. They are told by what they hold, and stored exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from dsq_ckpt.core.autocast import no_autocast
from dsq_ckpt.quantization.manifolds import Looks, first_matrix, spread

_GLANCE = 32
"""Elements that tell of nearly all weights that they are such."""
_EDGE = 8
"""Elements of the first row, and of the first column, that tell of nearly all square weights that they are such."""
_DIAGONAL = 4
"""Elements of the first main diagonal that tell of nearly all weights that they hold no signs there."""
_FEW = 16
"""Distinct values up to which a tensor is a mask or a table of constants."""
_MOST_OFF = 0.01
"""Difference between a value and its mirror image, in largest values, from which on a matrix is not symmetric."""
_BLOCK = 1 << 20


@no_autocast()
def unlike_weights(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether it is finite and has no negative number, or whole numbers alone, or few values.

    So has a matrix that is symmetric, but for rounding, and one with 1 or -1 all along its diagonal: `orthogonal` of
    torch takes whole numbers from it. What keeps a constraint that no step would repair (see `manifolds`) is told too.

    Zeros alone are like weights, as training may begin with them. Tensors on a GPU are waited for once together, and
    those that a few elements leave in doubt again.
    """
    looks, count = Looks.at(tensors), len(tensors)
    seen = on_host([*map(_some, tensors), *map(_edges, tensors), *map(_diagonal, tensors), *looks.results])
    constrained = looks.told(tensors, seen[3 * count :])
    return [
        (min(glance, default=0) >= 0 and _no_negatives(tensor)) or (_is_few(glance) and _few_values(tensor))
        or (all(map(float.is_integer, glance)) and _whole_numbers(tensor))
        or (_may_be_symmetric(edges) and _symmetric(tensor))
        or (len(diagonal) > 0 and {*map(abs, diagonal)} == {1.0} and _has_signs(tensor)) or place in constrained
        for place, (tensor, glance, edges, diagonal) in enumerate(zip(
            tensors, seen[:count], seen[count : 2 * count], seen[2 * count : 3 * count], strict=True
        ))
    ]


def are_zero(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether all of it is zero; those on a GPU are waited for as by `unlike_weights`."""
    seen = on_host(list(map(_some, tensors)))
    return [not any(glance) and not bool(tensor.any()) for tensor, glance in zip(tensors, seen, strict=True)]


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements."""
    part = tensor.detach()
    if part.ndim and not part.is_contiguous():  # of which elements in a row are a copy
        part = part[:: max(1, len(part) // 8)][:8]
    return spread(_as_in_memory(part), part.ndim, _GLANCE)


def _edges(tensor: torch.Tensor) -> torch.Tensor:
    """Return the beginnings of the first row and of the first column of a square matrix; else nothing."""
    if not _is_square(tensor):
        return tensor.new_empty(0)
    first = first_matrix(tensor.detach())
    row, column = first[0, 1:_EDGE], first[1:_EDGE, 0]
    return torch.cat([row, column])


def _diagonal(tensor: torch.Tensor) -> torch.Tensor:
    """Return the beginning of the main diagonal of the first matrix; nothing where there is none."""
    if tensor.ndim < 2 or not tensor.numel():
        return tensor.new_empty(0)
    return first_matrix(tensor.detach()).diagonal()[:_DIAGONAL]


def on_host(some: list[torch.Tensor]) -> list[list[float]]:
    """Return the elements of small tensors; each device is waited for once."""
    for device in {one.device for one in some} - {torch.device("cpu")}:
        mine = [number for number, one in enumerate(some) if one.device == device]
        seen = torch.cat([some[number].double() for number in mine]).cpu()
        for number, glance in zip(mine, seen.split([len(some[number]) for number in mine]), strict=True):
            some[number] = glance
    return [one.tolist() for one in some]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in any order, if possible without a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return _as_in_memory(tensor).reshape(-1)


def _as_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the dimensions in the order in which they lie in memory."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(_flat(tensor.detach()).split(_BLOCK))


def _no_negatives(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, none is negative, and one is positive."""
    positive = False
    for block in _blocks(tensor):
        if not bool(((block >= 0) & (block < math.inf)).all()):
            return False
        positive = positive or bool(block.any())
    return positive


def _whole_numbers(tensor: torch.Tensor) -> bool:
    """Return whether no value has a fraction, though each is small enough for one, and one is not zero."""
    some, limit = False, 1 / torch.finfo(tensor.dtype).eps
    for block in _blocks(tensor):
        if not bool(((block.abs() < limit) & (block == block.round())).all()):
            return False
        some = some or bool(block.any())
    return some


def _is_square(tensor: torch.Tensor) -> bool:
    return tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2] > 1 and tensor.numel() > 0


def _tolerance(dtype: torch.dtype) -> float:
    """Return how much of the largest value products in another order may differ by."""
    return min(64 * torch.finfo(dtype).eps, _MOST_OFF)


def _may_be_symmetric(edges: Sequence[float]) -> bool:
    """Return whether the first row and column are there, and alike."""
    rows, columns = edges[: len(edges) // 2], edges[len(edges) // 2 :]
    most = _MOST_OFF * max(map(abs, edges), default=0.0)
    return len(edges) > 0 and all(abs(a - b) <= most for a, b in zip(rows, columns, strict=True))


def _symmetric(tensor: torch.Tensor) -> bool:
    """Return whether square matrices are symmetric, but for rounding, and not zero beside the diagonal."""
    matrices = tensor.detach().flatten(0, -3) if tensor.ndim > 2 else tensor.detach()[None]
    largest = [float(block.abs().amax()) for block in _blocks(tensor)]
    most, size = max(largest), tensor.shape[-1]
    if not (most > 0 and all(map(math.isfinite, largest))):
        return False
    step, beside = max(1, _BLOCK // size), False
    for some in matrices.split(max(1, _BLOCK // size**2)):
        for start in range(0, size, step):
            rows, columns = some[:, start : start + step].double(), some[..., start : start + step].mT.double()
            if bool(((rows - columns).abs() > most * _tolerance(tensor.dtype)).any()):
                return False
            beside = beside or bool(rows.triu(start + 1).any())
    return beside


def _has_signs(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, and the main diagonal of each matrix is 1 or -1 throughout."""
    signs = bool((tensor.detach().diagonal(dim1=-2, dim2=-1).abs() == 1).all())
    return signs and all(bool(block.isfinite().all()) for block in _blocks(tensor))


def _is_few(values: Sequence[float]) -> bool:
    return len(set(values)) <= _FEW


def _few_values(tensor: torch.Tensor) -> bool:
    """Return whether few distinct values occur, other than zero alone; False where there is NaN."""
    known: torch.Tensor | None = None
    for block in _blocks(tensor):
        left = block if block.element_size() >= 4 else block.float()
        while len(left):
            if known is not None:
                place = torch.searchsorted(known, left).clamp_(max=len(known) - 1)
                left = left[known[place] != left]
                if not len(left):
                    break
            more = left[:1024].unique()
            known = more if known is None else torch.cat([known, more]).unique()
            if len(known) > _FEW or bool(known.isnan().any()):
                return False
    return known is not None and bool(known.any())
