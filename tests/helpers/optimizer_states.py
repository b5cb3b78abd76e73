"""States of optimizers as scripts save them, and their comparison."""

from __future__ import annotations

import torch

from tests.helpers.states import is_equal
from tests.helpers.training import Net, train


def plain(kind=torch.optim.AdamW, **options):
    """A model, its optimizer after a few steps, and a state dict as scripts save it."""
    model = Net()
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])
    train(model, optimizer, 0, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    return model, optimizer, state


def fresh(kind=torch.optim.AdamW, **options):
    model = Net(seed=5)
    return kind(model.parameters(), lr=1e-2, **options)


def moments(optimizer):
    return {(number, name): value for number, state in enumerate(optimizer.state.values())
            for name, value in state.items()}


def check_moments(optimizer, original):
    """The same parameters have the same state, bit for bit."""
    loaded, expected = moments(optimizer), moments(original)
    assert expected and loaded.keys() == expected.keys()
    assert all(is_equal(torch.as_tensor(loaded[key]), torch.as_tensor(expected[key])) for key in expected)
