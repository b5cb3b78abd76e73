"""Find tensors that count as weights by name and shape, but whose values no training leaves in weights.

These are masks, tables of few constants, counts, numbers of tokens or classes, variances that a custom optimizer keeps,
symmetric matrices such as covariances, and matrices that keep signs on their diagonal, such as those of Householder
reflections. A code would turn 1 into a value near it, a small variance into zero, and a covariance into a matrix with
negative eigenvalues. They are recognized by their values and stored exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from dsq_ckpt.core.autocast import no_autocast
from dsq_ckpt.quantization.manifolds import ManifoldScreen, first_matrix, sample_evenly

_GLANCE = 32
"""Size of the sample that rules out nearly all weights."""
_EDGE = 8
"""Elements of the first row and of the first column that rule out nearly all square weights."""
_DIAGONAL = 4
"""Elements of the first main diagonal that rule out signs there for nearly all weights."""
_FEW = 16
"""Distinct values up to which a tensor is a mask or a table of constants."""
_MOST_OFF = 0.01
"""Difference of a value from its mirror image, relative to the largest value, from which a matrix is not symmetric."""
_BLOCK = 1 << 20


@no_autocast()
def need_exact_storage(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether its values are unlike those of weights.

    True for tensors that are finite and have no negative number, only whole numbers, or few distinct values; for
    symmetric matrices, up to rounding; for matrices with 1 or -1 all along the diagonal, whose integers torch's
    `orthogonal` reads; and for tensors on a manifold (see `manifolds`). False for zeros alone, since training may begin
    with them.

    Each GPU is synchronized once for samples of all tensors, and again for tensors that the samples leave open.
    """
    screen, count = ManifoldScreen.run(tensors), len(tensors)
    samples = [*map(_sample, tensors), *map(_sample_edges, tensors), *map(_sample_diagonal, tensors)]
    sampled = values_on_host([*samples, *screen.results])
    constrained = screen.confirm(tensors, sampled[3 * count :])
    return [
        (min(sample, default=0) >= 0 and _is_nonnegative(tensor))
        or (_may_have_few_values(sample) and _has_few_values(tensor))
        or (all(map(float.is_integer, sample)) and _is_integral(tensor))
        or (_may_be_symmetric(edge) and _is_symmetric(tensor))
        or (len(diagonal) > 0 and {*map(abs, diagonal)} == {1.0} and _has_sign_diagonal(tensor)) or index in constrained
        for index, (tensor, sample, edge, diagonal) in enumerate(zip(
            tensors, sampled[:count], sampled[count : 2 * count], sampled[2 * count : 3 * count], strict=True
        ))
    ]


