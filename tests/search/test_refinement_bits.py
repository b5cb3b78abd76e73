"""Refinement bits of searches: as many as the bound needs, and more only while weights lie where a restore put them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.dcp import reader
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.states import read_bits
from tests.helpers.training import compute_loss, train_model


class Run:
    """Saves of two layers by a search whose metric makes progress, and to which all of the weights matter."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.saves, self.part = directory, 0, 0.0
        self.generator = torch.Generator().manual_seed(0)
        self.model = nn.ModuleDict({"layer": nn.Linear(256, 200, bias=False), "table": nn.Embedding(200, 256)})
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.02, generator=self.generator)
        self.exact = self.copy_state()
        optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.compressor = dsq_ckpt.Compressor(self.model, optimizer, evaluate=self.evaluate)

    def copy_state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def evaluate(self) -> float:
        squares = ((tensor - self.exact[name]).square().sum() for name, tensor in self.model.state_dict().items())
        return 10 - self.saves + float(sum(squares)) / 2

    def save(self, noise: float = 0.0, table: float | None = None) -> tuple[int, int]:
        """Move the layer and the table by noise, in parts of 4 bits, and save them; returns the refinement bits."""
        with torch.no_grad():
            for name, size in (("layer", noise), ("table", noise if table is None else table)):
                weight = self.model[name].weight
                weight += size * self.part * torch.randn(weight.shape, generator=self.generator)
        self.exact, path = self.copy_state(), self.directory / str(self.saves)
        self.compressor.save(path)
        self.saves += 1
        if not self.part:
            error = self.read()["layer.weight"] - self.exact["layer.weight"]
            self.part = 12**0.5 * float(error.square().mean().sqrt())
        bits = read_bits(path)
        return bits["model.layer.weight"], bits["model.table.weight"]

    def read(self) -> dict[str, torch.Tensor]:
        """Return the weights of the newest checkpoint, by a load that is not recorded."""
        state = self.copy_state()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "record_load", lambda kinds: None)
            path, history = self.directory / str(self.saves - 1), dsq_ckpt.SaveHistory()
            dsq_ckpt.load({"model": state}, path, history=history)
        return state

    def load(self) -> None:
        self.compressor.load(self.directory / str(self.saves - 1))


def test_weights_that_were_not_restored_have_the_bits_that_are_asked_for(tmp_path: Path) -> None:
    """Also where their density bends within parts, here by noise that nearly spreads what a load has put."""
    run = Run(tmp_path)
    assert run.save() == (4, 4)
    run.model.load_state_dict(run.read())
    assert run.save(0.38) == (4, 4)


def test_weights_of_a_load_that_was_not_recorded_take_all_bits(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.save() == (4, 4)
    run.model.load_state_dict(run.read())
    assert run.save(0.1) == (8, 8)
    run.model.load_state_dict(run.read())
    assert run.save(0.3, table=0.1) == (8, 8)  # the limit is lower after a load that was found
    assert run.save(2) == (4, 4)


@pytest.mark.parametrize("again", [False, True], ids=["saved", "saved and loaded again"])
def test_bits_after_a_restore_are_for_restored_weights_alone(tmp_path: Path, again: bool) -> None:
    """Once training has spread the weights, their number is that of a run without a restore."""
    run = Run(tmp_path)
    assert run.save() == run.save(2) == (4, 4)
    for _ in range(2):
        run.load()
        assert run.save(0.1) == (8, 8)
        if again:
            run.load()
    assert run.save(2) == run.save(2) == (4, 4)


def test_a_layer_that_rests_after_a_restore_takes_all_bits_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.save() == (4, 4)
    run.load()
    assert run.save(2, table=0) == run.save(2, table=0) == (4, 8)
    quality = run.compressor.quality
    assert quality is not None
    assert (quality["refinement_bits"], quality["restored_weights"]) == (4, "8 bits for weights/embedding")
    assert run.save(2) == (4, 4)


@pytest.mark.parametrize("fails", [False, True], ids=["search", "fallback"])
@pytest.mark.parametrize("weights, group, expected", [
    (0, 8, (0, 8)), (0, 3, (0, 3)), (4, 8, (4, 8)), (4, 6, (4, 6)), (4, 2, (4, 4)),
])
def test_a_group_keeps_the_bits_that_it_asks_for(
    tmp_path: Path, fails: bool, weights: int, group: int, expected: tuple[int, int]
) -> None:
    """The weights' own bits replaced them, so a restore was coarser than its manifest said."""
    model, optimizer = train_model(60)
    config = {"quantize": {
        "weights": {"refinement_bits": weights}, "rules": [{"pattern": "*hidden.weight", "group": "first.part"}],
        "groups": {"first.part": {"refinement_bits": group}},
    }, "search": {"floor": 0.1}}

    def evaluate() -> float:
        return 1 / 0 if fails else compute_loss(model)

    compressor = dsq_ckpt.Compressor(model, optimizer, config, evaluate)
    if fails:
        expected = (8, 8) if weights else expected
        with pytest.warns(UserWarning, match="most conservative configuration"):
            compressor.save(tmp_path / "a")
    else:
        compressor.save(tmp_path / "a")
    bits, stored = read_bits(tmp_path / "a"), Manifest.read(tmp_path / "a").config["quantize"]
    assert (bits["model.head.weight"], bits["model.hidden.weight"]) == expected
    assert (stored["weights"]["refinement_bits"], stored["groups"]["first.part"]["refinement_bits"]) == expected
