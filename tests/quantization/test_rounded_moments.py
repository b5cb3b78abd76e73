"""First moments whose update is not known, since the optimizer keeps state of its own beside them."""

from __future__ import annotations

import pytest
import torch

import dsq_ckpt


@pytest.mark.parametrize("kind, method, said", [
    (torch.optim.Adamax, "quantize", True), (torch.optim.Adamax, "bf16", False), (torch.optim.NAdam, "quantize", False),
])
def test_first_moments_of_other_optimizers_are_rounded_and_told_of_at_a_keyframe(
    tmp_path, recwarn, kind, method, said
) -> None:
    """Adamax divides them by `exp_inf`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(70, 80)
    optimizer = kind(model.parameters())
    for number in range(2):
        model(torch.randn(9, 70)).square().sum().backward()
        optimizer.step()
        config = {"quantize": {"exp_avg": {"method": method}}}
        dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / str(number), config=config)
    found = [str(one.message) for one in recwarn if "beside exp_avg" in str(one.message)]
    assert len(found) == said and all("keeps 'exp_inf' beside" in one for one in found)
    names = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(80, 70), "exp_inf": torch.zeros(80, 70)}}}}
    if kind is torch.optim.Adamax:
        dsq_ckpt.load(names, tmp_path / "1")
        own, got = optimizer.state[model.weight], names["optimizer"]["state"][0]
        assert got["exp_inf"].equal(own["exp_inf"]) and got["exp_avg"].equal(own["exp_avg"].bfloat16().float())
