"""`delta.failure_interval`: a keyframe comes where it costs less time than the restores to come."""

from __future__ import annotations

import itertools
import logging
import time
from types import SimpleNamespace

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.config.delta import DeltaConfig
from dsq_ckpt.engine import chain_price
from dsq_ckpt.engine.chain_price import ChainPrice
from dsq_ckpt.engine.history import SaveHistory
from dsq_ckpt.storage.manifest import Manifest
from dsq_ckpt.storage.write_speed import WriteSpeed
from tests.helpers.states import load_copy

OPTIONS = {"storage": {"fsync": False, "block_elements": 1024}, "quantize": {"min_elements": 256}}

EXACT_MOMENTS = {"quantize": {**OPTIONS["quantize"], "exp_avg_sq": {"method": "exact"}, "exp_avg": {"method": "exact"}}}


def states():
    """Weights that take a step between any two."""
    generator = torch.Generator().manual_seed(0)
    state = {"a.weight": torch.randn(40, 60, generator=generator)}
    while True:
        yield state
        state = {name: value + 0.01 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def save_all(root, count, delta, restored=(), **options):
    """Save a run, which is restored after some of its saves, and return the depth of each checkpoint."""
    run, history, depths = states(), SaveHistory(), []
    for number in range(count):
        path, state = root / f"{number:02d}", next(run)
        dsq_ckpt.save(state, path, config={**OPTIONS, **options, "delta": delta}, history=history)
        depths.append(Manifest.read(path).depth)
        if number in restored:
            load_copy(path, state, history=history)
    return depths


@pytest.fixture
def speeds(monkeypatch):
    """A byte is written in 1e-8 s, and a code decoded in 1e-9."""
    monkeypatch.setattr(chain_price, "write_speed", SimpleNamespace(get=lambda: 1e8))
    monkeypatch.setattr(chain_price, "_time_delta", lambda *_: 1e-9)


@pytest.mark.parametrize("siblings", [1, 2])
@pytest.mark.parametrize("keyframe, delta, restores", itertools.product([0.0, 0.3, 7.0], [0.01, 1.0], [0.002, 4.0]))
def test_the_chain_ends_where_a_checkpoint_costs_least(siblings, keyframe, delta, restores):
    price, depth = ChainPrice(keyframe, delta, restores), 0
    while price.allows_delta(depth, siblings):
        depth += 1

    def cost(deltas):
        return (keyframe + restores * delta * siblings * deltas * (deltas + 1) / 2) / (1 + siblings * deltas)

    assert cost(depth) == pytest.approx(min(cost(deltas) for deltas in range(2 * depth + 50)))


@pytest.mark.parametrize("delta, expected", [
    ({"failure_interval": 1e-9}, [0, 1, 0, 1, 0, 1, 0]),
    ({"failure_interval": 5e-324}, [0, 1, 0, 1, 0, 1, 0]),  # more restores than a float has
    ({"failure_interval": 1e9}, [0, 1, 2, 3, 4, 5, 6]),
    ({"failure_interval": 1e300}, [0, 1, 2, 3, 4, 5, 6]),
    ({"failure_interval": None}, [0, 1, 2, 3, 4, 5, 6]),
    ({"failure_interval": "observed"}, [0, 1, 2, 3, 4, 5, 6]),  # there was none
    ({"failure_interval": 1e9, "max_chain": 3}, [0, 1, 2, 3, 0, 1, 2]),
    ({"failure_interval": 1e-9, "max_chain": "auto"}, [0, 1, 1, 0, 1, 1, 0]),
    ({"failure_interval": 1e9, "max_chain": "auto"}, [0, 1, 1, 2, 2, 3, 3]),
])
def test_keyframes_of_a_run(delta, expected, speeds, tmp_path):
    assert save_all(tmp_path, 7, delta) == expected


def test_restores_are_observed(speeds, tmp_path, monkeypatch):
    """A run that is restored after each second save has keyframes, the same without restores has none."""
    monkeypatch.setattr(chain_price, "_time_delta", lambda *_: 1.0)
    delta = {"failure_interval": "observed"}
    assert save_all(tmp_path / "whole", 7, delta) == [0, 1, 2, 3, 4, 5, 6]
    assert save_all(tmp_path / "restored", 7, delta, {1, 3, 5}) == [0, 1, 0, 1, 0, 1, 0]
    assert save_all(tmp_path / "without", 7, {}, {1, 3, 5}) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("delta, restored, expected", [
    ({"failure_interval": 1e-9}, (), "a keyframe instead of delta 2: a keyframe takes "),
    ({"failure_interval": 1e9}, (), "delta 2 instead of a keyframe: a keyframe takes "),
    ({"failure_interval": "observed"}, (), "delta.failure_interval (observed): no restores expected"),
    ({"failure_interval": "observed"}, (1,), " restores of each checkpoint are expected"),
    ({}, (1,), None),
])
def test_the_log_says_why_a_keyframe_comes(delta, restored, expected, speeds, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "dsq_ckpt")
    save_all(tmp_path, 3, delta, restored)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("chain_price")]
    assert said == [] if expected is None else expected in said[-1] and f"'{tmp_path / '01'}'" in said[-1]


