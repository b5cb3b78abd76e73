"""Guided exhaustive search of a configuration cube (Inshrinkerator, section 5, Algorithm 4), a few trials at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from itertools import product

import numpy as np

from dsq_ckpt.config.space import Point
from dsq_ckpt.core.arrays import F64, Mask

Search = Generator[list[Point], list[bool], Point | None]
"""Yields distinct points to try, is sent for each whether it meets the bound, returns the choice (see `drive`)."""

_Box = tuple[Point, Point]  # both corners inside

_FUTURES = 64  # combinations of outcomes followed while the points of one round are chosen; the largest are kept
_FILLERS = 256  # points off the diagonals considered for replicas that would be idle otherwise


class Known:
    """What sizes and trials say about every point of a cube, if quality rises along every axis.

    `floor` is the smallest size among the points at least as gentle as a point, itself included. It never falls from
    aggressive to gentle, whatever the sizes do, so it takes their place: a point larger than a gentler one cannot be
    the choice, since whenever it is feasible the gentler one is as well. Those left are `worthy`. Then

    * a point at or below one that failed is hopeless (`low`),
    * a point whose floor is not below the best size found has nothing to win, nor has any point gentler than it,
    * everything else is `open`.

    A feasible point makes all gentler ones feasible; of worthy points, these are larger, so the second rule covers
    them, and the best point found is always one that was itself tried.
    """

    def __init__(self, shape: tuple[int, ...], size: Callable[[Point], float]) -> None:
        """Ask the size of every point (infinite: the point is not to be tried)."""
        if not shape or min(shape) < 1:
            raise ValueError(f"shape {shape} has no points: every axis needs at least one value")
        self.shape = shape
        points = product(*map(range, shape))
        self.size: F64 = np.array([size(point) for point in points], dtype=np.float64).reshape(shape)
        if np.isnan(self.size).any():
            raise ValueError("the size of a point is NaN: every size must be a number")
        self.floor = self.size.copy()
        gentler = np.full(shape, math.inf)  # the smallest floor one step gentler
        for axis in range(len(shape)):
            self.floor = np.flip(np.minimum.accumulate(np.flip(self.floor, axis), axis), axis)
        for axis in range(len(shape)):
            below, above = np.moveaxis(gentler, axis, 0)[:-1], np.moveaxis(self.floor, axis, 0)[1:]
            np.minimum(below, above, out=below)
        self.worthy: Mask = self.size < gentler
        self.low = np.zeros(shape, dtype=np.bool_)
        self.best: Point | None = None
        self.best_size = math.inf

    @property
    def open(self) -> Mask:
        """Points whose outcome is not implied and matters."""
        return ~self.low & (self.floor < self.best_size)

    def has_nothing_to_win(self, point: Point) -> bool:
        """Return True if neither the point nor a gentler one is smaller than the best found."""
        return bool(self.floor[point] >= self.best_size)

    def stand_in(self, point: Point) -> Point:
        """The worthy point whose trial settles an open one: if it fails, so does `point`; else its floor is reached."""
        gentler = tuple(slice(index, None) for index in point)
        same = np.argwhere(self.worthy[gentler] & (self.size[gentler] == self.floor[point]))
        return tuple(index + int(steps) for index, steps in zip(point, same[-1], strict=True))

    def record(self, points: list[Point], feasible: list[bool]) -> None:
        """Take in the outcomes of one round."""
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

    Algorithm 4 of Inshrinkerator (section 5), with one record of outcomes (`Known`) for all sub-cubes, so that a trial
    in one of them prunes the others. Unlike there, sizes are known without a trial.

    **Diagonal.** From the most aggressive to the gentlest corner of a (sub-)cube in as many steps as its longest side
    has; the other indices are scaled and rounded. Along it feasibility changes once, so trials close in on the
    crossing: the last point that fails, `a`, and the first that is feasible or not smaller than the best found, `b`.

    **Sub-cubes.** What is at or below `a` fails, what is at or above `b` has nothing to win; nothing else is dropped.
    The rest is cut into disjoint boxes. First what is not at or below `a`: box i is beyond `a` on axis i and not
    beyond it on axes before i, so each such point is in the box of the first axis on which it exceeds `a`. Then
    each box in the same way without what is at or above `b`, by the first axis on which a point falls short of `b`.
    Boxes are shrunk to the open points in them, dropped without any, and searched as the cube was. So every point ends
    up tried, implied infeasible, or not smaller than a feasible one; with monotone quality the choice is the optimum.

    **Rounds.** All sub-cubes are searched at once. Of the points on their diagonals, the next to try is the one
    that settles most open points of the cube, whichever way it turns out; the next of the same round likewise, averaged
    over what the outcomes of those before may leave open. On one diagonal this is binary search, and with more trials
    a round the middle, the quarters, the eighths; at most a round more than equal parts, which took more rounds on
    cubes. A point that a gentler one equals or beats in size is tried by that stand-in. Places of a round for which the
    diagonals have no point go to other open points: replicas would be idle otherwise.

    Quality that is not quite monotone ends the search all the same, with a point that was tried and feasible.

    Args:
        shape: values per axis; index 0 is the most aggressive.
        size: predicted size of any point, asked once each; need not fall towards aggressive points.
        batch: trials per round: replicas that try points in parallel.
        limit: stop after so many trials.

    Returns:
        A generator that returns the feasible point of smallest size (always one that was tried), or None.

    Raises:
        ValueError: arguments out of range, a size that is NaN, or (from `send`) not one outcome per point.
    """
    check_counts(batch, limit)
    return _guided(Known(shape, size), batch, limit)


