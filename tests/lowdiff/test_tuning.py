"""The equations against derivatives and grids, the model's choice against brute force, the tuner step by step."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.tuning import (
    HYSTERESIS,
    MAX_LOAD,
    PRIOR_SECONDS,
    Bounds,
    CostModel,
    Costs,
    TunedSettings,
    Tuner,
    optimum,
    wasted_time,
)

COSTS = Costs(
    iteration=0.5, bandwidth=1e9, snapshot_bytes=2e9, load=3.0, replay=0.1, mtbf=3600.0, merge=4.0, batch_fixed=0.05,
    batch_step=0.01, contention=0.05,
)


def _magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    """Evenly over orders of magnitude."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


costs = st.builds(
    Costs, iteration=_magnitudes(0.01, 10), bandwidth=_magnitudes(1e7, 1e10), snapshot_bytes=_magnitudes(1e6, 1e11),
    load=_magnitudes(0.01, 100), replay=_magnitudes(1e-3, 5), mtbf=_magnitudes(60, 1e6), ranks=st.integers(1, 4096),
    merge=st.none() | _magnitudes(1e-3, 100), stall=st.none() | _magnitudes(1e-3, 10),
    batch_fixed=_magnitudes(1e-4, 1), batch_step=_magnitudes(1e-5, 0.1), contention=st.floats(0, 1),
)


# --- equations 8 to 10


@given(costs)
def test_equation_10_is_where_the_derivatives_of_equation_8_vanish(c):
    f, b = optimum(c)
    # The terms of equation 9 by hand; they cancel in pairs.
    assert c.write_seconds / c.iteration == pytest.approx(c.merge_seconds / (2 * f**2 * c.mtbf * b))
    assert c.iteration / 2 == pytest.approx(c.merge_seconds / (2 * b**2 * f))
    assert f * b == pytest.approx((c.merge_seconds**2 / (2 * c.write_seconds * c.mtbf)) ** (1 / 3))


def test_equation_10_as_printed_where_an_iteration_is_a_second():
    c = replace(COSTS, iteration=1.0)
    w, s, m, r = c.bandwidth, c.snapshot_bytes, c.mtbf, c.merge_seconds
    printed = (r * w**2 / (4 * s**2 * m**2)) ** (1 / 3), (2 * s * r * m / w) ** (1 / 3)
    assert optimum(c) == pytest.approx(printed)


def test_the_unit_of_time_does_not_matter():
    """Everything in minutes: f and b are counted in iterations, and stay."""
    minutes = Costs(0.5 / 60, 1e9 * 60, 2e9, 3 / 60, 0.1 / 60, 60.0, merge=4 / 60)
    assert optimum(minutes) == pytest.approx(optimum(COSTS))
    assert 60 * wasted_time(minutes, 0.01, 5, 100 / 60) == pytest.approx(wasted_time(COSTS, 0.01, 5, 100))


@given(costs, st.floats(-2, 2), st.floats(-2, 2))
def test_equation_10_is_the_minimum_of_equation_8(c, up, right):
    f, b = optimum(c)
    best = wasted_time(c, f, b, 1.0)
    assert wasted_time(c, f * 10**up, b * 10**right, 1.0) >= best - 1e-9 * abs(best)


@given(costs)
@settings(max_examples=25)
def test_a_numeric_search_finds_equation_10(c):
    """Coordinate descent in log f and log b, which does not know the derivatives, from a far start."""
    def waste(x: float, y: float) -> float:
        return wasted_time(replace(c, load=c.merge_seconds / 2, ranks=1), math.exp(x), math.exp(y), 1.0)

    f, b = optimum(c)
    x, y, step = math.log(f) + 3, math.log(b) - 4, 1.0
    while step > 1e-5:
        around = itertools.product((x - step, x, x + step), (y - step, y, y + step))
        lowest = min(around, key=lambda point: (waste(*point), point != (x, y)))
        x, y, step = (*lowest, step) if lowest != (x, y) else (x, y, step / 2)
    assert (math.exp(x), math.exp(y)) == pytest.approx((f, b), rel=1e-2)