def test_the_log_says_that_a_price_is_unknown(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(chain_price, "write_speed", WriteSpeed())
    caplog.set_level(logging.DEBUG, "dsq_ckpt")
    save_all(tmp_path, 3, {"failure_interval": 1e-9})
    assert "no price of a chain: no speed was measured" in caplog.text


@pytest.mark.parametrize("interval, expected", [(50.0, 0.2), ("observed", 10 * 2 / 45)])
def test_expected_restores(interval, expected, monkeypatch, tmp_path):
    """The median of the times between checkpoints, over the time between failures."""
    now = time.time()
    entries = [SimpleNamespace(created=now - age, lossy_resumes=resumes) for age, resumes in [(5, 3), (15, 3), (45, 2)]]
    entries.insert(2, SimpleNamespace(created=now - 25, lossy_resumes=2))
    monkeypatch.setattr(chain_price, "iter_predecessors", lambda path: iter([(path, entry) for entry in entries[1:]]))
    found = chain_price.expect_restores(tmp_path, entries[0], SimpleNamespace(lossy_resumes=4), interval)
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("count, restores, expected", [(4, 2, 2 / 3), (12, 2, 2 / 11), (4, -1, 0.0)])
def test_restores_are_observed_after_the_clock_was_set_back(count, restores, expected, monkeypatch, tmp_path):
    """Checkpoints then follow the newest one by a millisecond each, ahead of the clock."""
    created = [time.time() + 3600 - number / 1000 for number in range(count)]
    entries = [SimpleNamespace(created=at, lossy_resumes=2) for at in created]
    monkeypatch.setattr(chain_price, "iter_predecessors", lambda path: iter([(path, entry) for entry in entries[1:]]))
    candidate = SimpleNamespace(lossy_resumes=2 + restores)
    found = chain_price.expect_restores(tmp_path, entries[0], candidate, "observed")
    assert found == pytest.approx(expected, rel=0.02)


def test_long_chains_are_not_read_again_for_each_save(speeds, tmp_path, monkeypatch):
    """The time of a delta is that of the chain's first ones; a new process measures once what it restored."""
    depths = []
    monkeypatch.setattr(chain_price, "_time_delta", lambda path, manifest: depths.append(manifest.depth) or 1e-9)
    run, history = states(), SaveHistory()
    for number in range(14):
        if number == 9:
            chain_price._delta_times.clear()  # as in a new process
        config = {**OPTIONS, "delta": {"failure_interval": 1e9}}
        dsq_ckpt.save(next(run), tmp_path / f"{number:02d}", config=config, history=history)
    assert Manifest.read(tmp_path / "13").depth == 13
    assert depths == [1, 2, 3, 4, 8]


@pytest.mark.parametrize("slow, expected", [({3}, 8), ({4}, 8), ({2, 3, 4}, 3)])
def test_one_slow_measurement_does_not_end_a_chain(slow, expected, speeds, tmp_path, monkeypatch):
    """As beside another process: the median of the chain's measurements counts. Most of them may."""
    monkeypatch.setattr(chain_price, "expect_restores", lambda *_: 1.0)
    monkeypatch.setattr(chain_price, "_time_delta", lambda _, manifest: 1.0 if manifest.depth in slow else 1e-12)
    assert max(save_all(tmp_path, 9, {"failure_interval": 1.0})) == expected


def test_the_first_decoding_of_a_process_is_not_taken_for_the_speed(tmp_path, monkeypatch):
    save_all(tmp_path, 3, {})
    times = iter([7.0, 0.5])  # what is compiled or read at first
    monkeypatch.setattr(chain_price, "_time_deltas", lambda *_: next(times))
    assert chain_price._time_delta(tmp_path / "02", Manifest.read(tmp_path / "02")) == 0.5 / 2 / 1024


def test_speeds_are_measured(tmp_path):
    save_all(tmp_path, 3, {})
    path, config = tmp_path / "02", dsq_ckpt.DSQConfig.create(OPTIONS)
    price = chain_price._measure_price(path, Manifest.read(path), config, 0.5)
    assert price is not None and price.keyframe > 0 and price.delta > 0 and price.restores == 0.5
    assert chain_price._time_delta(tmp_path / "00", Manifest.read(tmp_path / "00")) is None  # a keyframe


def test_the_speed_of_writing_follows_the_last_gigabytes():
    speed = WriteSpeed()
    assert speed.get() is None
    for _ in range(4):
        speed.add(1 << 30, 1.0)
    assert speed.get() == pytest.approx(1 << 30)
    for _ in range(20):
        speed.add(1 << 30, 2.0)
    assert speed.get() == pytest.approx(1 << 29, rel=0.05)


def test_object_stores_do_not_count_as_the_disk(tmp_path):
    before = dict(vars(chain_price.write_speed))
    dsq_ckpt.save(next(states()), "memory://speeds/1", config=OPTIONS)
    assert vars(chain_price.write_speed) == before
    dsq_ckpt.save(next(states()), tmp_path / "1", config=OPTIONS)
    assert vars(chain_price.write_speed) != before


def test_a_named_parent_and_differences_have_no_price(speeds, tmp_path):
    run, config = states(), {**OPTIONS, "delta": {"failure_interval": 1e-9}}
    for number in range(3):
        parent = "auto" if number == 0 else tmp_path / str(number - 1)
        dsq_ckpt.save(next(run), tmp_path / str(number), config=config, parent=parent)
    assert Manifest.read(tmp_path / "2").depth == 2
    delta = {"failure_interval": 1e-9, "against": "values"}
    assert save_all(tmp_path / "values", 4, delta, **EXACT_MOMENTS) == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [0, -5.0, "often", True])
def test_intervals_that_are_none(value):
    with pytest.raises(dsq_ckpt.ConfigError, match="failure_interval"):
        dsq_ckpt.DSQConfig.create({"delta": {"failure_interval": value}})
    assert DeltaConfig(failure_interval=3600).failure_interval == 3600
