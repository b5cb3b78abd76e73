"""States, and the comparison of states, that tests of the transport share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

PATIENCE = timedelta(seconds=300)
SHORT = timedelta(milliseconds=200)


def small() -> dict[str, Any]:
    return {"w": torch.randn(40, 30), "step": 3}


def large() -> dict[str, Any]:
    """A state that does not fit into the buffers of a connection."""
    return {"w": torch.randint(256, (48 << 20,), dtype=torch.uint8)}


def same(one: Any, other: Any) -> None:
    """Check that two states are the same to the bit."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
    elif isinstance(one, dict):
        assert type(other) is dict and one.keys() == other.keys()
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, list | tuple):
        assert type(one) is type(other) and len(one) == len(other)
        for own, its in zip(one, other, strict=True):
            same(own, its)
    else:
        assert type(one) is type(other) and repr(one) == repr(other)  # NaN too
