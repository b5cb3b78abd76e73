"""Tensors beside one that has collapsed to almost nothing, by which the common scale of a group falls."""

from __future__ import annotations

import pytest
import torch

import dsq_ckpt
from tests.helpers.states import relative_error


def moments(weights, known):
    def moments_of(weight, seed):
        generator = torch.Generator().manual_seed(seed)
        squares = torch.rand(weight.shape, generator=generator) * 1e-3 if known else torch.zeros(weight.shape)
        return {"exp_avg": torch.zeros(weight.shape), "exp_avg_sq": squares, "step": torch.tensor(3.0)}

    return {name: moments_of(weight, seed) for seed, (name, weight) in enumerate(weights.items())}


@pytest.mark.parametrize("tiny", [1e-12, 1e-20, 1e-24, 1e-30])
@pytest.mark.parametrize("step, most", [(0.1, 0.03), (0.5, 0.1)])
def test_a_new_layer_is_resolved_in_a_delta(tmp_path, tiny, step, most):
    """A layer without gradients yet is scaled by others; 97 % of one were lost, without a word."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    old = {
        "embed.weight": normal(150, 40) * tiny, "conv.weight": normal(13, 12, 6, 6) * 0.02,
        "last.weight": normal(64, 80) * 30,
    }
    first = {**old, "middle.weight": normal(72, 72)}
    new = {"middle.weight": normal(73, 72), "average": normal(13, 12, 6, 6) * 0.02}
    config = {"quantize": {"weights": {"codebook": {"fit": "lattice", "step": step}, "refinement_bits": 0}}}
    dsq_ckpt.save(
        {"model": first, "optimizer": {"state": moments(first, True)}}, tmp_path / "0", config=config,
    )
    state = moments(old, True) | moments({"middle.weight": new["middle.weight"]}, False)
    result = dsq_ckpt.save(
        {"model": {**old, **new}, "optimizer": {"state": state}}, tmp_path / "1", config=config,
    )
    assert not result.keyframe
    target = {"model": {name: torch.zeros_like(weight) for name, weight in new.items()}}
    dsq_ckpt.load(target, tmp_path / "1")
    for name, weight in new.items():
        assert relative_error(weight, target["model"][name]) < most, name
