"""Trainings of one architecture in one process and directory keep the refinement of their newest checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.engine.related_weights import are_codes_related
from dsq_ckpt.quantization import device
from dsq_ckpt.quantization.device import transfer
from dsq_ckpt.storage.manifest import Manifest

KEPT = 3


def training(seed: int) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        data = torch.randn(64, 64)
        optimizer.zero_grad()
        (model(data) - data.roll(1, 1)).square().mean().backward()
        optimizer.step()


def refined_numbers(run: Path, name: str) -> list[int]:
    return [number for number in range(5) if Manifest.read(run / f"{name}-{number}").refinement == "kept"]


@pytest.mark.parametrize("turns, stage", [(False, None), (True, None), (False, "copy"), (False, "quantize")])
def test_each_training_keeps_its_newest_refinement(tmp_path: Path, turns: bool, stage: str | None) -> None:
    """One training after the other, or by turns."""
    order = [(fold, number) for fold in range(3) for number in range(5)]
    trainings = [training(fold) for fold in range(3)]
    with pytest.warns(UserWarning, match="nothing in common with those of .*SaveHistory") as caught:
        for fold, number in sorted(order, key=lambda pair: pair[::-1]) if turns else order:
            step(*trainings[fold])
            model, optimizer = trainings[fold]
            state, path = {"model": model, "optimizer": optimizer}, tmp_path / f"fold{fold}-{number}"
            if stage is None:
                dsq_ckpt.save(state, path)
            else:
                dsq_ckpt.async_save(state, path, config={"storage": {"stage": stage}}).result()
    assert sum("nothing in common" in str(warning.message) for warning in caught) == 1
    for fold in range(3):
        assert refined_numbers(tmp_path, f"fold{fold}")[-KEPT:] == [2, 3, 4]
    if not turns:
        assert all(refined_numbers(tmp_path, f"fold{fold}") == [2, 3, 4] for fold in range(3))
    loaded = training(9)
    for fold, (model, _) in enumerate(trainings):
        dsq_ckpt.load({"model": loaded[0], "optimizer": loaded[1]}, tmp_path / f"fold{fold}-4")
        got, expected = loaded[0].state_dict()["0.weight"], model.state_dict()["0.weight"]
        lost = (got - expected).norm() / expected.norm()
        assert lost < 0.02


def test_one_training_is_one_whatever_it_does(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Large steps, a keyframe in between, a new optimizer, a rollback: it is the same training still."""
    model, optimizer = training(0)
    for number in range(5):
        step(model, optimizer)
        if number == 3:
            model, optimizer = training(9)
            dsq_ckpt.load({"model": model}, tmp_path / "run-2")
            optimizer.param_groups[0]["lr"] = 1e-2
            step(model, optimizer)
        parent = None if number == 2 else "auto"
        dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / f"run-{number}", parent=parent)
    assert refined_numbers(tmp_path, "run") == [2, 3, 4]
    assert not any("in common" in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize("searched", [False, True], ids=["async_save", "a search"])
def test_one_training_is_one_while_its_codes_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, searched: bool
) -> None:
    """Codes made on a device arrive on the host when the training thread has gone on; none is looked at before."""
    submit = transfer.Transfer.submit

    def late(self: transfer.Transfer, size: int, work: Any) -> Any:
        return submit(self, size, lambda: (time.sleep(0.05), work())[1])

    monkeypatch.setattr(transfer.Transfer, "submit", late)
    monkeypatch.setattr(device, "DEVICES", {"cpu"})
    monkeypatch.setattr(device, "HOST_BELOW", 0)
    model, optimizer = training(0)
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: float(model[0].weight.square().mean()))
    for number in range(5):
        step(model, optimizer)
        path = tmp_path / f"run-{number}"
        if searched:
            compressor.save(path)
        else:
            state = {"model": model, "optimizer": optimizer}
            dsq_ckpt.async_save(state, path, config={"storage": {"stage": "quantize"}}).result()
    assert refined_numbers(tmp_path, "run") == [2, 3, 4]
    assert not any("in common" in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize("levels", [2, 3, 16, 256])
def test_codes_by_chance_are_not_related(levels: int) -> None:
    generator = np.random.default_rng(levels)
    for number in range(50):
        size = int(generator.integers(4096, 20000))
        one, other = (np.minimum(generator.geometric(0.3, size), levels).astype(np.uint8) - 1 for _ in range(2))
        if number % 2:
            other = generator.permutation(one)
        assert are_codes_related(one, other) is False, number


@pytest.mark.parametrize("levels", [2, 3, 16, 256])
def test_codes_that_changed_are_related(levels: int) -> None:
    """A fifth of the codes stays, in other names as those of another codebook."""
    generator = np.random.default_rng(levels)
    for number in range(25):
        size = int(generator.integers(4096, 20000))
        one, other = (np.minimum(generator.geometric(0.3, size), levels).astype(np.uint8) - 1 for _ in range(2))
        same = generator.random(size) < 0.2
        other[same] = one[same]
        assert are_codes_related(one, generator.permutation(256).astype(np.uint8)[other]) is True, number


@pytest.mark.parametrize("levels", [8, 64, 255])
def test_codes_of_fine_steps_are_related_where_their_values_are(levels: int) -> None:
    """Chance tells much of codes with many levels already."""
    generator = np.random.default_rng(levels)
    for likeness in (0.8, 0.95, 0.999):
        one = generator.standard_normal(8192)
        other = likeness * one + (1 - likeness**2) ** 0.5 * generator.standard_normal(8192)
        codes = [
            np.searchsorted(np.quantile(values, np.linspace(0, 1, levels + 1)[1:-1]), values).astype(np.uint8)
            for values in (one, other)
        ]
        assert are_codes_related(codes[0], codes[1]) is True, likeness


def test_few_values_among_zeros_tell_nothing() -> None:
    generator = np.random.default_rng(0)
    for number in (1, 5, 50):
        codes = np.zeros((2, 4096), np.uint8)
        codes[0, generator.choice(4096, number)] = codes[1, generator.choice(4096, 500)] = 1
        assert are_codes_related(codes[0], codes[1]) is None and are_codes_related(codes[1], codes[0]) is None


def test_one_training_of_fine_steps_and_of_few_values_is_one(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model, optimizer = training(0)
    sparse = torch.zeros(256, 256)
    sparse.view(-1)[:: 65536 // 60] = torch.randn(61)
    for number in range(4):
        step(model, optimizer)
        sparse[sparse != 0] += 0.01
        dsq_ckpt.save({"w": sparse.clone()}, tmp_path / "sparse" / str(number))
        dsq_ckpt.save(
            {"model": model}, tmp_path / "fine" / str(number),
            config={"quantize": {"weights": {"codebook": {"fit": "kmeans", "bins": 254}}}},
        )
    assert not any("in common" in str(warning.message) for warning in recwarn)
    assert all(Manifest.read(tmp_path / run / "1").previous for run in ("sparse", "fine"))


def test_few_or_constant_codes_have_no_verdict() -> None:
    codes = np.zeros(4096, np.uint8)
    assert are_codes_related(codes, codes) is None  # zeros say nothing
    assert are_codes_related(codes[:100], codes[:100]) is None
    assert are_codes_related(codes, np.zeros(5000, np.uint8)) is None
