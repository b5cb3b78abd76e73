"""Weights on a manifold: with an exact constraint that errors of a percent break and later steps do not repair.

These are matrices with orthogonal rows or columns, and rotations and poses, which are updated by multiplication; points
in the unit ball, near its rim, such as Poincare embeddings; and points of a hyperboloid. A model may mark its
parameters by an attribute `manifold`, as geoopt does; otherwise the constraint is recognized by the values.

If the constraint holds for each row, it is recognized in a shard too. A shard with some rows of a matrix with
orthogonal columns is not recognized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

_OFF = 1e-3
"""Relative error of a constraint that is tolerated: many steps in float32 lose this much, and codes ten times that."""
_POINTS = 64
"""Points in the sample that rules out nearly all weights; fewer of long points."""
_GLANCE = 1 << 12
"""Elements in that sample, about."""
_LONGEST = 512
"""Elements of a point of the ball. Long rows of ordinary weights have about equal norms, which may be nearly 1."""
_NEAR, _SHARE, _FEWEST = 0.99, 10, 16
"""Norm from which a point is near the rim; one in `_SHARE` points must be, and `_FEWEST` at least."""
_ROUNDING = 8
"""Units in the last place by which norms of normalized rows may be off."""
_PICKED = 16
"""Vectors of a matrix that are multiplied with all others."""
_BATCH = 1 << 20
"""Elements that are processed together."""
_LONG = _BATCH // _PICKED
"""Length of rows up to which whole rows are copied at once."""
_CACHED = 1 << 17
"""Elements of samples that are processed together, so that they stay in a cache."""


def is_on_manifold(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is marked as lying on a manifold other than Euclidean space."""
    manifold = getattr(parameter, "manifold", None)
    return manifold is not None and not any(base.__name__ == "Euclidean" for base in type(manifold).__mro__)


def first_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first of the matrices along the last two dimensions."""
    return tensor[(0,) * (tensor.ndim - 2)] if tensor.ndim > 2 else tensor


def sample_evenly(tensor: torch.Tensor, leading: int, count: int) -> torch.Tensor:
    """Return evenly spaced entries along the leading dimensions, flattened into one; nothing else is copied."""
    number = math.prod(tensor.shape[:leading])
    step = max(1, number // count)
    if leading == 1 or tensor.is_contiguous():
        return tensor.reshape(number, *tensor.shape[leading:])[::step][:count]
    positions, index = torch.arange(min(count, number), device=tensor.device) * step, []
    for size in reversed(tensor.shape[:leading]):
        index.append(positions % size)
        positions = positions // size
    return tensor[tuple(reversed(index))]


class ManifoldScreen(NamedTuple):
    """A first test of a few vectors of each tensor. Tensors of one shape are tested together, to save calls.

    Attributes:
        batches: for each result, positions of the tensors, and the full test for tensors that pass.
        results: for each tensor of a batch, 1 if the full test is needed, else 0; on its device.
    """

    batches: list[tuple[list[int], Callable[[torch.Tensor], bool]]]
    results: list[torch.Tensor]

    @classmethod
    def run(cls, tensors: Sequence[torch.Tensor]) -> ManifoldScreen:
        """Test a sample of each tensor, without synchronizing a device."""
        by_shape: dict[tuple[bool, torch.Size, torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            if tensor.ndim < 2 or not tensor.numel():
                continue
            local = tensor.detach()
            for pair in _first_row_pairs(local):
                shape = torch.Size((2, pair.numel() // 2))
                by_shape.setdefault((True, shape, pair.dtype, pair.device), []).append((number, pair))
            points = _sample_points(local)
            if points.shape[0] > 1 < points.shape[1]:
                by_shape.setdefault((False, points.shape, points.dtype, points.device), []).append((number, points))
        screen = cls([], [])
        for (pairs, shape, *_), samples in by_shape.items():
            size = max(1, _CACHED // shape.numel())
            for batch in (samples[start : start + size] for start in range(0, len(samples), size)):
                values = _stack([_as_matrix(sample) for _, sample in batch])
                screen.batches.append(
                    ([number for number, _ in batch], _are_orthogonal if pairs else _are_manifold_points)
                )
                screen.results.append(
                    (_may_be_orthogonal(values) if pairs else _may_be_manifold_points(values)).float()
                )
        return screen

    def confirm(self, tensors: Sequence[torch.Tensor], results: Sequence[Sequence[float]]) -> set[int]:
        """Return the positions of the tensors with a constraint, by the full test where the first one leaves it open.

        Args:
            tensors: tensors of the screen.
            results: its results, on the host.
        """
        open_tests = {
            (number, test) for (places, test), flags in zip(self.batches, results, strict=True)
            for number, flag in zip(places, flags, strict=True) if flag
        }
        return {number for number, test in open_tests if test(tensors[number])}


def _tolerance(dtype: torch.dtype) -> float:
    return max(_OFF, 2 * torch.finfo(dtype).eps)


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors stacked into one; a single tensor is not copied."""
    if len(tensors) == 1:
        return tensors[0][None]
    return torch.stack(list(tensors))


