"""Delta-neighbourhood search against brute force over the neighbourhood."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt.search import drive, neighbourhood

CUBE = (6, 6, 3)


def neighbours(shape, centre, radius, monotone):
    for point in product(*map(range, shape)):
        steps = [one - two for one, two in zip(point, centre, strict=True)]
        if sum(map(abs, steps)) <= radius and (not monotone or min(steps) >= 0):
            yield point


def monotone(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.random(shape)
    for axis in range(len(shape)):
        values = np.cumsum(values, axis=axis)
    return values


def up_set(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    feasible = np.zeros(shape, dtype=bool)
    for _ in range(rng.integers(0, 8)):
        feasible[tuple(slice(int(rng.integers(side)), None) for side in shape)] = True
    return feasible


@st.composite
def problems(draw, feasible_set=up_set):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    centre = tuple(draw(st.integers(0, side - 1)) for side in shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["monotone", "random", "ties"]))
    size = monotone(rng, shape) if kind == "monotone" else rng.random(shape)
    return shape, centre, np.round(3 * size) if kind == "ties" else size, feasible_set(rng, shape)


def solve(shape, centre, size, feasible, **options):
    rounds = []

    def trial(points):
        rounds.append(points)
        return [bool(feasible[point]) for point in points]

    point, count = drive(neighbourhood(shape, centre, lambda point: float(size[point]), **options), trial)
    assert count == sum(map(len, rounds))
    return point, rounds


def assert_promises(rounds, near, size, feasible, batch):
    tried = [point for points in rounds for point in points]
    assert len(set(tried)) == len(tried), "a point twice"
    assert set(tried) <= near
    assert all(1 <= len(points) <= batch for points in rounds)
    assert [size[point] for point in tried] == sorted(size[point] for point in tried), "by increasing size"
    assert not any(feasible[point] for points in rounds[:-1] for point in points), "early exit"
    for number, points in enumerate(rounds):
        before = [former for earlier in rounds[:number] for former in earlier]
        for point in points:
            assert not any(all(a <= b for a, b in zip(point, former, strict=True)) for former in before), "implied"


@settings(deadline=None, max_examples=200)
@given(problems(), st.integers(0, 4), st.integers(1, 9), st.booleans())
def test_it_finds_the_optimum_of_the_neighbourhood(problem, radius, batch, monotone):
    shape, centre, size, feasible = problem
    point, rounds = solve(*problem, radius=radius, batch=batch, monotone=monotone)
    near = set(neighbours(shape, centre, radius, monotone))
    assert_promises(rounds, near, size, feasible, batch)
    good = [size[candidate] for candidate in near if feasible[candidate]]
    if not good:
        assert point is None
    else:
        assert point in near and feasible[point] and size[point] == min(good)
        assert point in rounds[-1]


@settings(deadline=None, max_examples=100)
@given(problems(), st.integers(0, 4), st.integers(1, 9), st.integers(0, 6))
def test_a_limit_is_kept(problem, radius, batch, limit):
    point, rounds = solve(*problem, radius=radius, batch=batch, limit=limit)
    assert sum(map(len, rounds)) <= limit
    whole, without_limit = solve(*problem, radius=radius, batch=batch)
    if limit >= sum(map(len, without_limit)):
        assert (point, rounds) == (whole, without_limit)
    elif point is not None:
        assert point in rounds[-1] and problem[3][point]


@settings(deadline=None, max_examples=50)
@given(problems(lambda rng, shape: rng.random(shape) < 0.3), st.integers(0, 4), st.integers(1, 9))
def test_quality_that_is_not_monotone_ends_with_a_point_that_was_feasible(problem, radius, batch):
    point, rounds = solve(*problem, radius=radius, batch=batch)
    good = [candidate for points in rounds for candidate in points if problem[3][candidate]]
    assert point == min(good, key=lambda candidate: problem[2][candidate], default=None)


def test_steps_are_counted_over_all_axes():
    size = monotone(np.random.default_rng(0), CUBE)
    nothing = np.zeros(CUBE, dtype=bool)
    _, rounds = solve(CUBE, (2, 2, 1), size, nothing, radius=1, batch=8)
    assert [set(points) for points in rounds] == [{(2, 2, 1), (3, 2, 1), (2, 3, 1), (2, 2, 2)}]
    _, rounds = solve(CUBE, (5, 5, 2), size, nothing, radius=3)
    assert rounds == [[(5, 5, 2)]]


def test_the_centre_wins_if_it_still_holds():
    size = monotone(np.random.default_rng(0), CUBE)
    assert solve(CUBE, (2, 2, 1), size, np.ones(CUBE, dtype=bool), radius=2) == ((2, 2, 1), [[(2, 2, 1)]])


def test_more_aggressive_points_only_if_asked():
    size = monotone(np.random.default_rng(0), CUBE)
    everything = np.ones(CUBE, dtype=bool)
    point, rounds = solve(CUBE, (2, 2, 1), size, everything, radius=1, monotone=False)
    below = [(1, 2, 1), (2, 1, 1), (2, 2, 0)]
    assert point == min(below, key=lambda candidate: size[candidate]) and rounds == [[point]]


def test_a_more_conservative_neighbour_of_no_larger_size_stands_for_the_centre():
    size = np.array([3.0, 2.0, 2.0, 9.0])
    assert solve((4,), (0,), size, size > 0, radius=2) == ((2,), [[(2,)]])
    assert solve((4,), (0,), size, size < 0, radius=3)[1] == [[(2,)], [(3,)]]
    assert solve((4,), (0,), size, size < 0, radius=1)[1] == [[(1,)]], "(2,) is outside and stands for nothing"


def test_sizes_are_asked_only_nearby():
    asked = []
    search = neighbourhood(CUBE, (2, 2, 1), lambda point: asked.append(point) or float(sum(point)), radius=1)
    drive(search, lambda points: [False] * len(points))
    assert sorted(asked) == sorted(neighbours(CUBE, (2, 2, 1), 1, True))


@pytest.mark.parametrize(
    ("centre", "arguments", "message"),
    [
        ((6, 0, 0), {}, "is no point of a cube"),
        ((-1, 0, 0), {}, "is no point of a cube"),
        ((0, 0), {}, "is no point of a cube"),
        ((0, 0, 0), {"radius": -1}, "radius must not be negative"),
        ((0, 0, 0), {"batch": 0}, "batch must be at least 1"),
        ((0, 0, 0), {"limit": -1}, "limit must not be negative"),
    ],
)
def test_errors_are_raised_by_the_call(centre, arguments, message):
    with pytest.raises(ValueError, match=message):
        neighbourhood(CUBE, centre, lambda point: 1.0, **arguments)


def test_a_size_that_is_nan():
    with pytest.raises(ValueError, match="NaN"):
        neighbourhood((2,), (0,), lambda point: math.nan)
