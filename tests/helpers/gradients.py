"""A small model with parameters of every sort, and what its average gradients should be."""

from __future__ import annotations

import torch
from torch import nn

from dsq_ckpt.gradients.sensitivity import GradientAverage

BETA = 0.9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8)
        self.up = nn.Linear(8, 6)
        self.out = nn.Linear(8, 13, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 8).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.out(self.frozen(self.up(self.embed(tokens)).tanh())).square().mean()
        return loss


class RecordedGradients:
    """The formula, in double precision, of the gradients as they are right before each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.averages = model, {}

    def add(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and parameter.requires_grad:
                gradient = parameter.grad.detach().double()
                before = self.averages.get(name, gradient)
                self.averages[name] = BETA * gradient + (1 - BETA) * before

    def check(self, average: GradientAverage, steps: int) -> None:
        assert average.steps == steps
        assert self.averages
        for name, _ in self.model.named_parameters():
            value = average.average(name)
            if name not in self.averages:
                assert value is None, name
                continue
            assert value.dtype == torch.float32 and value.device.type == "cpu" and value.is_contiguous()
            torch.testing.assert_close(value.double(), self.averages[name], rtol=1e-5, atol=1e-9)


def make_tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(seed))