def test_wasted_time_counts_gpu_seconds():
    """One failure: half a batch of 4 (1 s), a load (3 s), (100 / 4 - 1) / 2 merges (48 s). 72 snapshots (144 s)."""
    assert wasted_time(COSTS, 0.01, 4, 3600.0) == pytest.approx(1 + 3 + 48 + 144)
    assert wasted_time(replace(COSTS, ranks=8), 0.01, 4, 3600.0) == pytest.approx(8 * 196)


def test_costs_name_all_that_is_wrong():
    with pytest.raises(ConfigError, match=r"iteration=0.*replay=-1.*mtbf=nan.*contention=2"):
        Costs(0, 1e9, 1e9, 1, -1, math.nan, contention=2)
    assert Costs(1, 1, 1, 0, 1, 1).merge_seconds == 1  # a load of nothing is fine; a batch merges as a step
    assert Costs(1, 2, 4, 0, 1, 1).stall_seconds == 2


# --- the model


def _brute(c: Costs, bounds: Bounds) -> float:
    return min(
        CostModel(c).wasted_time(every, batch, 1.0, MAX_LOAD)
        for every in range(bounds.every[0], bounds.every[1] + 1)
        for batch in range(bounds.batch[0], min(bounds.batch[1], every) + 1)
    )


@given(costs, st.integers(1, 30), st.integers(1, 60), st.integers(1, 10), st.integers(1, 10))
@settings(max_examples=60, deadline=None)
@example(replace(COSTS, batch_fixed=100.0), 1, 60, 1, 10)  # cannot keep up whatever is chosen
@example(replace(COSTS, mtbf=1.0, replay=2.0), 1, 60, 1, 10)  # replay slower than training
def test_the_choice_is_the_best_of_all(c, least, more, small, wider):
    assume(small <= least + more)
    bounds = Bounds((least, least + more), (small, small + wider))
    chosen = CostModel(c).best_settings(bounds)
    assert bounds.clip(chosen) == chosen and chosen.batch <= chosen.snapshot_every
    chosen_waste = CostModel(c).wasted_time(*chosen, 1.0, MAX_LOAD)
    best = _brute(c, bounds)
    assert chosen_waste == pytest.approx(best, rel=1e-9, abs=1e-12)


@given(costs)
def test_the_continuous_optimum_is_stationary(c):
    """By the two closed formulas that the class states."""
    assume(c.replay < c.iteration)  # otherwise losing a step is cheaper than replaying it
    every = math.sqrt(2 * (c.stall_seconds + c.contention * c.write_seconds) * c.mtbf / (c.replay * c.iteration))
    gain = (c.iteration - c.replay) * (c.iteration / 2 + c.batch_step)
    batch = math.sqrt(c.contention * c.batch_fixed * c.mtbf / gain)
    lost = batch * c.iteration / 2 + c.batch_fixed + batch * c.batch_step
    assume(batch > 1e-3 and 1.2 * lost < 0.9 * every * c.iteration / 2)  # there is something to replay
    easy = CostModel(replace(c, ranks=1))
    best = easy.wasted_time(every, batch, 1.0, math.inf)
    for near in (0.9, 1.1):
        assert easy.wasted_time(near * every, batch, 1.0, math.inf) >= best - 1e-12
        assert easy.wasted_time(every, near * batch, 1.0, math.inf) >= best - 1e-12


@given(costs, st.floats(1, 100))
@settings(max_examples=50, deadline=None)
def test_the_optimum_moves_to_rarer_snapshots(c, factor):
    """Rarer failures, cheaper replay and dearer stalls; the smallest batch keeps interval and batch apart."""
    bounds = Bounds((1, 5000), (1, 1))
    every = CostModel(c).best_settings(bounds).snapshot_every
    assert CostModel(replace(c, mtbf=factor * c.mtbf)).best_settings(bounds).snapshot_every >= every
    assert CostModel(replace(c, replay=c.replay / factor)).best_settings(bounds).snapshot_every >= every
    assert CostModel(replace(c, stall=factor * c.stall_seconds)).best_settings(bounds).snapshot_every >= every


