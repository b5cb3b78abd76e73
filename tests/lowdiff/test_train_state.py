"""Optimizers whose steps cannot be replayed from gradients."""

import pytest
import torch
from torch import nn

import dsq_ckpt.lowdiff
from tests.helpers.odd_optimizers import ForwardingAdamW, HiddenStateAdamW, SlowWeights


@pytest.mark.parametrize("kind", [HiddenStateAdamW, SlowWeights, ForwardingAdamW])
def test_optimizers_around_others_are_refused(tmp_path, kind):
    """They were recovered without the state of the inner one, or not at all."""
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters())
    with pytest.raises(dsq_ckpt.ConfigError, match=rf"{kind.__name__} cannot be logged: it is .* around AdamW.*pass"):
        dsq_ckpt.lowdiff.GradientLog(tmp_path / "run", model, optimizer)
    assert not list(tmp_path.glob("run/*"))
    assert isinstance(optimizer.optimizer, torch.optim.AdamW) and not optimizer.optimizer._optimizer_step_pre_hooks
