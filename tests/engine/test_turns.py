"""Trainings of one architecture, saved in one directory by turns or one after the other, know nothing of each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import load_copy, read_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing in common")


@pytest.mark.parametrize("way", ["save", "Compressor", "Compressor, a module named opt"])
def test_moments_of_another_training_are_not_taken_for_renewed_ones(tmp_path: Path, way: str) -> None:
    """Both are restored every third time; between that, few steps renew little of their momentum."""
    trainings = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.99)
        tree = nn.ModuleDict({"opt": model}) if way.endswith("opt") else model
        trainings.append((model, optimizer, dsq_ckpt.Compressor(tree, optimizer)))
    for number in range(7):
        for turn, (model, optimizer, compressor) in enumerate(trainings):
            for _ in range(3):
                optimizer.zero_grad()
                (model(torch.randn(16, 96)) - 1).square().mean().backward()
                optimizer.step()
            path, state = tmp_path / f"{turn}-{number}", {"model": model, "optimizer": optimizer}
            if way != "save":
                compressor.save(path)
            else:
                dsq_ckpt.save(state, path)
            if number > 2:
                bits = {name: count for name, count in read_bits(path).items() if "momentum" in name}
                assert len(bits) == 2 and set(bits.values()) == {8}, (turn, number)
            if number % 3 == 2 and way != "save":
                compressor.load(path)
            elif number % 3 == 2:
                dsq_ckpt.load(state, path)


@pytest.mark.parametrize("turns", [False, True], ids=["one after the other", "by turns"])
@pytest.mark.parametrize("alike", [False, True], ids=["only frozen layers in doubt", "all layers in doubt"])
def test_frozen_layers_of_another_training_are_not_taken_for_changed_ones(
    tmp_path: Path, turns: bool, alike: bool
) -> None:
    """In each checkpoint, without a model; numbers tell the layers of the optimizer by their shapes alone."""
    models, optimizers = list[nn.Sequential](), list[torch.optim.Optimizer]()
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 80 if alike else 64)))
        optimizers.append(torch.optim.AdamW(models[-1][2].parameters(), 1e-3))
    order = [(fold, number) for fold in range(3) for number in range(3)]
    for fold, number in sorted(order, key=lambda pair: pair[::-1]) if turns else order:
        for _ in range(3):
            optimizers[fold].zero_grad()
            models[fold](torch.randn(32, 80)).square().mean().backward()
            optimizers[fold].step()
        path = tmp_path / f"{fold}-{number}"
        weights = models[fold].state_dict()
        dsq_ckpt.save({"model": weights, "optimizer": optimizers[fold].state_dict()}, path)
        loaded = load_copy(path, {"model": weights}, history=dsq_ckpt.SaveHistory())["model"]
        assert loaded["0.weight"].equal(weights["0.weight"]), (fold, number)


def test_a_rollback_knows_what_was_seen_to_change(tmp_path: Path) -> None:
    """The average of the weights in training is lossy from the second checkpoint on."""
    torch.manual_seed(0)
    model, average = nn.Linear(80, 80), nn.Linear(80, 80)
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number in range(5):
        optimizer.zero_grad()
        model(torch.randn(32, 80)).square().mean().backward()
        optimizer.step()
        average.weight.data.lerp_(model.weight.data, 0.5)
        state = {"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
        dsq_ckpt.save(state, tmp_path / str(number))
        loaded = load_copy(tmp_path / str(number), state, history=dsq_ckpt.SaveHistory())
        assert loaded["average"]["weight"].equal(average.weight) is (number == 0), number
        if number == 3:
            dsq_ckpt.load({}, tmp_path / "1")


@pytest.mark.parametrize("given", [False, True], ids=["state dicts", "Compressor"])
def test_data_that_changes_beside_a_small_model_is_of_no_other_training(tmp_path: Path, given: bool) -> None:
    """A replay buffer is overwritten between two saves, and no other tensor is large enough to tell."""
    model = nn.Linear(48, 48)
    optimizer = torch.optim.Adam(model.parameters())
    compressor = dsq_ckpt.Compressor(model, optimizer)
    for number in range(4):
        model(torch.randn(8, 48)).square().mean().backward()
        optimizer.step()
        replay, path = torch.randn(300, 128), tmp_path / str(number)
        if given:
            compressor.save(path, extra={"replay": replay})
        else:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "replay": replay}
            dsq_ckpt.save(state, path)
        assert Manifest.read(path).previous_name == (f"{number - 1}" if number else None)
    assert read_bits(path)["replay"], "it is lossy once it has changed"
