"""The simulator against renewal theory, the equations against the simulator, and what the paper's figures say of it."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from evaluation import simulation
from evaluation.simulation import Disk, Failures, Memory, System, simulate

from dsq_ckpt.errors import ConfigError
from dsq_ckpt.lowdiff.tuning import Bounds, CostModel, Costs, optimum

COSTS = Costs(
    iteration=0.5, bandwidth=1e9, snapshot_bytes=2e9, load=3.0, replay=0.1, mtbf=3600.0, merge=4.0, batch_fixed=0.05,
    batch_step=0.01, stall=0.2, contention=0.05,
)


def _renewal(interval: float, stall: float, recovery: float, mtbf: float) -> float:
    """Share of useful time where only whole intervals count: J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval" (2006), with failures during recoveries.
    """
    return interval / (mtbf * math.exp(recovery / mtbf) * math.expm1((interval + stall) / mtbf))


# --- failures


def test_traces_are_told_by_their_seed():
    failures = Failures(3600.0, software=0.5, seed=7)
    assert failures.trace(50) == failures.trace(50)
    assert failures.trace(50) != replace(failures, seed=8).trace(50)


def test_rates_of_ranks_add_up():
    alone, many = Failures(1e6, seed=1).trace(4000), Failures(1e6, ranks=1000, software=0.25, seed=1).trace(4000)
    assert [failure.after for failure in many] == pytest.approx([failure.after / 1000 for failure in alone])
    assert np.mean([failure.after for failure in many]) == pytest.approx(1000, rel=4 / math.sqrt(4000))
    assert np.mean([failure.software for failure in many]) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("wrong", [{"mtbf": 0.0}, {"ranks": 0}, {"software": 1.2}])
def test_failures_that_cannot_be(wrong):
    with pytest.raises(ConfigError):
        Failures(**{"mtbf": 1.0, **wrong})


# --- what is simulated, against theory


@pytest.mark.parametrize("mtbf", [30.0, 100.0, 1000.0])
@pytest.mark.parametrize("every, stall, load", [(20, 3.0, 15.0), (5, 0.0, 2.0), (50, 10.0, 0.5)])
def test_synchronous_checkpoints_follow_renewal_theory(mtbf, every, stall, load):
    """Also where intervals are as long as the time between failures."""
    outcome = simulate(simulation.torch_save(1.0, every, stall, load), Failures(mtbf, seed=3), 20_000)
    assert outcome.ratio == pytest.approx(_renewal(every, stall, load, mtbf), rel=0.03, abs=0.002)


def test_a_log_of_single_steps_loses_half_a_step():
    """No replay, no snapshots but the first: each step is a checkpoint."""
    system = System("log", 1.0, Disk(10**9, load=4.0, batch=1))
    outcome = simulate(system, Failures(50.0, seed=3), 20_000)
    assert outcome.ratio == pytest.approx(_renewal(1.0, 0.0, 4.0, 50.0), rel=0.01)
    assert outcome.lost / outcome.failures == pytest.approx(0.5, rel=0.1)


def test_availability_without_lost_steps():
    """The share of time between recoveries, with failures in recoveries: exp(-recovery / mtbf)."""
    system = System("perfect", 1e-6, Disk(1, load=20.0))
    assert simulate(system, Failures(50.0, seed=3), 20_000).ratio == pytest.approx(math.exp(-20 / 50), rel=0.01)


@pytest.mark.parametrize("lag", [0.0, 5.0, 55.0])
def test_a_checkpoint_that_is_written_beside_training_is_late(lag):
    """On average half an interval and the lag are done again; where a failure comes long after the one before."""
    system = System("late", 1.0, Disk(20, load=0.0, lag=lag))
    outcome = simulate(system, Failures(20_000.0, seed=3), 4000)
    assert outcome.lost / outcome.failures == pytest.approx(10 + lag, rel=0.03)


def test_a_log_replays_what_is_on_disk_and_loses_the_rest():
    system = System("log", 1.0, Disk(50, load=7.0, stall=0.5, lag=6.0, batch=5, batch_lag=3.0, replay=0.25))
    outcome = simulate(system, Failures(100_000.0, seed=3), 4000)
    lost, age = 5 / 2 + 3, 50 / 2 + 5.5
    assert outcome.lost / outcome.failures == pytest.approx(lost, rel=0.03)
    assert outcome.recovering / outcome.failures == pytest.approx(7 + 0.25 * (age - lost), rel=0.03)
    assert outcome.steady / outcome.wall == pytest.approx(0.5 / 50.5, rel=0.01)


def test_memory_is_used_where_it_survives():
    """Half of the failures leave it, and half of the others leave a peer's."""
    memory = Memory(every=4, load=1.0, lag=2.0, software=1.0, hardware=0.5)
    system = System("memory", 1.0, Disk(1000, load=100.0), overhead=0.5, memory=memory)
    outcome = simulate(system, Failures(10_000.0, software=0.5, seed=3), 20_000)
    assert outcome.recovering / outcome.failures == pytest.approx(0.75 * 1 + 0.25 * 100, rel=0.05)
    quick, slow = (simulate(part, Failures(10_000.0, seed=3), 20_000) for part in simulation.modes(system))
    assert quick.lost / quick.failures == pytest.approx(4 / 2 + 2 / 1.5, rel=0.03)
    assert slow.lost / slow.failures == pytest.approx(1000 / 2, rel=0.1)
    assert quick.ratio > outcome.ratio > slow.ratio


