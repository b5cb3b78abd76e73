"""The mean of second moments over what they are decoded to: 1 in each chunk, so that no step is too long as a rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsq_ckpt
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.quantization.moments import ratios, ratios_on_device
from dsq_ckpt.storage.checkpoint import Checkpoint

SHAPES = {"rows": (64, 96), "more_rows": (96, 64), "columns": (4096, 1), "flat": (5000,), "images": (40, 8, 5, 5)}


def squares(seed: int, growth: float) -> dict[str, torch.Tensor]:
    """Second moments of several layouts, each with a size and a distribution of its own: their levels are shared."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (2.0 ** (-20 + 3.3 * place)) * growth * torch.rand(shape, generator=generator) ** (4 / (1 + place))
        for place, (name, shape) in enumerate(SHAPES.items())
    }


def state(seed: int, growth: float = 1.0) -> dict:
    return {"state": {name: {"exp_avg_sq": v} for name, v in squares(seed, growth).items()}}


def assert_means_are_one(saved: dict, path, **options) -> None:
    for name, part in saved["state"].items():
        v = part["exp_avg_sq"]
        empty = {"state": {name: {"exp_avg_sq": torch.full_like(v, torch.nan)}}}
        dsq_ckpt.load(empty, path, **options)
        got = empty["state"][name]["exp_avg_sq"]
        mean = (v[got > 0].double() / got[got > 0].double()).mean()
        assert abs(mean - 1) < 3e-4, (name, mean)


@pytest.mark.parametrize("asynchronous", [False, "quantize", "copy"])
def test_the_mean_is_one_along_a_chain(tmp_path, asynchronous) -> None:
    """Values that shrink and grow as a whole would leave codes behind that are a tenth of an octave wrong together."""
    for step, growth in enumerate((1.0, 0.93, 0.86, 1.09)):
        saved, path = state(0, growth), tmp_path / "run" / str(step)
        if asynchronous:
            dsq_ckpt.async_save(saved, path, config={"storage": {"stage": asynchronous}}).result()
        else:
            dsq_ckpt.save(saved, path)
        assert_means_are_one(saved, path)


def test_without_the_mean_it_is_not(tmp_path) -> None:
    """The codes alone are far enough off for the guarantee to be tested above."""
    for step, growth in enumerate((1.0, 1.09)):
        saved = state(0, growth)
        dsq_ckpt.save(saved, tmp_path / "run" / str(step))
    found = []
    with Checkpoint(tmp_path / "run" / "1") as checkpoint, Workers(1, 1 << 20) as workers:
        for name, shape in SHAPES.items():
            ref = checkpoint.find(f"state.{name}.exp_avg_sq", (0,) * len(shape))
            checkpoint.record(ref).pop("shift", None)
            got, v = checkpoint.tensor(ref, True, workers), saved["state"][name]["exp_avg_sq"]
            found.append(float((v[got > 0] / got[got > 0]).mean()))
    assert max(abs(mean - 1) for mean in found) > 0.001, found


def test_blocks_and_threads_change_nothing(tmp_path) -> None:
    """The sum is over blocks in their order; a second tensor of the group makes the mean of one other than 1."""
    generator = torch.Generator().manual_seed(1)
    saved = {"state": {
        "a": {"exp_avg_sq": torch.rand(300, 700, generator=generator) ** 3},
        "b": {"exp_avg_sq": torch.rand(300, 700, generator=generator) + 1},
    }}
    shifts = []
    for threads in (1, 4):
        path = tmp_path / str(threads)
        dsq_ckpt.save(saved, path, config={"storage": {"threads": threads, "block_elements": 1 << 14}})
        with Checkpoint(path) as checkpoint:
            shifts.append([checkpoint.record(checkpoint.find(f"state.{name}.exp_avg_sq", (0, 0))).get("shift")
                           for name in "ab"])
    assert shifts[0] == shifts[1] != [None, None]
    assert_means_are_one(saved, path)


@given(st.integers(0, 2**32 - 1), st.integers(1, 255), st.integers(0, 300))
def test_ratios_are_those_of_numpy(seed: int, levels: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    book = np.append(0.0, np.sort(np.exp2(rng.uniform(-60, 60, levels - 1))))
    codes = rng.integers(0, min(256, levels + 1), n).astype(np.uint8)
    values = np.exp2(rng.uniform(-60, 60, n)).astype(np.float32)
    kept = (codes > 0) & (codes < levels)
    total, count = ratios(values, codes, book)
    assert count == kept.sum()
    assert total == pytest.approx((values[kept] / book[codes[kept]]).sum(), rel=1e-12)
    there = ratios_on_device(torch.from_numpy(values), torch.from_numpy(codes), book).tolist()
    assert there == [pytest.approx(total, rel=1e-12), count]


def test_values_that_are_protected_or_pruned_do_not_count() -> None:
    values = np.float32([np.inf, np.nan, 3.0, 3.0])
    assert ratios(values, np.uint8([0, 3, 1, 2]), np.array([0.0, 2.0, 4.0])) == (2.25, 2)
    assert ratios(values[:2], np.uint8([0, 3]), np.array([0.0, 2.0, 4.0])) == (0.0, 0)


@pytest.mark.parametrize("wrong", ["1", None, True, 101, -101.5, [0.1]])
def test_a_shift_that_is_none_is_refused(tmp_path, wrong) -> None:
    dsq_ckpt.save(state(0), tmp_path / "0")
    with Checkpoint(tmp_path / "0") as checkpoint, Workers(1, 1 << 20) as workers:
        ref = checkpoint.find("state.rows.exp_avg_sq", (0, 0))
        checkpoint.record(ref)["shift"] = wrong
        with pytest.raises(dsq_ckpt.CorruptCheckpoint, match=r"state\.rows\.exp_avg_sq' has the shift"):
            checkpoint.tensor(ref, True, workers)
