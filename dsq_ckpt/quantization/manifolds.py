"""Weights that keep an exact constraint, which errors of a percent break and no later step of training repairs.

Such are matrices with orthogonal rows or columns, and rotations and poses, that are moved by multiplication; points in
the unit ball, near its rim, as Poincare embeddings are; and points of a hyperboloid. A model may tell of them by an
attribute `manifold` of its parameters, as geoopt's have it; else what they hold does.

A part of a tensor tells the same where the constraint is one on each of its rows. Rows of a matrix with orthogonal
columns are not told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

_OFF = 1e-3
"""Part of its size by which a constraint may be off: many steps in float32 lose so much, and codes ten times that."""
_POINTS = 64
"""Points of a tensor that tell of nearly all weights that they are such; of long ones fewer."""
_GLANCE = 1 << 12
"""About how many elements these have."""
_LONGEST = 512
"""Elements of a point of the ball. Long rows of ordinary weights are of about one norm, which may be nearly 1."""
_NEAR, _SHARE, _FEWEST = 0.99, 10, 16
"""Norm from which on a point is near the rim; there are one in so many, and so many at least."""
_ROUNDING = 8
"""Units of the last place by which the norms of rows that were made 1 are off."""
_PICKED = 16
"""Vectors of a matrix that are multiplied by all others."""
_BATCH = 1 << 20
"""Elements that are looked at together."""
_LONG = _BATCH // _PICKED
"""Length of rows up to which whole rows are copied at once."""
_CACHED = 1 << 17
"""Elements of glances that are looked at together: they stay in a cache."""


def on_manifold(parameter: torch.Tensor) -> bool:
    """Return whether a parameter says that it lies on a manifold other than all of its space."""
    manifold = getattr(parameter, "manifold", None)
    return manifold is not None and not any(one.__name__ == "Euclidean" for one in type(manifold).__mro__)


def first_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first of the matrices along the last two dimensions."""
    return tensor[(0,) * (tensor.ndim - 2)] if tensor.ndim > 2 else tensor


