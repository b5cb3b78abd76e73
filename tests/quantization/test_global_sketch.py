"""A delta counts magnitudes in the pass for its joint sketches, and finds what a pass of their own finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.engine import quantizing
from dsq_ckpt.quantization import global_sketch
from dsq_ckpt.quantization.analysis import GlobalSketch

CONFIG = {"storage": {"block_elements": 1024, "threads": 2}}
NAMES = ("first", "second", "third")


def state(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"{name}.weight": torch.randn(64, 96, generator=generator) / 50 for name in NAMES}
    moments = {
        name: {
            "exp_avg": torch.randn(64, 96, generator=generator) * 1e-4,
            "exp_avg_sq": torch.exp2(torch.randn(64, 96, generator=generator) * 3 - 30),
        } for name in weights
    }
    return {"model": weights, "optimizer": {"state": moments}}


def nothing(state: dict) -> None:
    """Leave the state as it is."""


def not_a_number(state: dict) -> None:
    state["model"]["second.weight"][3, 5] = torch.nan


def infinite(state: dict) -> None:
    state["optimizer"]["state"]["first.weight"]["exp_avg"][0, 0] = -torch.inf


def negative(state: dict) -> None:
    state["optimizer"]["state"]["third.weight"]["exp_avg_sq"][7, 7] = -1e-9


def faint(state: dict) -> None:
    state["model"]["first.weight"].mul_(1e-40)


def past_float32(state: dict) -> None:
    state["model"]["first.weight"] = state["model"]["first.weight"].double() * 1e-50


def moved(state: dict) -> None:
    state["model"]["third.weight"].mul_(1e5)


def zeros(state: dict) -> None:
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"].zero_()
        moments["exp_avg_sq"].zero_()


def sketched(directory, before, change, monkeypatch: pytest.MonkeyPatch) -> GlobalSketch:
    """Return the sketch of a delta."""
    sketches: list[GlobalSketch] = []

    def build(*arguments, **options) -> GlobalSketch:
        sketches.append(global_sketch.build_global_sketch(*arguments, **options))
        return sketches[-1]

    monkeypatch.setattr(quantizing, "build_global_sketch", build)
    history = dsq_ckpt.SaveHistory()
    first, second = state(0), state(1)
    before(first)
    change(second)
    dsq_ckpt.save(first, directory / "1", config=CONFIG, history=history, no_dist=True)
    dsq_ckpt.save(second, directory / "2", config=CONFIG, history=history, no_dist=True)
    return sketches[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before, change, again", [
    (nothing, nothing, None), (nothing, not_a_number, None), (nothing, infinite, None), (nothing, negative, None),
    (nothing, faint, None), (nothing, past_float32, None), (nothing, moved, "rescaled"), (zeros, nothing, "refit"),
])
def test_one_pass_finds_what_two_do(tmp_path, monkeypatch, before, change, again) -> None:
    one = sketched(tmp_path / "one", before, change, monkeypatch)
    monkeypatch.setattr(global_sketch, "is_on_host", lambda chunk: False)
    two = sketched(tmp_path / "two", before, change, monkeypatch)
    assert one.joint.keys() == two.joint.keys()
    for group, counts in one.joint.items():
        np.testing.assert_array_equal(counts, two.joint[group])
    assert one.octaves.keys() == two.octaves.keys()
    for name, counts in one.octaves.items():
        np.testing.assert_array_equal(counts, two.octaves[name])
    assert (one.nonfinite, one.scales, one.windows) == (two.nonfinite, two.scales, two.windows)
    assert [chunk.key for chunk in one.chunks] == [chunk.key for chunk in two.chunks]
    assert bool(one.nonfinite) is (change in (not_a_number, infinite, negative, faint, past_float32))
    assert again is None or getattr(one.scales, again)