@given(costs, st.floats(1, 100))
@settings(max_examples=50, deadline=None)
def test_the_optimum_moves_to_larger_batches(c, factor):
    """Dearer files, more contention, rarer failures; with one interval, that they do not move it."""
    assume(c.replay < 0.9 * c.iteration)
    bounds = Bounds((200, 200), (1, 64))
    batch = CostModel(c).best_settings(bounds).batch
    assert CostModel(replace(c, batch_fixed=factor * c.batch_fixed)).best_settings(bounds).batch >= batch
    assert CostModel(replace(c, mtbf=factor * c.mtbf)).best_settings(bounds).batch >= batch
    assert CostModel(replace(c, contention=min(1.0, factor * c.contention))).best_settings(bounds).batch >= batch


def test_without_contention_the_smallest_batch_that_keeps_up():
    c = replace(COSTS, contention=0.0, mtbf=1e6, batch_fixed=2.0, stall=0.01)
    chosen = CostModel(c).best_settings()
    model = CostModel(c)
    assert model.busy(*chosen) <= MAX_LOAD * c.iteration < model.busy(chosen.snapshot_every, chosen.batch - 1)
    assert CostModel(replace(c, batch_fixed=0.05)).best_settings().batch == 1


def test_falling_behind_is_paid_by_training():
    c = replace(COSTS, contention=0.0, batch_fixed=2.0)
    assert CostModel(c).slowdown(1000, 1) == pytest.approx(2.0 + 0.01 + 2 / 1000 - 0.5)
    assert CostModel(c).slowdown(1000, 10) == 0


@pytest.mark.parametrize("every, batch", [((0, 5), (1, 1)), ((5, 2), (1, 1)), ((1, 4), (8, 9))])
def test_bounds_that_hold_nothing(every, batch):
    with pytest.raises(ConfigError):
        Bounds(every, batch)


# --- the tuner


def _measure(tuner: Tuner, c: Costs, batch: int) -> None:
    """One of everything, as a job of these costs would measure it."""
    size = int(c.batch_step * c.bandwidth) * batch
    tuner.observe(
        iteration=c.iteration, steps=100, stall=c.stall_seconds, snapshot=(c.write_seconds, int(c.snapshot_bytes)),
        load=c.load, batch=(c.batch_fixed + size / c.bandwidth, size, batch), replay=c.replay,
    )


def test_nothing_moves_before_there_are_measurements():
    tuner = Tuner(TunedSettings(30, 3))
    assert tuner.suggest() == (30, 3)
    tuner.observe(iteration=0.5)
    tuner.observe(snapshot=(2.0, 2_000_000_000))
    assert tuner.costs() is None and tuner.suggest() == (30, 3)


def test_costs_are_told_from_measurements():
    tuner = Tuner(mtbf=3600.0, contention=0.05)
    _measure(tuner, COSTS, 4)
    told = tuner.costs()
    assert told is not None
    for name in ("iteration", "bandwidth", "snapshot_bytes", "load", "replay", "mtbf", "batch_fixed", "contention"):
        assert getattr(told, name) == pytest.approx(getattr(COSTS, name)), name
    assert told.batch_step == pytest.approx(COSTS.batch_step)
    tuner.observe(encoding=0.02)
    told = tuner.costs()
    assert told is not None and told.batch_step == pytest.approx(COSTS.batch_step + 0.02)