def test_memory_beside_a_log_is_refused():
    with pytest.raises(ConfigError, match="not simulated together"):
        System("both", 1.0, Disk(10, 1.0, batch=1), memory=Memory(1, 1.0))
    with pytest.raises(ConfigError, match="nothing in memory"):
        simulation.modes(simulation.torch_save(1.0, 10, 1.0, 1.0))


@pytest.mark.parametrize("mtbf", [10.0, 300.0])
def test_time_goes_somewhere(mtbf):
    """Failures much more frequent than checkpoints: nothing is done, no part is negative."""
    for system in _systems(Failures(mtbf)):
        outcome = simulate(system, Failures(mtbf, software=0.5, seed=5), 2000)
        parts = (outcome.useful, outcome.lost, outcome.recovering, outcome.steady)
        assert sum(parts) == pytest.approx(outcome.wall)
        assert all(part >= -1e-6 * outcome.wall for part in parts), system.name
        assert outcome == simulate(system, Failures(mtbf, software=0.5, seed=5), 2000)


# --- equations and model, against the simulator


@pytest.mark.parametrize("seed", [0, 1])
def test_equation_8_is_what_a_job_under_its_assumptions_wastes(seed):
    """Within 3 % at a mean time between failures of 100 hours, where second-order terms are small."""
    rare = replace(COSTS, mtbf=3.6e5)
    for every, batch in ((500, 5), (2000, 20), (5000, 50)):
        system = simulation.lowdiff_of_the_equations(rare, every, batch)
        outcome = simulate(system, Failures(rare.mtbf, seed=seed), 10_000)
        told = simulation.wasted_time(rare, 1 / every, batch, outcome.wall)
        assert outcome.wasted == pytest.approx(told, rel=0.03), f"seed {seed}, every {every}, batch {batch}"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_model_is_what_a_job_wastes(seed):
    """Within 3 %, as above; also where the checkpointing process falls behind (a batch of 1 at 0.6 s per file)."""
    for costs, every, batch in (
        (COSTS, 100, 4), (COSTS, 2000, 20), (COSTS, 500, 50), (replace(COSTS, batch_fixed=0.6), 500, 1),
    ):
        rare = replace(costs, mtbf=3.6e5)
        outcome = simulate(simulation.lowdiff(rare, every, batch), Failures(rare.mtbf, seed=seed), 10_000)
        rate = CostModel(rare).wasted_time(every, batch, outcome.useful)
        # Steady overhead comes with useful steps, failures with all of the time.
        assert rate <= 1.03 * outcome.wasted, f"seed {seed}, every {every}, batch {batch}"
        assert CostModel(rare).wasted_time(every, batch, outcome.wall) >= 0.97 * outcome.wasted


def _grid(middle: float, steps: int = 3, factor: float = 2.0) -> list[int]:
    return sorted({max(1, round(middle * factor**power)) for power in range(-steps, steps + 1)})


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mtbf", [1800.0, 7200.0])
def test_brute_force_over_traces_finds_equation_10(seed, mtbf):
    """The best cell of a grid in factors of 2 is next to (f*, b*), and these waste at most 3 % more than it."""
    costs = replace(COSTS, mtbf=mtbf, merge=1.0)
    f, b = optimum(costs)
    failures = Failures(mtbf, seed=seed)

    def wasted(every: int, batch: int) -> float:
        outcome = simulate(simulation.lowdiff_of_the_equations(costs, every, batch), failures, 1500)
        return outcome.wasted / outcome.wall

    cells = {(every, batch): wasted(every, batch) for every in _grid(1 / f) for batch in _grid(b) if batch <= every}
    every, batch = min(cells, key=lambda cell: cells[cell])
    print(f"seed {seed}, mtbf {mtbf:g}: equation 10 ({1 / f:.0f}, {b:.1f}), simulated ({every}, {batch})")
    assert 0.49 <= every * f <= 2.04 and 0.49 <= batch / b <= 2.04
    assert wasted(round(1 / f), round(b)) <= 1.03 * min(cells.values())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mtbf", [1800.0, 7200.0])
