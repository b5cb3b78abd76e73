"""Errors of a group as reported by a checkpoint, compared with those of a load."""

from __future__ import annotations

import pytest
import torch

import dsq_ckpt
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.reading import read_checkpoint
from tests.helpers.states import relative_error


def total_error(wanted, loaded):
    return relative_error(
        torch.cat([tensor.view(-1) for tensor in wanted]), torch.cat([tensor.view(-1) for tensor in loaded])
    )


@pytest.mark.parametrize("sizes, gradients", [
    ((1.0, 1.0, 1.0), (1.0, 0.2, 0.03)),  # steps of the last are four times those of the first
    ((1.0, 0.3, 3.0), (1.0, 0.2, 0.03)), ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)), ((1.0, 30.0, 1.0), (0.1, 1.0, 0.1)),
])
@pytest.mark.parametrize("delta", [False, True])
def test_of_weights_they_are_those_of_plain_values(tmp_path, sizes, gradients, delta):
    """They were those of values whose scales had been taken out: 9.9 % where 19.5 % were lost."""
    generator = torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(75, 80, generator=generator)

    names = [f"layer{number}.weight" for number in range(3)]
    weights = {name: 0.1 * size * normal() for name, size in zip(names, sizes, strict=True)}
    moments = {
        name: {"exp_avg": 1e-3 * size * normal(), "exp_avg_sq": 1e-5 * size**2 * normal().square()}
        for name, size in zip(names, gradients, strict=True)
    }
    for step in range(1 + delta):
        for weight in weights.values():
            weight += 0.02 * step * weight.std() * normal()
        dsq_ckpt.save({"model": weights, "optimizer": {"state": moments}}, tmp_path / str(step))
    told = Manifest.read(path := tmp_path / str(step)).groups["weights/linear"]
    for refinement, error in ((False, told.relative_error), (True, told.refined_error)):
        loaded = read_checkpoint(path, refinement=refinement)["model"]
        assert error == pytest.approx(total_error(weights.values(), [loaded[name] for name in names]), rel=0.2)
    assert told.worst_error == pytest.approx(max(relative_error(weights[n], loaded[n]) for n in names), rel=0.3)