@given(costs, st.integers(1, 1000), st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_the_tuner_walks_to_the_optimum_and_stays(c, every, batch):
    bounds = Bounds()
    tuner = Tuner(TunedSettings(every, batch), bounds, mtbf=c.mtbf, contention=c.contention)
    before = tuner.settings
    seen = [before]
    for _ in range(12):
        _measure(tuner, c, before.batch)
        now = tuner.suggest()
        assert bounds.clip(now) == now
        for old, new in zip(before, now, strict=True):
            assert max(old, new) <= 2 * min(old, new)
        seen.append(now)
        before = now
    told = tuner.costs()
    assert told is not None
    aim = CostModel(told).best_settings(bounds)
    assert CostModel(told).rate(seen[-1]) <= HYSTERESIS * CostModel(told).rate(aim) * (1 + 1e-9)
    assert seen[-1] == seen[-2]


def test_jitter_moves_nothing_once_the_tuner_is_there():
    tuner = Tuner(mtbf=3600.0, contention=0.05)
    for _ in range(12):
        _measure(tuner, COSTS, 8)
        tuner.suggest()
    settled = tuner.settings
    for round_ in range(50):
        factor = 1.1 if round_ % 2 else 0.9
        _measure(tuner, replace(COSTS, replay=factor * COSTS.replay, batch_fixed=factor * COSTS.batch_fixed), 8)
        assert tuner.suggest() == settled


def test_the_tuner_follows_a_disk_that_becomes_slow():
    tuner = Tuner(mtbf=3600.0)
    for _ in range(12):
        _measure(tuner, COSTS, 2)
        tuner.suggest()
    quick = tuner.settings
    for _ in range(30):
        _measure(tuner, replace(COSTS, bandwidth=1e8, batch_fixed=3.0), 2)
        tuner.suggest()
    assert tuner.settings.snapshot_every > quick.snapshot_every and tuner.settings.batch > quick.batch


def test_settings_that_are_fixed_stay():
    tuner = Tuner(bounds=Bounds(every=(20, 20), batch=(1, 64)), mtbf=1e6, contention=0.5)
    for _ in range(10):
        _measure(tuner, COSTS, 2)
        assert tuner.suggest().snapshot_every == 20
    assert 2 < tuner.settings.batch <= 20  # no longer than the interval


def test_the_time_between_failures_is_observed():
    tuner = Tuner()
    assert tuner.mtbf == PRIOR_SECONDS
    tuner.observe(iteration=1.0, steps=72_000)
    assert tuner.mtbf == PRIOR_SECONDS + 72_000
    tuner.observe(failures=1)
    tuner.observe(failures=9)
    assert tuner.mtbf == pytest.approx((PRIOR_SECONDS + 72_000) / 11)
    assert Tuner(mtbf=100.0).mtbf == 100


def test_a_state_goes_through_json():
    tuner = Tuner(contention=0.05)
    for _ in range(3):
        _measure(tuner, COSTS, 4)
        tuner.suggest()
    tuner.observe(failures=2)
    other = Tuner.from_state(json.loads(json.dumps(tuner.state())), contention=0.05)
    assert other.state() == tuner.state() and other.costs() == tuner.costs()
    assert [other.suggest() for _ in range(5)] == [tuner.suggest() for _ in range(5)]
    narrow = Tuner.from_state(tuner.state(), Bounds((7, 9), (1, 2)), mtbf=60.0)
    assert 7 <= narrow.settings.snapshot_every <= 9 and narrow.mtbf == 60


@pytest.mark.parametrize("damage", [{"choice": [1]}, {"means": 3}, {"run_time": None}, {"means": {"iteration": "x"}}])
def test_a_state_that_is_none(damage):
    with pytest.raises(ConfigError, match="not the state of a tuner"):
        Tuner.from_state({**Tuner().state(), **damage})
    with pytest.raises(ConfigError, match="not the state of a tuner"):
        Tuner.from_state({})


@pytest.mark.parametrize(
    "wrong", [{"iteration": -1.0}, {"replay": math.nan}, {"snapshot": (math.inf, 5)}, {"failures": -1}],
)
def test_measurements_that_cannot_be(wrong):
    tuner = Tuner()
    before = tuner.state()
    with pytest.raises(ValueError, match="not negative"):
        tuner.observe(**wrong)
    assert tuner.state() == before


def test_arguments_out_of_range():
    with pytest.raises(ConfigError, match="mtbf"):
        Tuner(mtbf=0)
    with pytest.raises(ConfigError, match="contention"):
        Tuner(contention=1.5)


def test_a_clock_that_saw_nothing():
    """Zero seconds, as a coarse clock measures a tiny model."""
    tuner = Tuner(mtbf=60.0)
    tuner.observe(iteration=0.0, snapshot=(0.0, 0), batch=(0.0, 0, 0), stall=0.0, replay=0.0, load=0.0)
    assert tuner.bounds.clip(tuner.suggest()) == tuner.settings