def test_brute_force_over_traces_finds_the_choice(seed, mtbf):
    """Likewise for the model's choice under its own assumptions."""
    costs = replace(COSTS, mtbf=mtbf)
    chosen = CostModel(costs).best_settings(Bounds((1, 5000), (1, 256)))
    failures = Failures(mtbf, seed=seed)

    def wasted(every: int, batch: int) -> float:
        outcome = simulate(simulation.lowdiff(costs, every, batch), failures, 1500)
        return outcome.wasted / outcome.wall

    cells = {
        (every, batch): wasted(every, batch) for every in _grid(chosen.snapshot_every) for batch in _grid(chosen.batch)
    }
    best = min(cells, key=lambda cell: cells[cell])
    print(f"seed {seed}, mtbf {mtbf:g}: chosen {tuple(chosen)}, simulated {best}")
    assert 0.49 <= best[0] / chosen.snapshot_every <= 2.04 and 0.24 <= best[1] / chosen.batch <= 4.1
    assert cells[chosen] <= 1.02 * cells[best]


def test_the_table():
    rows = simulation.table(COSTS, [20, 200, 500], [1, 8, 32], count=500)
    assert [(row["every"], row["batch"]) for row in rows] == [
        (every, batch) for every in (20, 200, 500) for batch in (1, 8, 32) if batch <= every
    ]
    for key in ("equation", "equation_simulated", "model", "model_simulated"):
        assert min(row[key] for row in rows) == 1
    assert rows == simulation.table(COSTS, [20, 200, 500], [1, 8, 32], count=500)
    assert rows != simulation.table(COSTS, [20, 200, 500], [1, 8, 32], count=500, seed=1)


# --- systems side by side


def _systems(failures: Failures) -> list[System]:
    """Constants in the proportions of the paper's GPT2-S: a step of 0.5 s, a full checkpoint of 4 s."""
    costs = replace(COSTS, mtbf=failures.job_mtbf)
    return [
        simulation.torch_save(0.5, 100, save=4.0, load=6.0),
        simulation.checkfreq(0.5, stall=0.3, persist=4.0, load=6.0),
        simulation.gemini(
            0.5, Memory(1, load=5.0, lag=1.0, hardware=0.9), overhead=0.03, disk_every=20_000, save=4.0, load=6.0,
        ),
        simulation.naive(0.5, 100, save=4.0, load=6.0, difference=0.2, merge=0.1),
        simulation.lowdiff(costs, *CostModel(costs).best_settings(), overhead=0.005),
        *simulation.modes(simulation.lowdiff_plus(0.5, 0.02, Memory(1, load=0.5), persist=2.0, load=6.0)),
    ]


def test_intervals_of_checkfreq_and_lowdiff_plus():
    """Writing one must end before the next, stalls stay within 3.5 %."""
    assert simulation.checkfreq(0.5, stall=0.0, persist=4.1, load=1.0).disk.every == 9
    assert simulation.checkfreq(0.5, stall=0.3, persist=4.0, load=1.0).disk.every == 18
    assert simulation.lowdiff_plus(0.5, 0.1, Memory(1, 0.5), persist=2.0, load=1.0).disk.every == 4
    assert simulation.lowdiff_plus(0.5, 0.1, Memory(1, 0.5), persist=0.1, load=1.0).disk.every == 1


def test_rows_of_the_comparison():
    cases = [Failures(360.0 * hours, software=0.5, seed=2) for hours in (1, 10, 50)]
    rows = simulation.compare(_systems, cases, 300)
    assert len(rows) == 3 * 7 and [row["job_mtbf"] for row in rows[::7]] == [360, 3600, 18000]
    for row in rows:
        assert row["ratio"] + row["wasted"] == pytest.approx(1)
        assert row["wasted"] == pytest.approx(row["lost"] + row["recovering"] + row["steady"])
    for name in {row["name"] for row in rows}:
        ratios = [row["ratio"] for row in rows if row["name"] == name]
        assert ratios == sorted(ratios), f"{name} is better where failures are rarer"


def test_months_of_thousands_of_ranks_take_no_time():
    """16,384 ranks that fail every two years each, about one failure an hour: 2000 of them are 80 days."""
    cases = [Failures(2 * 365 * 86_400.0, ranks=ranks, software=0.5) for ranks in (8, 1024, 16_384)]
    begin = time.process_time()
    rows = simulation.compare(_systems, cases, 2000)
    assert time.process_time() - begin < 5
    for name in {row["name"] for row in rows}:
        ratios = [row["ratio"] for row in rows if row["name"] == name]
        assert ratios == sorted(ratios, reverse=True)