def drive(search: Search, trial: Callable[[list[Point]], list[bool]]) -> tuple[Point | None, int]:
    """Run a search to its end; its choice and the number of trials."""
    trials = 0
    outcomes: list[bool] | None = None
    while True:
        try:
            points = next(search) if outcomes is None else search.send(outcomes)
        except StopIteration as end:
            return end.value, trials
        trials += len(points)
        outcomes = trial(points)


def _guided(known: Known, batch: int, limit: int | None) -> Search:
    left = math.inf if limit is None else limit
    boxes: list[_Box] = [((0,) * len(known.shape), tuple(side - 1 for side in known.shape))]
    while left > 0:
        boxes, diagonals = _unsettled(known, boxes)
        if not boxes:
            break
        points = _choose(known, diagonals, int(min(batch, left)))
        left -= len(points)
        known.record(points, (yield points))
    return known.best


def _unsettled(known: Known, boxes: list[_Box]) -> tuple[list[_Box], list[Point]]:
    """Boxes whose diagonal has open points, and these; boxes whose crossing is known are cut into sub-cubes."""
    is_open = known.open
    unsettled: list[_Box] = []
    diagonals: list[Point] = []
    todo = list(boxes)
    while todo:
        lo, hi = todo.pop()
        found = np.argwhere(is_open[tuple(slice(low, high + 1) for low, high in zip(lo, hi, strict=True))]) + lo
        if not len(found):
            continue
        lo, hi = tuple(found.min(axis=0).tolist()), tuple(found.max(axis=0).tolist())
        diagonal = list(_diagonal(lo, hi))
        on_it = [point for point in diagonal if is_open[point]]
        if on_it:
            unsettled.append((lo, hi))
            diagonals += on_it
        else:  # lo is low and hi has nothing to win, or no point of the box would be open
            a = next(point for point in reversed(diagonal) if known.low[point])
            b = next(point for point in diagonal if known.has_nothing_to_win(point))
            todo += [box for part in _not_at_or_below(a, lo, hi) for box in _not_at_or_above(b, *part)]
    return unsettled, diagonals


def _diagonal(lo: Point, hi: Point) -> Iterator[Point]:
    steps = max(1, *(high - low for low, high in zip(lo, hi, strict=True)))
    for step in range(steps + 1 if lo != hi else 1):
        yield tuple(low + (2 * step * (high - low) + steps) // (2 * steps) for low, high in zip(lo, hi, strict=True))


def _not_at_or_below(a: Point, lo: Point, hi: Point) -> Iterator[_Box]:
    """Disjoint boxes, some empty, of the points that exceed `a` on an axis."""
    for axis, index in enumerate(a):
        yield (*lo[:axis], max(lo[axis], index + 1), *lo[axis + 1 :]), (*map(min, hi[:axis], a), *hi[axis:])


def _not_at_or_above(b: Point, lo: Point, hi: Point) -> Iterator[_Box]:
    """Disjoint boxes, some empty, of the points that fall short of `b` on an axis."""
    for axis, index in enumerate(b):
        yield (*map(max, lo[:axis], b), *lo[axis:]), (*hi[:axis], min(hi[axis], index - 1), *hi[axis + 1 :])


def _choose(known: Known, diagonals: list[Point], batch: int) -> list[Point]:
    """Return the points for one round: those that decide most others, whatever their outcomes."""
    is_open = known.open
    rest, floor = np.argwhere(is_open), known.floor[is_open]
    fillers = np.argwhere(is_open & known.worthy)
    futures = np.ones((1, len(rest)), dtype=np.bool_)  # one row per combination of outcomes: what would still be open
    chosen: list[Point] = []
    for candidates in (
        np.array(sorted({known.stand_in(point) for point in diagonals})),
        fillers[:: math.ceil(len(fillers) / _FILLERS)],
    ):
        if len(chosen) == batch:
            break
        failing = np.all(rest[None] <= candidates[:, None], axis=2)  # what each settles if it fails
        passing = floor[None] >= known.size[tuple(candidates.T)][:, None]  # and if it is feasible
        while len(chosen) < batch:
            fail, succeed = (futures.astype(np.float64) @ settled.T for settled in (failing, passing))
            # Half the harmonic mean of both counts. Zero where a point is settled already: then one of them is zero.
            gain = (fail * succeed / np.maximum(fail + succeed, 1)).sum(axis=0)
            best = int(gain.argmax())
            if gain[best] <= 0:
                break
            chosen.append(tuple(candidates[best].tolist()))
            matters = (futures & failing[best]).any(axis=1) & (futures & passing[best]).any(axis=1)
            split = futures[matters]
            futures = np.concatenate([futures[~matters], split & ~failing[best], split & ~passing[best]])
            futures = futures[np.argsort(-futures.sum(axis=1), kind="stable")[:_FUTURES]]
    return chosen


def check_counts(batch: int, limit: int | None) -> None:
    """Refuse rounds of no trials and negative limits."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    if limit is not None and limit < 0:
        raise ValueError(f"limit must not be negative, not {limit}")
