"""Guided exhaustive search of a configuration cube (Inshrinkerator, section 5, Algorithm 4), a few trials at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from itertools import product

import numpy as np

from dsq_ckpt.config.space import Point
from dsq_ckpt.core.arrays import F64, Mask

Search = Generator[list[Point], list[bool], Point | None]
"""Search as a generator: yields distinct points to try, is sent whether each keeps the bound, returns the choice.

See `drive`."""

_Box = tuple[Point, Point]  # both corners inside

_MAX_FUTURES = 64  # combinations of outcomes considered in the choice of a round's points; the largest are kept
_MAX_FILLERS = 256  # points off the diagonals considered for replicas that would otherwise be idle


class CubeState:
    """State of every point of a cube, implied by sizes and trials, if quality rises along every axis.

    A point is more conservative than another if no index is smaller. `floor` is the smallest size among a point and all
    more conservative ones. It never falls from aggressive to conservative points, whatever the sizes do. A point that
    is larger than a more conservative one cannot be the choice, since that one is feasible whenever the point is. All
    other points are candidates. Of them

    * a point at or below one that failed is infeasible (`low`),
    * a point whose floor is not below the best size found cannot improve on it, nor can more conservative points,
    * all others are `open`.

    A feasible point makes all more conservative ones feasible. Worthy points among these are larger, so the second rule
    covers them, and the best point found was always tried itself.
    """

    def __init__(self, shape: tuple[int, ...], size: Callable[[Point], float]) -> None:
        """Compute the size of every point (infinite: the point is not to be tried).

        Raises:
            ValueError: the cube has no points, or a size is NaN.
        """
        if not shape or min(shape) < 1:
            raise ValueError(f"shape {shape} has no points: every axis needs at least one value")
        self.shape = shape
        points = product(*map(range, shape))
        self.size: F64 = np.array([size(point) for point in points], dtype=np.float64).reshape(shape)
        if np.isnan(self.size).any():
            raise ValueError("the size of a point is NaN: every size must be a number")
        self.floor = self.size.copy()
        next_floor = np.full(shape, math.inf)  # the smallest floor one step more conservative
        for axis in range(len(shape)):
            self.floor = np.flip(np.minimum.accumulate(np.flip(self.floor, axis), axis), axis)
        for axis in range(len(shape)):
            below, above = np.moveaxis(next_floor, axis, 0)[:-1], np.moveaxis(self.floor, axis, 0)[1:]
            np.minimum(below, above, out=below)
        self.is_candidate: Mask = self.size < next_floor
        self.low = np.zeros(shape, dtype=np.bool_)
        self.best: Point | None = None
        self.best_size = math.inf

    @property
    def open(self) -> Mask:
        """Points whose outcome is not implied and can change the choice."""
        return ~self.low & (self.floor < self.best_size)

    def cannot_improve(self, point: Point) -> bool:
        """Return True if neither the point nor a more conservative one is smaller than the best found."""
        return bool(self.floor[point] >= self.best_size)

    def stand_in(self, point: Point) -> Point:
        """Return the candidate point whose trial decides an open one.

        If it fails, `point` is infeasible; else the floor of `point` is reached.
        """
        conservative = tuple(slice(index, None) for index in point)
        same = np.argwhere(self.is_candidate[conservative] & (self.size[conservative] == self.floor[point]))
        return tuple(index + int(steps) for index, steps in zip(point, same[-1], strict=True))

    def record(self, points: list[Point], feasible: list[bool]) -> None:
        """Record the outcomes of one round.

        Raises:
            ValueError: there is not one outcome per point.
        """
        if len(feasible) != len(points):
            raise ValueError(f"{len(points)} points were to be tried, but {len(feasible)} outcomes were sent")
        for point, good in zip(points, feasible, strict=True):
            if not good:
                self.low[tuple(slice(index + 1) for index in point)] = True
            elif self.size[point] < self.best_size:
                self.best, self.best_size = point, float(self.size[point])


def guided_exhaustive(
    shape: tuple[int, ...], size: Callable[[Point], float], batch: int = 1, limit: int | None = None
) -> Search:
    """Find the feasible point of smallest size in a cube, in rounds of at most `batch` trials.

    Algorithm 4 of Inshrinkerator (section 5), with one record of outcomes (`CubeState`) for all sub-cubes, so that a
    trial in one of them prunes the others. Unlike in the paper, sizes are known without a trial.

    **Diagonal.** It leads from the most aggressive to the most conservative corner of a (sub-)cube in as many steps as
    its longest side has; the other indices are scaled and rounded. Along it feasibility changes once, so trials close
    in on the crossing: the last point that fails, `a`, and the first that is feasible or not smaller than the best
    found, `b`.

    **Sub-cubes.** Points at or below `a` fail, and points at or above `b` cannot improve on the best; no others are
    dropped. The rest is cut into disjoint boxes. First the points that are not at or below `a`: box i lies beyond `a`
    on axis i and not beyond it on axes before i, so each such point is in the box of the first axis on which it exceeds
    `a`. Then each box is cut in the same way without the points at or above `b`, by the first axis on which a point
    falls short of `b`. Boxes are shrunk to the open points in them, dropped if there are none, and searched as the cube
    was. So at the end every point was tried, is implied infeasible, or is not smaller than a feasible one; with
    monotone quality the choice is the optimum.

    **Rounds.** All sub-cubes are searched at once. Of the points on their diagonals, the next to try is the one that
    decides most open points of the cube, whatever its outcome; further points of the same round are chosen likewise,
    averaged over the outcomes that the points before may have. On one diagonal this is binary search, and with more
    trials per round the middle, the quarters, the eighths; it takes at most one round more than equal parts, which took
    more rounds on cubes. A point that a more conservative one equals or beats in size is tried by that stand-in. Trials
    of a round for which the diagonals have no point go to other open points: replicas would be idle otherwise.

    If quality is not quite monotone, the search still ends, with a point that was tried and feasible.

    Args:
        shape: values per axis; index 0 is the most aggressive.
        size: predicted size of any point, called once for each; it need not fall towards aggressive points.
        batch: trials per round: replicas that try points in parallel.
        limit: stop after so many trials.

    Returns:
        A generator that returns the feasible point of smallest size (always one that was tried), or None.

    Raises:
        ValueError: arguments out of range, a size that is NaN, or (from `send`) not one outcome per point.
    """
    check_limits(batch, limit)
    return _search_boxes(CubeState(shape, size), batch, limit)


def drive(search: Search, trial: Callable[[list[Point]], list[bool]]) -> tuple[Point | None, int]:
    """Run a search to its end.

    Returns:
        Its choice, and the number of trials.
    """
    trials = 0
    outcomes: list[bool] | None = None
    while True:
        try:
            points = next(search) if outcomes is None else search.send(outcomes)
        except StopIteration as end:
            return end.value, trials
        trials += len(points)
        outcomes = trial(points)


def _search_boxes(state: CubeState, batch: int, limit: int | None) -> Search:
    remaining = math.inf if limit is None else limit
    boxes: list[_Box] = [((0,) * len(state.shape), tuple(side - 1 for side in state.shape))]
    while remaining > 0:
        boxes, diagonals = _split_boxes(state, boxes)
        if not boxes:
            break
        points = _choose_points(state, diagonals, int(min(batch, remaining)))
        remaining -= len(points)
        state.record(points, (yield points))
    return state.best


def _split_boxes(state: CubeState, boxes: list[_Box]) -> tuple[list[_Box], list[Point]]:
    """Cut boxes whose crossing is known into sub-cubes; return boxes whose diagonals have open points, and these."""
    is_open = state.open
    unsettled: list[_Box] = []
    diagonals: list[Point] = []
    todo = list(boxes)
    while todo:
        lo, hi = todo.pop()
        points = np.argwhere(is_open[tuple(slice(low, high + 1) for low, high in zip(lo, hi, strict=True))]) + lo
        if not len(points):
            continue
        lo, hi = tuple(points.min(axis=0).tolist()), tuple(points.max(axis=0).tolist())
        diagonal = list(_diagonal(lo, hi))
        on_it = [point for point in diagonal if is_open[point]]
        if on_it:
            unsettled.append((lo, hi))
            diagonals += on_it
        else:  # lo is low and hi cannot improve on the best, or no point of the box would be open
            a = next(point for point in reversed(diagonal) if state.low[point])
            b = next(point for point in diagonal if state.cannot_improve(point))
            todo += [box for part in _not_at_or_below(a, lo, hi) for box in _not_at_or_above(b, *part)]
    return unsettled, diagonals


def _diagonal(lo: Point, hi: Point) -> Iterator[Point]:
    steps = max(1, *(high - low for low, high in zip(lo, hi, strict=True)))
    for step in range(steps + 1 if lo != hi else 1):
        yield tuple(low + (2 * step * (high - low) + steps) // (2 * steps) for low, high in zip(lo, hi, strict=True))


def _not_at_or_below(a: Point, lo: Point, hi: Point) -> Iterator[_Box]:
    """Yield disjoint boxes, some empty, of the points that exceed `a` on an axis."""
    for axis, index in enumerate(a):
        yield (*lo[:axis], max(lo[axis], index + 1), *lo[axis + 1 :]), (*map(min, hi[:axis], a), *hi[axis:])


def _not_at_or_above(b: Point, lo: Point, hi: Point) -> Iterator[_Box]:
    """Yield disjoint boxes, some empty, of the points that fall short of `b` on an axis."""
    for axis, index in enumerate(b):
        yield (*map(max, lo[:axis], b), *lo[axis:]), (*hi[:axis], min(hi[axis], index - 1), *hi[axis + 1 :])


def _choose_points(state: CubeState, diagonals: list[Point], batch: int) -> list[Point]:
    """Return the points for one round, which decide most others, whatever their outcomes."""
    is_open = state.open
    rest, floor = np.argwhere(is_open), state.floor[is_open]
    fillers = np.argwhere(is_open & state.is_candidate)
    futures = np.ones((1, len(rest)), dtype=np.bool_)  # one row per combination of outcomes: the points then open
    chosen: list[Point] = []
    for candidates in (
        np.array(sorted({state.stand_in(point) for point in diagonals})),
        fillers[:: math.ceil(len(fillers) / _MAX_FILLERS)],
    ):
        if len(chosen) == batch:
            break
        failing = np.all(rest[None] <= candidates[:, None], axis=2)  # the points that each decides if it fails
        passing = floor[None] >= state.size[tuple(candidates.T)][:, None]  # and if it is feasible
        while len(chosen) < batch:
            fail, succeed = (futures.astype(np.float64) @ settled.T for settled in (failing, passing))
            # Half the harmonic mean of both counts. Zero where a point is decided already: then one of them is zero.
            gain = (fail * succeed / np.maximum(fail + succeed, 1)).sum(axis=0)
            best = int(gain.argmax())
            if gain[best] <= 0:
                break
            chosen.append(tuple(candidates[best].tolist()))
            matters = (futures & failing[best]).any(axis=1) & (futures & passing[best]).any(axis=1)
            split = futures[matters]
            futures = np.concatenate([futures[~matters], split & ~failing[best], split & ~passing[best]])
            futures = futures[np.argsort(-futures.sum(axis=1), kind="stable")[:_MAX_FUTURES]]
    return chosen


def check_limits(batch: int, limit: int | None) -> None:
    """Raise ValueError for rounds of no trials and for negative limits."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    if limit is not None and limit < 0:
        raise ValueError(f"limit must not be negative, not {limit}")
