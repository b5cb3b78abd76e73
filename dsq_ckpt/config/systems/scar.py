"""SCAR, as LC-Checkpoint compares itself with it: each checkpoint updates one partition of the parameters."""

from __future__ import annotations

from dsq_ckpt.config.space import Axis, Space
from dsq_ckpt.config.systems.base import EXACT_MOMENTS, WEIGHTS, System

SYSTEM = System(
    "scar",
    "Qiao et al., SCAR, ICML 2019; Chen et al., ICML 2020, section 4.1",
    {
        "quantize": {
            "weights": {"codebook": {"fit": "partition", "parts": 20}, "refinement_bits": 0},
            "share": "tensor", **EXACT_MOMENTS,
        },
        "delta": {"against": "values", "coder": "huffman", "run_length": False},
    },
    Space((Axis("parts", (WEIGHTS + "parts",), (100, 50, 20, 10, 5, 2)),)),
)
