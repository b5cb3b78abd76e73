"""State that Trainer and Accelerate restore."""

from __future__ import annotations

import pytest

import dsq_ckpt
from dsq_ckpt.integrations.training_state import TrainingState
from tests.api.test_whole import made
from tests.core.test_subclasses import EightBits, equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("steps", [0, 1])
def test_moments_of_a_class_of_their_own(tmp_path, steps):
    """As of torchao's optimizers, also in an optimizer that has not stepped; they came back as dicts of their parts."""
    model, optimizer = made(EightBits, 2)
    dsq_ckpt.save(TrainingState([model], [optimizer]).collect(), tmp_path / "a")
    other, target = made(EightBits, steps)
    TrainingState([other], [target]).restore(tmp_path / "a")
    assert equal(target.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    target.step()
