"""Modules whose state is more than parameters and buffers."""

from __future__ import annotations

import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat


def observed(steps: int) -> nn.Module:
    """Make a model with observers, which are new or have seen batches."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
    model.qconfig = get_default_qat_qconfig("fbgemm")
    model = prepare_qat(model.train())
    for step in range(steps):
        model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step)))
    return model


class Remembering(nn.Module):
    """A module with an extra state of any form."""

    def __init__(self, state) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state) -> None:
        self.state = state


EXTRA = {
    "grown": ({"counts": {"<unk>": 3, "the": 41}, "amax": torch.ones(4)}, {"counts": {"<unk>": 0}, "step": 0}),
    "shrunk": ({"counts": {"a": 3}, "seen": {}}, {"counts": {"a": 0, "b": 1}, "seen": {"x": 1}, "amax": 3}),
    "dict after none": ({"amax": torch.ones(3), "n": {1: 2, 3: torch.ones(2)}}, None),
    "tensor after none": (torch.ones(3), None),
    "none after dict": (None, {"amax": torch.zeros(3)}),
    "number after dict": (5, {"amax": torch.zeros(3)}),
    "more bytes": (torch.arange(77, dtype=torch.uint8), torch.empty(0)),
    "fewer bytes": (torch.arange(3, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8)),
    "longer lists": ({"seen": [torch.ones(2)] * 3, "epochs": [1, 2, 3]}, {"seen": [torch.zeros(1)], "epochs": [0]}),
    "shorter lists": ([torch.ones(2)], [torch.zeros(2), torch.zeros(3)]),
    "more numbers": ({number: 2 * number for number in range(4)}, {0: 1}),
}


class Scale(nn.Module):
    """A learned scale as of Brevitas: told when the first batch has set it, and replaced by a new one in a load."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.0))
        self.known = False

    def forward(self, batch):
        if not self.known:
            self.value.data.copy_(batch.abs().max())
            self.known = True
        return (batch / self.value).clamp(-1, 1) * self.value

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        entries = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if not self.known:
            del entries[f"{prefix}value"]
        return entries

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.value = nn.Parameter(torch.tensor(1.0))
        self.known = f"{prefix}value" in state_dict
        super()._load_from_state_dict(state_dict, prefix, *rest)


def scaled(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(16, 16), Scale(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


class Metric(nn.Module):
    """A metric as of torchmetrics, with lists of what it has seen as its state."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = [torch.randn(3 + number) for number in range(seen)]

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        entries = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        entries[f"{prefix}seen"] = list(self.seen)
        return entries

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.seen = list(state_dict.pop(f"{prefix}seen"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def hooked(layers: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    model.register_load_state_dict_pre_hook(lambda *_: None)
    return model
