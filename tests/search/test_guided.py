"""Guided exhaustive search against brute force, on feasible sets and sizes of every kind."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsq_ckpt.search import drive, guided_exhaustive

PAPER = (6, 6, 3, 2)  # Table 2 of Inshrinkerator, the pruning metric taken for an axis: 216 points


class Trials:
    """Looks up outcomes, and checks what every search promises about the points it asks for."""

    def __init__(self, feasible: np.ndarray, batch: int = 1, size: np.ndarray | None = None) -> None:
        self.feasible, self.batch, self.size = feasible, batch, size
        self.rounds: list[list[tuple[int, ...]]] = []
        self.tried: dict[tuple[int, ...], bool] = {}

    def __call__(self, points: list[tuple[int, ...]]) -> list[bool]:
        assert 1 <= len(points) <= self.batch
        assert len(set(points)) == len(points), "a point twice in one round"
        smallest = min((self.size[candidate] for candidate, good in self.tried.items() if good), default=math.inf)
        for point in points:
            assert all(type(index) is int for index in point)
            assert point not in self.tried, "a point twice"
            assert not any(good and at_least(point, one) for one, good in self.tried.items()), "implied feasible"
            assert not any(not good and at_least(one, point) for one, good in self.tried.items()), "implied infeasible"
            assert self.size is None or self.size[point] < smallest, "larger than the best found"
        self.rounds.append(points)
        outcomes = [bool(self.feasible[point]) for point in points]
        self.tried.update(zip(points, outcomes, strict=True))
        return outcomes


def at_least(point, other) -> bool:
    return all(one >= two for one, two in zip(point, other, strict=True))


def additive(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A sum of one increasing function per axis."""
    total = np.zeros(shape)
    for axis, side in enumerate(shape):
        column = rng.uniform(0.05, 1) * np.cumsum(rng.exponential(size=side)) / side
        total += np.expand_dims(column, tuple(other for other in range(len(shape)) if other != axis))
    return total


def up_set(rng: np.random.Generator, shape: tuple[int, ...], corners: int) -> np.ndarray:
    """All points at least as conservative as one of so many random ones."""
    feasible = np.zeros(shape, dtype=bool)
    for _ in range(corners):
        feasible[tuple(slice(int(rng.integers(side)), None) for side in shape)] = True
    return feasible


def problem(seed: int, shape: tuple[int, ...], quality: str, sizes: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    if quality == "additive":
        total = additive(rng, shape)
        feasible = total >= rng.uniform(0.9 * total.min(), 1.1 * total.max())
    else:
        feasible = up_set(rng, shape, int(rng.integers(1, 12)))
    size = additive(rng, shape) if sizes != "random" else rng.random(shape)
    if sizes == "noisy":
        size *= rng.normal(1, 0.1, shape)
    if sizes == "ties":
        size = np.round(4 * size)
    return feasible, size


def solve(feasible: np.ndarray, size: np.ndarray, batch: int = 1, limit: int | None = None):
    trials = Trials(feasible, batch, size)
    point, count = drive(guided_exhaustive(size.shape, lambda point: float(size[point]), batch, limit), trials)
    assert count == len(trials.tried)
    return point, trials


def assert_optimal(point, feasible: np.ndarray, size: np.ndarray) -> None:
    if not feasible.any():
        assert point is None
    else:
        assert feasible[point]
        assert size[point] == size[feasible].min()


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
qualities = st.sampled_from(["additive", "up-set"])
size_kinds = st.sampled_from(["additive", "noisy", "random", "ties"])


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), shapes, qualities, size_kinds, st.integers(1, 9))
def test_guided_search_finds_the_optimum(seed, shape, quality, sizes, batch):
    feasible, size = problem(seed, shape, quality, sizes)
    point, trials = solve(feasible, size, batch)
    assert_optimal(point, feasible, size)
    assert point is None or trials.tried[point], "the choice was itself tried"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), shapes, qualities, size_kinds, st.integers(1, 9), st.integers(0, 12))
def test_a_limit_is_kept_and_the_best_so_far_returned(seed, shape, quality, sizes, batch, limit):
    feasible, size = problem(seed, shape, quality, sizes)
    point, trials = solve(feasible, size, batch, limit)
    assert len(trials.tried) <= limit
    good = [candidate for candidate, outcome in trials.tried.items() if outcome]
    assert point == min(good, key=lambda candidate: size[candidate], default=None)
    if len(trials.tried) < limit:
        assert_optimal(point, feasible, size)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), shapes, size_kinds, st.integers(1, 9), st.floats(0, 1))
def test_quality_that_is_not_monotone_ends_with_a_point_that_was_feasible(seed, shape, sizes, batch, share):
    _, size = problem(seed, shape, "up-set", sizes)
    feasible = np.random.default_rng(seed).random(shape) < share
    trials = Trials(feasible, batch, size)
    point, _ = drive(guided_exhaustive(shape, lambda point: float(size[point]), batch), trials)
    good = [candidate for candidate, outcome in trials.tried.items() if outcome]
    assert point == min(good, key=lambda candidate: size[candidate], default=None)


