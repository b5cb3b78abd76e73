"""Lossless: every tensor bit for bit, compressed by shuffled zstd."""

from __future__ import annotations

from dsq_ckpt.config.systems.base import EXACT_MOMENTS, System

SYSTEM = System(
    "exact",
    "docs/format.md",
    {"quantize": {"weights": {"method": "exact"}, **EXACT_MOMENTS}},
    None,
)
