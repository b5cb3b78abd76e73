"""The argument `refinement` of all that reads a checkpoint."""

import numpy as np
import pytest
import torch

import dsq_ckpt
from dsq_ckpt.convert.export import export_torch
from dsq_ckpt.errors import CheckpointNotFound, ConfigError
from tests.helpers.reading import read_checkpoint

EXACT = {"quantize": {"weights": {"method": "exact"}}}


@pytest.fixture
def weights():
    return {"model": {"weight": torch.randn(64, 96, generator=torch.Generator().manual_seed(0))}}


@pytest.mark.parametrize("asked", [1, 0, "base", "required", None, np.True_])
def test_other_values_are_refused(weights, tmp_path, asked):
    """1 and "base" were taken for "auto": a base layer came back where the refinement had been asked for."""
    dsq_ckpt.save(weights, tmp_path / "one")
    for read in (
        lambda: dsq_ckpt.load(weights, tmp_path / "one", refinement=asked),
        lambda: read_checkpoint(tmp_path / "one", refinement=asked),
        lambda: export_torch(tmp_path / "one", tmp_path / "one.pt", refinement=asked),
    ):
        with pytest.raises(ConfigError, match="expected True, False"):
            read()
    assert not (tmp_path / "one.pt").exists()


def test_exact_tensors_need_no_refinement(weights, tmp_path):
    dsq_ckpt.save(weights, tmp_path / "exact", config=EXACT)
    loaded = read_checkpoint(tmp_path / "exact", refinement=True)
    assert torch.equal(loaded["model"]["weight"], weights["model"]["weight"])


def test_lossy_tensors_saved_without_are_told_apart(weights, tmp_path):
    """By loads and exports alike, and not as a layer that was dropped."""
    dsq_ckpt.save(weights, tmp_path / "base", config={"quantize": {"weights": {"refinement_bits": 0}}})
    for read in (
        lambda: dsq_ckpt.load(weights, tmp_path / "base", refinement=True),
        lambda: read_checkpoint(tmp_path / "base", refinement=True),
    ):
        with pytest.raises(CheckpointNotFound, match="was saved without one"):
            read()