def spread(tensor: torch.Tensor, leading: int, count: int) -> torch.Tensor:
    """Return so many entries along the leading dimensions as one, at even distances; nothing else is copied."""
    number = math.prod(tensor.shape[:leading])
    step = max(1, number // count)
    if leading == 1 or tensor.is_contiguous():
        return tensor.reshape(number, *tensor.shape[leading:])[::step][:count]
    places, index = torch.arange(min(count, number), device=tensor.device) * step, []
    for size in reversed(tensor.shape[:leading]):
        index.append(places % size)
        places = places // size
    return tensor[tuple(reversed(index))]


class Looks(NamedTuple):
    """A glance at a few vectors of each tensor, of those of one shape together: for small ones calls take the time.

    Attributes:
        of: places of the tensors, and the question that is left where the glance does not answer it, for each result.
        results: whether it is left, for each tensor, as numbers on its device.
    """

    of: list[tuple[list[int], Callable[[torch.Tensor], bool]]]
    results: list[torch.Tensor]

    @classmethod
    def at(cls, tensors: Sequence[torch.Tensor]) -> Looks:
        """Glance at tensors, without a wait for a device."""
        alike: dict[tuple[bool, torch.Size, torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
        for place, tensor in enumerate(tensors):
            if tensor.ndim < 2 or not tensor.numel():
                continue
            whole = tensor.detach()
            for pair in _pairs(whole):
                shape = torch.Size((2, pair.numel() // 2))
                alike.setdefault((True, shape, pair.dtype, pair.device), []).append((place, pair))
            some = _some_points(whole)
            if some.shape[0] > 1 < some.shape[1]:
                alike.setdefault((False, some.shape, some.dtype, some.device), []).append((place, some))
        looks = cls([], [])
        for (pairs, shape, *_), found in alike.items():
            size = max(1, _CACHED // shape.numel())
            for batch in (found[start : start + size] for start in range(0, len(found), size)):
                values = _stacked([_as_matrix(one) for _, one in batch])
                looks.of.append(([place for place, _ in batch], _are_orthogonal if pairs else _are_points))
                looks.results.append((_may_be_orthogonal(values) if pairs else _may_be_points(values)).float())
        return looks

    def told(self, tensors: Sequence[torch.Tensor], results: Sequence[Sequence[float]]) -> set[int]:
        """Return the places of the tensors that keep a constraint, all of which are looked at where a glance leaves it.

        Args:
            tensors: those of the glance.
            results: on the host.
        """
        left = {
            (place, question) for (places, question), doubts in zip(self.of, results, strict=True)
            for place, doubt in zip(places, doubts, strict=True) if doubt
        }
        return {place for place, question in left if question(tensors[place])}


def _off(dtype: torch.dtype) -> float:
    return max(_OFF, 2 * torch.finfo(dtype).eps)


def _stacked(alike: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one, without a copy of one alone."""
    if len(alike) == 1:
        return alike[0][None]
    return torch.stack(list(alike))


def _wide(matrices: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of more than one row and column, turned so that no side is longer than their rows."""
    return [one if one.shape[-2] <= one.shape[-1] else one.mT for one in matrices if min(one.shape[-2:]) > 1]


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a kernel as one matrix, a wide one with its columns as they lie in memory, of which it is a view."""
    wide = tensor.numel() >= len(tensor) ** 2
    order = sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True) if wide else range(1, tensor.ndim)
    return tensor.permute(0, *order).flatten(1)


def _small(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the matrices along the last two dimensions, and rotations of poses."""
    poses = tensor.ndim > 2 and tensor.shape[-2:] in ((3, 4), (4, 4))
    return [tensor, tensor[..., :3, :3]] if poses else [tensor]


def _matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what may have orthogonal rows: matrices, kernels as one matrix, rotations of poses; wide, or turned so."""
    return _wide([*_small(tensor), *([_as_matrix(tensor)] if tensor.ndim > 2 else [])])


def _pairs(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the first two rows of each of these that are first, as views; those of a kernel have its dimensions."""
    pairs = [one[:2] for one in _wide(map(first_matrix, _small(tensor)))]
    rows, columns = len(tensor), tensor.numel() // len(tensor)
    if tensor.ndim == 2 or min(rows, columns) < 2:
        return pairs
    if rows <= columns:
        return [*pairs, tensor[:2]]
    last = max(axis for axis, size in enumerate(tensor.shape) if axis and size > 1)  # along which the two columns lie
    return [*pairs, first_matrix(tensor.movedim((last, 0), (-2, -1)))[:2]]


def _may_be_orthogonal(pairs: torch.Tensor) -> torch.Tensor:
    """Return, for each pair of vectors, whether they are of one length, and orthogonal."""
    off = _off(pairs.dtype)
    one = other = both = torch.zeros((), device=pairs.device)
    for part in pairs.split(max(1, _BATCH // (2 * len(pairs))), 2):
        first, second = part.float().unbind(1)
        one = one + first.square().sum(1)
        other, both = other + second.square().sum(1), both + (first * second).sum(1)
    return (one > 0) & ((one - other).abs_() <= off * one) & (both.abs_() <= off * one)


def _are_orthogonal(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is matrices with orthogonal rows, or columns, which are of one length in each matrix."""
    told = any(_have_orthogonal_rows(one.reshape(-1, *one.shape[-2:])) for one in _matrices(tensor.detach()))
    return told and all(bool(some.isfinite().all()) for some in _points(tensor))


def _have_orthogonal_rows(matrices: torch.Tensor) -> bool:
    """Return whether those of each matrix are so, as far as products of some rows with all others tell.

    Those of ordinary weights are off by sqrt(size / length), and rounding of each element by a part of this.
    """
    number, size, length = matrices.shape
    if number == 1 and size == 2 and torch.finfo(matrices.dtype).eps > _OFF:
        return False  # in bfloat16 one product may be that small by chance
    off = _off(matrices.dtype) * math.sqrt(size / length)
    every = slice(None, None, max(1, size // _PICKED))
    for part in matrices.split(max(1, _BATCH // (size * length))):
        some = part[:, every][:, :_PICKED]
        if length <= _LONG:
            some = some.double()  # once for all blocks
        _, squares = _products(some, some)
        scale = squares.mean(1)[:, None]
        most = scale * off
        if not (bool((scale > 0).all()) and _fit(some, squares, [some], scale, most)):
            return False
        if size > some.shape[1] and not _fit(some, squares, part.split(max(1, _BATCH // length), 1), scale, most):
            return False
    return True


def _fit(
    some: torch.Tensor, own: torch.Tensor, all_rows: Iterable[torch.Tensor], scale: torch.Tensor, most: torch.Tensor
) -> bool:
    """Return whether all rows are of the squared length `scale`, and products of some with others are zero.

    Args:
        some: rows of each matrix, whose squared lengths are `own`.
        all_rows: blocks of all rows of each matrix.
        scale: a number for each matrix.
        most: the error that is rounding, for each.
    """
    sums = torch.zeros_like(own)
    for block in all_rows:
        products, squares = _products(some, block)
        if not bool(((squares - scale).abs() <= most).all()):
            return False
        sums += products.square().sum(2)
    return bool(((sums - own.square()).clamp(min=0).sqrt() <= most).all())  # without their own


def _products(some: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of some rows with others, and the squared lengths of these, in float64.

    TF32 does not round these. A part of long rows at a time is copied.
    """
    products = squares = torch.zeros((), dtype=torch.float64, device=some.device)
    for one, other in zip(some.split(_LONG, 2), rows.split(_LONG, 2), strict=True):
        wide = other.double()
        products, squares = products + one.double() @ wide.mT, squares + wide.square().sum(2)
    return products, squares


def _points(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the vectors along the last dimension, some at a time, of which no more are copied."""
    whole = tensor.detach()
    if whole.ndim == 2 or whole.is_contiguous():
        yield from whole.reshape(-1, whole.shape[-1]).split(max(1, _BATCH // whole.shape[-1]))
        return
    for some in whole.split(max(1, _BATCH // whole[0].numel())):
        if len(some) > 1:
            yield some.reshape(-1, some.shape[-1])
        else:
            yield from _points(some[0])


def _some_points(tensor: torch.Tensor) -> torch.Tensor:
    """Return some of these."""
    part = tensor
    if not part.is_contiguous() and part.ndim > 2:
        part = part[:: max(1, len(part) // 8)][:8]
    return spread(part, part.ndim - 1, max(2, min(_POINTS, _GLANCE // part.shape[-1])))


def _may_be_points(points: torch.Tensor) -> torch.Tensor:
    """Return, for each set of points, whether all may lie in the unit ball, some near its rim, or on a hyperboloid."""
    values, off = points.float(), _off(points.dtype)
    norms = torch.linalg.vector_norm(values, dim=2)
    largest = norms.amax(1)
    times = values[:, :, :: points.shape[2] - 1].abs()
    timelike = (times >= (0.5**0.5 - off) * norms[:, :, None]).all(1).any(1)
    return timelike | ((largest < 1) & (largest > _NEAR)) if points.shape[2] <= _LONGEST else timelike


def _are_points(tensor: torch.Tensor) -> bool:
    """Return whether all points lie in the unit ball, and many near its rim, or all on one hyperboloid.

    The time of the latter is the first number, or the last: twice its square less the squared norm is one positive
    number. Rounding is a part of the former; so the point of least time tells the number, and each leaves a range for
    it. Rows of norm 1 lie on the rim, and are none of the ball: it has no distance there. What keeps them does so by a
    division at each step, as a rule.
    """
    off, length = _off(tensor.dtype), tensor.shape[-1]
    rim = (1 - _ROUNDING * torch.finfo(tensor.dtype).eps) ** 2
    lowest = torch.full((2,), math.inf, dtype=torch.float64, device=tensor.device)
    least, number, most, near, count = -lowest, -lowest, lowest, 0, 0
    inside = length <= _LONGEST
    for points in _points(tensor):
        squares = points.double().square()  # not in place: float64 is not copied
        norms, times = squares.sum(1), squares[:, :: length - 1].T
        levels, rounding = 2 * times - norms, off * times
        low, place = times.min(1)
        number = torch.where(low < lowest, levels.gather(1, place[:, None])[:, 0], number)
        lowest = torch.minimum(low, lowest)
        least = torch.maximum(least, (levels - rounding).amax(1))  # NaN stays, and is in no range
        most = torch.minimum(most, (levels + rounding).amin(1))
        inside = inside and bool((norms < rim).all())
        near, count = near + (int((norms > _NEAR**2).sum()) if inside else 0), count + len(norms)
        if not (inside or bool((least <= most).any())):
            return False
    if bool(((least <= number) & (number <= most) & (number > off * lowest)).any()):
        return True
    return inside and near >= max(_FEWEST, count / _SHARE)
