"""Moments of Adam as they are after some steps, and the error of the next update."""

from __future__ import annotations

import torch


def moments(rows: int = 64, seed: int = 0) -> dict[str, torch.Tensor]:
    """First and second moments of elements whose gradients differ by many orders of magnitude, a tenth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-40, 0, (rows, 96), generator=generator).float())
    m = torch.zeros(rows, 96)
    v = torch.zeros(rows, 96)
    for _ in range(30):
        gradient = torch.randn(rows, 96, generator=generator) * scale
        m = 0.9 * m + 0.1 * gradient
        v = 0.98 * v + 0.02 * gradient**2
    never = torch.rand(rows, 96, generator=generator) < 0.1
    return {"exp_avg": m.masked_fill(never, 0), "exp_avg_sq": v.masked_fill(never, 0)}


def update(part: dict[str, torch.Tensor]) -> torch.Tensor:
    return part["exp_avg"] / (part["exp_avg_sq"].sqrt() + 1e-15)


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())
