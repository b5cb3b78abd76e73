"""Tensors so far from others in size that no exponent tells it: they are exact, and a warning names them."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint
from tests.helpers.states import relative_error

NAMES = ("a.weight", "b.weight", "c.weight")
sizes = st.lists(st.tuples(*[st.floats(-36, 36)] * len(NAMES)), min_size=1, max_size=3)


def state_of(kind, exponents, number):
    generator = torch.Generator().manual_seed(number)
    values = {
        name: (torch.randn(80, 72, generator=generator, dtype=torch.float64) * 10.0**exponent).float()
        for name, exponent in zip(NAMES, exponents, strict=True)
    }
    if kind == "weights":
        return {"model": values}
    weights = {name: torch.randn(80, 72, generator=generator) for name in NAMES}
    state = {name: {"momentum_buffer": value} for name, value in values.items()}
    return {"model": weights, "optimizer": {"state": state}}


def lost(kind, state, path):
    """Return the relative error of each tensor, and what is told of those that are stored exactly."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dsq_ckpt.save(state, path)
    messages = [str(warning.message) for warning in caught if "a factor of 2^100" in str(warning.message)]
    target = {}
    dsq_ckpt.load(target, path)
    own, loaded = (
        tree["model"] if kind == "weights"
        else {name: moment["momentum_buffer"] for name, moment in tree["optimizer"]["state"].items()}
        for tree in (state, target)
    )
    assert all(own[name].equal(loaded[name]) for name in NAMES if name in "".join(messages)), messages
    return {name: relative_error(own[name].double(), loaded[name].double()) for name in NAMES}, messages


def check_sizes(kind, saves):
    with tempfile.TemporaryDirectory() as directory:
        for number, exponents in enumerate(saves):
            errors, told = lost(kind, state_of(kind, exponents, number), Path(directory, str(number)))
            assert all(error < 0.5 for error in errors.values()), (exponents, errors)
            if kind == "weights" and max(exponents) - min(exponents) < 29:
                assert not told, exponents


@pytest.mark.parametrize("kind", ["weights", "momentum"])
@given(sizes)
@example([(0.0, 0.0, -33.0), (0.0, 0.0, -33.0)])
@example([(0.0, -15.0, -15.0), (0.0, -15.0, -33.0), (0.0, -15.0, -36.0)])
@example([(0.0, 0.0, -30.05), (0.0, 0.0, -30.2), (0.0, 0.0, -30.05)])
@example([(36.0, 36.0, -36.0)])
@settings(max_examples=6)
def test_tensors_of_any_size_keep_their_values(kind, saves):
    check_sizes(kind, saves)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["weights", "momentum"])
@given(sizes)
@settings(max_examples=500)
def test_many_tensors_of_any_size_keep_their_values(kind, saves):
    check_sizes(kind, saves)


def test_a_tensor_that_stays_far_costs_no_keyframes(tmp_path):
    """The codes of the others go on."""
    for number in range(3):
        state = state_of("weights", (0.0, 0.0, -34.0), 0)
        with pytest.warns(UserWarning, match=r"1 tensor\(s\) .*: model\.c\.weight; stored exactly"):
            assert dsq_ckpt.save(state, tmp_path / str(number)).depth == number
        with Checkpoint(tmp_path / str(number)) as checkpoint:
            assert set(checkpoint.manifest.groups) == {"weights/linear"}
            assert checkpoint.manifest.groups["weights/linear"].delta == (number > 0)