def _as_wide(matrices: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the matrices with more than matrix row and column, transposed if they have more rows than columns."""
    return [
        matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
        for matrix in matrices if min(matrix.shape[-2:]) > 1
    ]


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a kernel as one matrix; the columns of a wide one have their order in memory, so that it is a view."""
    wide = tensor.numel() >= len(tensor) ** 2
    order = sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True) if wide else range(1, tensor.ndim)
    return tensor.permute(0, *order).flatten(1)


def _trailing_matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the matrices along the last two dimensions, and the rotations in poses."""
    poses = tensor.ndim > 2 and tensor.shape[-2:] in ((3, 4), (4, 4))
    return [tensor, tensor[..., :3, :3]] if poses else [tensor]


def _candidate_matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return wide matrices that may have orthogonal rows: matrices, kernels as one matrix, rotations of poses."""
    return _as_wide([*_trailing_matrices(tensor), *([_as_matrix(tensor)] if tensor.ndim > 2 else [])])


def _first_row_pairs(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the first two rows of the first candidate matrices, as views; rows of a kernel keep its dimensions."""
    pairs = [matrix[:2] for matrix in _as_wide(map(first_matrix, _trailing_matrices(tensor)))]
    rows, columns = len(tensor), tensor.numel() // len(tensor)
    if tensor.ndim == 2 or min(rows, columns) < 2:
        return pairs
    if rows <= columns:
        return [*pairs, tensor[:2]]
    last = max(axis for axis, size in enumerate(tensor.shape) if axis and size > 1)  # two columns lie along it
    return [*pairs, first_matrix(tensor.movedim((last, 0), (-2, -1)))[:2]]


def _may_be_orthogonal(pairs: torch.Tensor) -> torch.Tensor:
    """Return, for each pair of vectors, whether they are orthogonal and of equal length."""
    off = _tolerance(pairs.dtype)
    one = other = both = torch.zeros((), device=pairs.device)
    for part in pairs.split(max(1, _BATCH // (2 * len(pairs))), 2):
        first, second = part.float().unbind(1)
        one = one + first.square().sum(1)
        other, both = other + second.square().sum(1), both + (first * second).sum(1)
    return (one > 0) & ((one - other).abs_() <= off * one) & (both.abs_() <= off * one)


def _are_orthogonal(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of matrices with orthogonal rows or columns of matrix length per matrix."""
    orthogonal = any(
        _have_orthogonal_rows(matrix.reshape(-1, *matrix.shape[-2:]))
        for matrix in _candidate_matrices(tensor.detach())
    )
    return orthogonal and all(bool(points.isfinite().all()) for points in _iterate_points(tensor))


def _have_orthogonal_rows(matrices: torch.Tensor) -> bool:
    """Return whether the rows of each matrix are orthogonal, by the products of some rows with all others.

    Products in ordinary weights are off by sqrt(size / length), and rounding of each element by a fraction of this.
    """
    number, size, length = matrices.shape
    if number == 1 and size == 2 and torch.finfo(matrices.dtype).eps > _OFF:
        return False  # in bfloat16 one product may be that small by chance
    off = _tolerance(matrices.dtype) * math.sqrt(size / length)
    rows = slice(None, None, max(1, size // _PICKED))
    for batch in matrices.split(max(1, _BATCH // (size * length))):
        picked = batch[:, rows][:, :_PICKED]
        if length <= _LONG:
            picked = picked.double()  # once for all blocks
        _, squares = _row_products(picked, picked)
        scale = squares.mean(1)[:, None]
        limit = scale * off
        if not (bool((scale > 0).all()) and _are_orthogonal_to(picked, squares, [picked], scale, limit)):
            return False
        if size > picked.shape[1] and not _are_orthogonal_to(
            picked, squares, batch.split(max(1, _BATCH // length), 1), scale, limit
        ):
            return False
    return True


def _are_orthogonal_to(
    picked: torch.Tensor, squared: torch.Tensor, all_rows: Iterable[torch.Tensor], scale: torch.Tensor,
    limit: torch.Tensor,
) -> bool:
    """Return whether all rows have the squared length `scale`, and their products with some rows are zero.

    Args:
        picked: some rows of each matrix.
        squared: squared lengths of `picked`.
        all_rows: blocks of all rows of each matrix.
        scale: a number for each matrix.
        limit: tolerance for rounding, for each matrix.
    """
    sums = torch.zeros_like(squared)
    for block in all_rows:
        products, squares = _row_products(picked, block)
        if not bool(((squares - scale).abs() <= limit).all()):
            return False
        sums += products.square().sum(2)
    sums -= squared.square()  # products of rows with themselves
    return bool((sums.clamp(min=0).sqrt() <= limit).all())


def _row_products(picked: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of some rows with others, and the squared lengths of the others, in float64.

    Float64 is not rounded to TF32. Parts of long rows are copied one at a time.
    """
    products = squares = torch.zeros((), dtype=torch.float64, device=picked.device)
    for picked_part, rows_part in zip(picked.split(_LONG, 2), rows.split(_LONG, 2), strict=True):
        wide = rows_part.double()
        products, squares = products + picked_part.double() @ wide.mT, squares + wide.square().sum(2)
    return products, squares


def _iterate_points(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the vectors along the last dimension in blocks; at most one block is copied."""
    local = tensor.detach()
    if local.ndim == 2 or local.is_contiguous():
        yield from local.reshape(-1, local.shape[-1]).split(max(1, _BATCH // local.shape[-1]))
        return
    for part in local.split(max(1, _BATCH // local[0].numel())):
        if len(part) > 1:
            yield part.reshape(-1, part.shape[-1])
        else:
            yield from _iterate_points(part[0])


def _sample_points(tensor: torch.Tensor) -> torch.Tensor:
    """Return some of the vectors along the last dimension."""
    part = tensor
    if not part.is_contiguous() and part.ndim > 2:
        part = part[:: max(1, len(part) // 8)][:8]
    return sample_evenly(part, part.ndim - 1, max(2, min(_POINTS, _GLANCE // part.shape[-1])))


def _may_be_manifold_points(points: torch.Tensor) -> torch.Tensor:
    """Return, for each set of points, whether all may lie in the unit ball, some near its rim, or on a hyperboloid."""
    values, off = points.float(), _tolerance(points.dtype)
    norms = torch.linalg.vector_norm(values, dim=2)
    largest = norms.amax(1)
    times = values[:, :, :: points.shape[2] - 1].abs()
    timelike = (times >= (0.5**0.5 - off) * norms[:, :, None]).all(1).any(1)
    return timelike | ((largest < 1) & (largest > _NEAR)) if points.shape[2] <= _LONGEST else timelike


def _are_manifold_points(tensor: torch.Tensor) -> bool:
    """Return whether all points lie in the unit ball, and many near its rim, or all on one hyperboloid.

    The time coordinate of a hyperboloid is the first or the last one: twice its square less the squared norm is one
    positive constant. Rounding is relative to the time; so the point of least time has the most precise constant, and
    each point leaves a range for it. Rows of norm 1 lie on the rim and are not points of the ball, where distances to
    the rim are infinite. Such rows are usually normalized at each step.
    """
    off, length = _tolerance(tensor.dtype), tensor.shape[-1]
    rim = (1 - _ROUNDING * torch.finfo(tensor.dtype).eps) ** 2
    lowest = torch.full((2,), math.inf, dtype=torch.float64, device=tensor.device)
    smallest, constant, high, close, count = -lowest, -lowest, lowest, 0, 0
    inside = length <= _LONGEST
    for points in _iterate_points(tensor):
        squares = points.double().square()  # not in place: float64 is not copied
        norms, times = squares.sum(1), squares[:, :: length - 1].T
        levels, rounding = 2 * times - norms, off * times
        low, position = times.min(1)
        constant = torch.where(low < lowest, levels.gather(1, position[:, None])[:, 0], constant)
        lowest = torch.minimum(low, lowest)
        smallest = torch.maximum(smallest, (levels - rounding).amax(1))  # NaN stays, and is in no range
        high = torch.minimum(high, (levels + rounding).amin(1))
        inside = inside and bool((norms < rim).all())
        close, count = close + (int((norms > _NEAR**2).sum()) if inside else 0), count + len(norms)
        if not (inside or bool((smallest <= high).any())):
            return False
    if bool(((smallest <= constant) & (constant <= high) & (constant > off * lowest)).any()):
        return True
    return inside and close >= max(_FEWEST, count / _SHARE)