def are_zero(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether all of it is zero; a GPU is synchronized as by `need_exact_storage`."""
    sampled = values_on_host(list(map(_sample, tensors)))
    return [not any(sample) and not bool(tensor.any()) for tensor, sample in zip(tensors, sampled, strict=True)]


def exceed_bf16(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, whether its largest magnitude is neither zero nor in the range of normal bf16 numbers.

    Each GPU is synchronized once.
    """
    bf16 = torch.finfo(torch.bfloat16)
    ends = [torch.stack(tensor.detach().aminmax()) if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    largest = [max(map(abs, values)) for values in values_on_host(ends)]
    return [0 < magnitude < bf16.tiny or magnitude > bf16.max for magnitude in largest]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a tensor, flat."""
    part = tensor.detach()
    if part.ndim and not part.is_contiguous():  # flattening all of it would copy
        part = part[:: max(1, len(part) // 8)][:8]
    return sample_evenly(_permute_to_memory_order(part), part.ndim, _GLANCE)


def _sample_edges(tensor: torch.Tensor) -> torch.Tensor:
    """Return the beginnings of the first row and of the first column of a square matrix; else an empty tensor."""
    if not _is_square(tensor):
        return tensor.new_empty(0)
    first = first_matrix(tensor.detach())
    row, column = first[0, 1:_EDGE], first[1:_EDGE, 0]
    return torch.cat([row, column])


def _sample_diagonal(tensor: torch.Tensor) -> torch.Tensor:
    """Return the beginning of the main diagonal of the first matrix; empty if there is none."""
    if tensor.ndim < 2 or not tensor.numel():
        return tensor.new_empty(0)
    return first_matrix(tensor.detach()).diagonal()[:_DIAGONAL]


def values_on_host(tensors: list[torch.Tensor]) -> list[list[float]]:
    """Return the elements of small tensors; each device is synchronized once."""
    for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        values = torch.cat([tensors[number].double() for number in numbers]).cpu()
        for number, part in zip(numbers, values.split([len(tensors[number]) for number in numbers]), strict=True):
            tensors[number] = part
    return [tensor.tolist() for tensor in tensors]


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in any order, without a copy if possible."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return _permute_to_memory_order(tensor).reshape(-1)


def _permute_to_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the dimensions in their order in memory."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(_flatten(tensor.detach()).split(_BLOCK))


def _is_nonnegative(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, none is negative, and one is positive."""
    positive = False
    for block in _blocks(tensor):
        if not bool(((block >= 0) & (block < math.inf)).all()):
            return False
        positive = positive or bool(block.any())
    return positive


def _is_integral(tensor: torch.Tensor) -> bool:
    """Return whether all values are integers, are small enough to have a fraction, and one is not zero."""
    has_nonzero, limit = False, 1 / torch.finfo(tensor.dtype).eps
    for block in _blocks(tensor):
        if not bool(((block.abs() < limit) & (block == block.round())).all()):
            return False
        has_nonzero = has_nonzero or bool(block.any())
    return has_nonzero


def _is_square(tensor: torch.Tensor) -> bool:
    return tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2] > 1 and tensor.numel() > 0


def _tolerance(dtype: torch.dtype) -> float:
    """Return by how much of the largest value products in another order may differ."""
    return min(64 * torch.finfo(dtype).eps, _MOST_OFF)


def _may_be_symmetric(edges: Sequence[float]) -> bool:
    """Return whether the samples of the first row and column exist and are equal, up to rounding."""
    rows, columns = edges[: len(edges) // 2], edges[len(edges) // 2 :]
    tolerance = _MOST_OFF * max(map(abs, edges), default=0.0)
    return len(edges) > 0 and all(abs(a - b) <= tolerance for a, b in zip(rows, columns, strict=True))


def _is_symmetric(tensor: torch.Tensor) -> bool:
    """Return whether square matrices are symmetric, up to rounding, and not zero off the diagonal."""
    matrices = tensor.detach().flatten(0, -3) if tensor.ndim > 2 else tensor.detach()[None]
    largest = [float(block.abs().amax()) for block in _blocks(tensor)]
    magnitude, size = max(largest), tensor.shape[-1]
    if not (magnitude > 0 and all(map(math.isfinite, largest))):
        return False
    step, has_off_diagonal = max(1, _BLOCK // size), False
    for batch in matrices.split(max(1, _BLOCK // size**2)):
        for start in range(0, size, step):
            rows, columns = batch[:, start : start + step].double(), batch[..., start : start + step].mT.double()
            if bool(((rows - columns).abs() > magnitude * _tolerance(tensor.dtype)).any()):
                return False
            has_off_diagonal = has_off_diagonal or bool(rows.triu(start + 1).any())
    return has_off_diagonal


def _has_sign_diagonal(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, and the main diagonal of each matrix is 1 or -1 throughout."""
    signs = bool((tensor.detach().diagonal(dim1=-2, dim2=-1).abs() == 1).all())
    return signs and all(bool(block.isfinite().all()) for block in _blocks(tensor))


def _may_have_few_values(values: Sequence[float]) -> bool:
    return len(set(values)) <= _FEW


def _has_few_values(tensor: torch.Tensor) -> bool:
    """Return whether few distinct values occur, other than zero alone; False if there is NaN."""
    values: torch.Tensor | None = None
    for block in _blocks(tensor):
        remaining = block if block.element_size() >= 4 else block.float()
        while len(remaining):
            if values is not None:
                index = torch.searchsorted(values, remaining).clamp_(max=len(values) - 1)
                remaining = remaining[values[index] != remaining]
                if not len(remaining):
                    break
            unique = remaining[:1024].unique()
            values = unique if values is None else torch.cat([values, unique]).unique()
            if len(values) > _FEW or bool(values.isnan().any()):
                return False
    return values is not None and bool(values.any())
