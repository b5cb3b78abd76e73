"""The bound on the error of the next update holds for each tensor of a group."""

from __future__ import annotations

import pytest
import torch

import dsq_ckpt
from tests.helpers.adam_moments import error, moments, update
from tests.quantization.test_moments import restored, state


@pytest.mark.parametrize("second", [1.0, 2.0**-6])
def test_each_tensor_keeps_the_bound(tmp_path, second) -> None:
    """Updates of one tensor are larger than those of another of its group, as of a layer that was just unfrozen.

    They once used up the error that both may have together: the smaller ones were 80 % off.
    """
    factors = {"noise": 1.0, "twice": 2.0, "eight": 8.0, "little": 2.0**-10}
    original = {"state": {name: moments(seed=seed) for seed, name in enumerate(factors)}}
    for name, factor in factors.items():
        original["state"][name]["exp_avg"] *= factor
    for number in range(2):  # alone, and with sizes that changed since the parent
        dsq_ckpt.save(original, tmp_path / str(number))
        got = {"state": {name: {k: v + 1 for k, v in part.items()} for name, part in original["state"].items()}}
        dsq_ckpt.load(got, tmp_path / str(number))
        for name, part in original["state"].items():
            assert error(update(part), update(got["state"][name])) < 0.3, (number, name)
        original["state"]["noise"]["exp_avg"] *= second
        original["state"]["twice"]["exp_avg"] /= 4


@pytest.mark.parametrize("kept", [0.3, 0.1, 0.03])
@pytest.mark.parametrize("kind", ["update", "relative"])
def test_a_dense_tensor_beside_sparse_ones(tmp_path, kept, kind) -> None:
    """Few elements of most tensors have gradients, as of pruned layers and of a table whose rows are rarely used.

    Scaled by all elements, with zeros, these had large values, which alone decided how coarse parts could be: all first
    moments of the dense tensor came back as zeros.
    """
    generator = torch.Generator().manual_seed(0)
    original = {"state": {name: moments(seed=seed) for seed, name in enumerate(["dense", *map(str, range(15))])}}
    for name, part in original["state"].items():
        if name != "dense":
            mask = torch.rand(part["exp_avg"].shape, generator=generator) < kept
            part["exp_avg"] *= mask
            part["exp_avg_sq"] *= mask
    if kind == "relative":
        original["state"] = {
            name: {"momentum_buffer": torch.randn(64, 96, generator=generator) * (part["exp_avg"] != 0)}
            for name, part in original["state"].items()
        }
    for number in range(2):
        dsq_ckpt.save(original, tmp_path / str(number))
        got = {"state": {name: {k: v + 1 for k, v in part.items()} for name, part in original["state"].items()}}
        dsq_ckpt.load(got, tmp_path / str(number), history=dsq_ckpt.SaveHistory())
        for name, part in original["state"].items():
            expected, loaded = part, got["state"][name]
            if kind == "relative":
                assert error(expected["momentum_buffer"], loaded["momentum_buffer"]) < 0.3, (number, name)
                continue
            used = part["exp_avg_sq"] > 0
            assert not loaded["exp_avg"][~used].any()
            assert error(update(expected)[used], update(loaded)[used]) < 0.3, (number, name)


@pytest.mark.parametrize("factor", [0.6, 0.8, 1.25, 1.6])
def test_a_delta_keeps_the_bound_of_a_tensor_whose_size_changes(tmp_path, factor) -> None:
    """Cells kept the width that they had at the keyframe until the size had changed by three quarters of an octave."""
    original = {"state": {name: moments(seed=seed) for seed, name in enumerate("abc")}}
    for number in range(5):
        dsq_ckpt.save(original, tmp_path / str(number))
        got = {"state": {name: {k: v + 1 for k, v in part.items()} for name, part in original["state"].items()}}
        dsq_ckpt.load(got, tmp_path / str(number), history=dsq_ckpt.SaveHistory())
        for name, part in original["state"].items():
            assert error(update(part), update(got["state"][name])) < 0.27, (number, name)
        original["state"]["a"]["exp_avg"] *= factor


def test_second_moments_of_zero_leave_the_other_updates_as_they_are(tmp_path) -> None:
    original = state()
    part = original["state"]["w"]
    part["exp_avg_sq"][::8] = 0
    part["exp_avg"][::8] = 1e-3
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    got = restored(tmp_path / "run" / "0", original)
    assert error(part["exp_avg"][::8], got["exp_avg"][::8]) < 0.01
    rest = part["exp_avg_sq"] > 0
    assert error(update(part)[rest], update(got)[rest]) < 0.3
