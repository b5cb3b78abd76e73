"""Delta-neighbourhood search: configurations close to that of the last checkpoint (Inshrinkerator, section 5)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dsq_ckpt.config.space import Point
from dsq_ckpt.search.guided import CubeState, Search, check_limits


def neighbourhood(
    shape: tuple[int, ...],
    centre: Point,
    size: Callable[[Point], float],
    radius: int = 1,
    batch: int = 1,
    limit: int | None = None,
    monotone: bool = True,
) -> Search:
    """Find the smallest feasible point near `centre`, trying points by increasing size.

    "Delta-Neighbourhood Search" and the early exit of "Parallelized Implementation" (Inshrinkerator, section 5). A step
    moves one index by one, as an edge of the cube does, so the distance of two points is the sum of |difference| over
    the axes. (The paper does not say; with the largest difference instead, a radius of one on four axes would
    be 16 more conservative points rather than 5, hardly the single round on eight replicas that it reports.) The centre
    is part of its neighbourhood.

    The first round with a feasible point ends the search; the smallest of that round is the optimum of the
    neighbourhood if quality is monotone, since all smaller points were tried or are implied infeasible. Points more
    aggressive than one that failed are skipped, as are those that a more conservative neighbour equals or beats
    in size.

    Args:
        shape: values per axis; index 0 is the most aggressive.
        centre: the point chosen last.
        size: predicted size, asked once for each point of the neighbourhood (infinite: do not try it).
        radius: steps from the centre at most.
        batch: trials per round.
        limit: stop after so many trials.
        monotone: no point more aggressive than the centre on any axis, the paper's rule: models grow more
            sensitive as training goes on.

    Returns:
        A generator that returns the choice, or None if no trial was feasible: time for `guided_exhaustive`.

    Raises:
        ValueError: arguments out of range, a size that is NaN, or (from `send`) not one outcome per point.
    """
    check_limits(batch, limit)
    if radius < 0:
        raise ValueError(f"radius must not be negative, not {radius}")
    if len(centre) != len(shape) or not all(0 <= index < side for index, side in zip(centre, shape, strict=True)):
        raise ValueError(f"centre {centre} is no point of a cube of shape {shape}")

    def size_if_near(point: Point) -> float:
        steps = [index - middle for index, middle in zip(point, centre, strict=True)]
        is_near = sum(map(abs, steps)) <= radius and not (monotone and min(steps) < 0)
        return size(point) if is_near else math.inf

    return _search_by_size(CubeState(shape, size_if_near), batch, limit)


def _search_by_size(state: CubeState, batch: int, limit: int | None) -> Search:
    order: list[Point] = [tuple(point) for point in np.argwhere(state.is_candidate).tolist()]
    order.sort(key=lambda point: (state.size[point], -sum(point), point))
    remaining = len(order) if limit is None else limit
    while remaining > 0 and state.best is None:
        is_open = state.open
        order = [point for point in order if is_open[point]]
        if not order:
            break
        points = order[: min(batch, remaining)]
        remaining -= len(points)
        state.record(points, (yield points))
    return state.best
