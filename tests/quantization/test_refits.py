"""Deltas are not given up for a refit that would change nothing."""

from __future__ import annotations

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest


def embedding(generator):
    """A table most of whose rows are far smaller than the others, as of tokens that never occur."""
    table = torch.randn(400, 64, generator=generator)
    table[40:] *= 1e-3
    return table


def heavy_tailed(generator):
    return torch.randn(160, 80, generator=generator) ** 5


def sparse(generator):
    mask = torch.rand(160, 80, generator=generator) < 0.02
    return torch.where(mask, torch.randn(160, 80, generator=generator), 1e-3)


@pytest.mark.parametrize("make", [embedding, heavy_tailed, sparse])
@pytest.mark.parametrize("step", [0.5, 4.0, 16.0])
def test_where_steps_are_coarse_a_delta_is_one(tmp_path, make, step):
    """A part of some tensors lies below what such steps resolve, whatever they are fitted to."""
    generator = torch.Generator().manual_seed(0)
    names = ("a.weight", "b.weight")
    weights = {"a.weight": make(generator), "b.weight": torch.randn(96, 96, generator=generator)}
    config = {"quantize": {"weights": {"codebook": {"fit": "lattice", "step": step}}}}
    for number in range(4):
        moments = {
            name: {"exp_avg": torch.zeros(weights[name].shape), "exp_avg_sq": torch.full(weights[name].shape, 1e-6)}
            for name in names
        }
        dsq_ckpt.save({"model": weights, "optimizer": {"state": moments}}, tmp_path / str(number), config=config)
        for name in names:
            weights[name] = weights[name] * (1 + 0.001 * torch.randn(weights[name].shape, generator=generator))
        groups = Manifest.read(tmp_path / str(number)).groups
        for name, group in groups.items():
            if name.startswith("weights/") and group.bits_per_element > 0.01:
                assert group.delta == (number > 0), (number, name)
