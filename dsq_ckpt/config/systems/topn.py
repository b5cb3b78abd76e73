"""Top-n: the largest differences to the last reconstructed state, the rest left as it was."""

from __future__ import annotations

from dsq_ckpt.config.space import Axis, Space
from dsq_ckpt.config.systems.base import EXACT_MOMENTS, WEIGHTS, System

SYSTEM = System(
    "topn",
    "Chen et al., On Efficient Constructions of Checkpoints, ICML 2020, sections 2 and 4.2",
    {
        "quantize": {
            "weights": {"codebook": {"fit": "largest", "fraction": 0.05}, "refinement_bits": 0},
            "share": "tensor", **EXACT_MOMENTS,
        },
        "delta": {"against": "values", "coder": "huffman", "run_length": False},
    },
    Space((Axis("fraction", (WEIGHTS + "fraction",), (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)),)),
)
