"""Refinement bits of searches: as many as the bound needs, and more only while weights lie where a restore put them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.dcp import reader


class Run:
    """Saves of one layer by a search whose metric makes progress, and to which all of the weights matter."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.saves, self.part = directory, 0, 0.0
        self.generator = torch.Generator().manual_seed(0)
        self.model = nn.Linear(256, 200, bias=False)
        nn.init.normal_(self.model.weight, std=0.02, generator=self.generator)
        self.exact = self.model.weight.detach().clone()
        optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.compressor = dsq_ckpt.Compressor(self.model, optimizer, evaluate=self.evaluate)

    def evaluate(self) -> float:
        return 10 - self.saves + float((self.model.weight.detach() - self.exact).square().sum())

    def save(self, noise: float = 0.0) -> int:
        """Move weights by noise, in parts of 4 bits, and save them; returns the refinement bits."""
        with torch.no_grad():
            self.model.weight += noise * self.part * torch.randn(self.exact.shape, generator=self.generator)
        self.exact = self.model.weight.detach().clone()
        self.compressor.save(self.directory / str(self.saves))
        self.saves += 1
        assert self.compressor.quality is not None
        bits: int = self.compressor.quality["refinement_bits"]
        if not self.part:
            error = self.read() - self.exact
            self.part = 12**0.5 * float(error.square().mean().sqrt())
        return bits

    def read(self) -> torch.Tensor:
        """Return the weight of the newest checkpoint, by a load that is not recorded."""
        weight = torch.empty_like(self.exact)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "record_load", lambda kinds: None)
            path, history = self.directory / str(self.saves - 1), dsq_ckpt.SaveHistory()
            dsq_ckpt.load({"model": {"weight": weight}}, path, history=history)
        return weight

    def load(self) -> None:
        self.compressor.load(self.directory / str(self.saves - 1))


def test_weights_that_were_not_restored_have_the_bits_that_are_asked_for(tmp_path: Path) -> None:
    """Also where their density bends within parts, here by noise that nearly spreads what a load has put."""
    run = Run(tmp_path)
    assert run.save() == 4
    run.model.load_state_dict({"weight": run.read()})
    assert run.save(0.38) == 4


def test_weights_of_a_load_that_was_not_recorded_take_all_bits(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.save() == 4
    run.model.load_state_dict({"weight": run.read()})
    assert run.save(0.1) == 8
    assert run.save(2) == 4


@pytest.mark.parametrize("again", [False, True], ids=["saved", "saved and loaded again"])
def test_bits_after_a_restore_are_for_restored_weights_alone(tmp_path: Path, again: bool) -> None:
    """Once training has spread the weights, their number is that of a run without a restore."""
    run = Run(tmp_path)
    assert run.save() == run.save(2) == 4
    for _ in range(2):
        run.load()
        assert run.save(0.1) == 8
        if again:  # a search that resumes reads the bits of that save
            run.load()
    assert run.save(2) == run.save(2) == 4
