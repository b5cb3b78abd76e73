"""Ours: lattices whose steps follow the gradients, rate-distortion choice, rANS, refinement for the newest."""

from __future__ import annotations

from dsq_ckpt.config.space import Axis, Space
from dsq_ckpt.config.systems.base import WEIGHTS, System

SYSTEM = System(
    "dsq",
    "docs/design.md",
    {},
    Space((Axis("step", (WEIGHTS + "step",), (8.0, 5.6, 4.0, 2.8, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125)),)),
)
