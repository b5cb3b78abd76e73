"""What DCP's items of one rank say of a save."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.dcp.plans import make_plan_layout
from dsq_ckpt.engine.options import SaveOptions


def test_settings_that_other_ranks_are_dealt_tell_of_an_optimizer_too() -> None:
    """One rank may have `lr` alone of SGD's settings, which other optimizers have as well."""
    model = torch.nn.Linear(96, 96)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 96)).sum().backward()
    optimizer.step()
    planner = DefaultSavePlanner()
    planner.set_up_planner({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    items = planner.create_local_plan().items
    some = [item for item in items if item.tensor_data is not None or item.index.fqn.endswith(".lr")]
    assert len(some) < len(items)
    options = SaveOptions(config=DSQConfig())
    assert make_plan_layout(some, options, False).unknown_updates
    assert not make_plan_layout(some, options, False, items).unknown_updates
