"""Steps of tensors along a chain: by the size of their gradients, which changes."""

from __future__ import annotations

import torch

import dsq_ckpt
from dsq_ckpt.storage.checkpoint import Checkpoint

NAMES = tuple(f"{letter}.weight" for letter in "abcdefghijkl")


def state(growth: dict[str, float]) -> dict:
    """Weights with the state of Adam; second moments have grown by factors."""
    generator = torch.Generator().manual_seed(0)
    model = {name: torch.randn(96, 128, generator=generator) / 10 for name in NAMES}
    moments = {
        name: {
            "exp_avg": torch.randn(96, 128, generator=generator) * 1e-4 * growth.get(name, 1.0) ** 0.5,
            "exp_avg_sq": torch.rand(96, 128, generator=generator) * 1e-6 * growth.get(name, 1.0),
        }
        for name in NAMES
    }
    return {"model": model, "optimizer": {"state": moments}}


def exponents(path) -> dict[str, float]:
    with Checkpoint(path) as checkpoint:
        return {name: checkpoint.index["exponents"].get(f"model.{name}", 0.0) for name in NAMES}


def test_a_step_changes_for_the_tensor_whose_gradients_did(tmp_path) -> None:
    """If one was corrected, those of all tensors of its group were, and their codes chosen anew."""
    factors = [{}, {"b.weight": 4.0}, {"a.weight": 2.0**8, "b.weight": 4.0}]
    found = []
    for number, growth in enumerate(factors):
        dsq_ckpt.save(state(growth), tmp_path / str(number))
        found.append(exponents(tmp_path / str(number)))
    first, second, third = found
    assert second == first, "gradients twice as large are no reason yet"
    changed = {name for name in NAMES if third[name] != first[name]}
    assert changed == {"a.weight"}, (first, third)

    dsq_ckpt.save(state(factors[2]), tmp_path / "anew", parent=None)
    assert exponents(tmp_path / "anew")["b.weight"] != third["b.weight"], "a keyframe takes the steps of now"