def test_every_up_set_of_a_small_cube():
    shape = (3, 2, 2)
    points = list(product(*map(range, shape)))
    size = additive(np.random.default_rng(0), shape)
    sets = 0
    for bits in range(1 << len(points)):
        feasible = np.array([bits >> number & 1 for number in range(len(points))], dtype=bool).reshape(shape)
        if all((np.diff(feasible.astype(int), axis=axis) >= 0).all() for axis in range(len(shape))):
            sets += 1
            assert_optimal(solve(feasible, size)[0], feasible, size)
    assert sets == 50  # plane partitions in a box of 3 x 2 x 2 (MacMahon)


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("sizes", ["additive", "noisy"])
@pytest.mark.parametrize("quality", ["up-set", "additive"])
def test_trials_on_the_cube_of_the_paper(quality, sizes, count):
    """Of 1000 problems of each kind: 10.0 to 11.1 trials on average, at most 25; 8 at a time, 3.2 rounds, at most 6."""
    counts, rounds = [], []
    for seed in range(count):
        feasible, size = problem(seed, PAPER, quality, sizes)
        counts.append(len(solve(feasible, size)[1].tried))
        rounds.append(len(solve(feasible, size, batch=8)[1].rounds))
    assert np.mean(counts) < 13 and max(counts) <= 30
    assert np.mean(rounds) < 4 and max(rounds) <= 7


def test_sizes_without_order_leave_little_to_try():
    """A point larger than a more conservative one is no candidate: of random sizes hardly any are left."""
    counts = [len(solve(*problem(seed, PAPER, "up-set", "random"))[1].tried) for seed in range(100)]
    assert np.mean(counts) < 5


def test_a_larger_point_is_not_tried_though_it_is_more_aggressive():
    size = np.array([[5.0, 1.0], [3.0, 4.0]])
    point, trials = solve(np.ones((2, 2), dtype=bool), size)
    assert point == (0, 1)
    assert (0, 0) not in trials.tried


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sizes", ["additive", "noisy"])
def test_nothing_or_everything_feasible(batch, sizes):
    for seed in range(20):
        _, size = problem(seed, PAPER, "up-set", sizes)
        point, trials = solve(np.zeros(PAPER, dtype=bool), size, batch)
        assert point is None
        assert len(trials.rounds) <= (9 if batch == 1 else 3)
        point, trials = solve(np.ones(PAPER, dtype=bool), size, batch)
        assert size[point] == size.min()
        assert len(trials.rounds) <= (9 if batch == 1 else 3)


@pytest.mark.parametrize(("batch", "rounds"), [(1, 7), (2, 6), (3, 4), (4, 4), (9, 3), (99, 1)])
def test_one_axis_is_searched_by_bisection(batch, rounds):
    """99 points, so 100 places of the crossing; equal parts would take log(100) / log(batch + 1) rounds."""
    assert rounds <= math.ceil(math.log(100) / math.log(batch + 1)) + 1
    size = np.arange(99.0)
    for crossing in range(0, 100, 3):
        point, trials = solve(size >= crossing, size, batch)
        assert point == ((crossing,) if crossing < 99 else None)
        assert len(trials.rounds) <= rounds


def test_replicas_are_not_left_idle_while_anything_is_open():
    size = additive(np.random.default_rng(0), (4, 4))
    _, trials = solve(np.zeros((4, 4), dtype=bool), size, batch=16)
    assert len(trials.rounds) == 1


def test_points_of_infinite_size_are_never_tried():
    size = np.array([math.inf, 1.0, 2.0])
    point, trials = solve(np.ones(3, dtype=bool), size, batch=3)
    assert point == (1,)
    assert (0,) not in trials.tried
    assert solve(np.ones(2, dtype=bool), np.full(2, math.inf))[0] is None


def test_size_is_asked_once_per_point():
    asked: list[tuple[int, ...]] = []
    search = guided_exhaustive((3, 4), lambda point: asked.append(point) or float(sum(point)), batch=2)
    drive(search, lambda points: [True] * len(points))
    assert sorted(asked) == list(product(range(3), range(4)))


@pytest.mark.parametrize(
    ("shape", "size", "arguments", "message"),
    [
        ((), 1.0, {}, "has no points"),
        ((3, 0), 1.0, {}, "has no points"),
        ((3,), math.nan, {}, "NaN"),
        ((3,), 1.0, {"batch": 0}, "batch must be at least 1"),
        ((3,), 1.0, {"limit": -1}, "limit must not be negative"),
    ],
)
def test_errors_are_raised_by_the_call(shape, size, arguments, message):
    with pytest.raises(ValueError, match=message):
        guided_exhaustive(shape, lambda point: size, **arguments)


def test_as_many_outcomes_as_points():
    with pytest.raises(ValueError, match="1 points were to be tried, but 2 outcomes were sent"):
        drive(guided_exhaustive((3,), lambda point: float(point[0])), lambda points: [True, False])


def test_an_error_of_a_trial_is_not_taken_for_the_end():
    def stop(points):
        raise StopIteration

    with pytest.raises(StopIteration):
        drive(guided_exhaustive((3,), lambda point: float(point[0])), stop)
