"""LC-Checkpoint: exponent buckets of the difference to the last reconstructed state, priority promotion, Huffman."""

from __future__ import annotations

from dsq_ckpt.config.space import Axis, Space
from dsq_ckpt.config.systems.base import EXACT_MOMENTS, WEIGHTS, System

SYSTEM = System(
    "lc",
    "Chen et al., On Efficient Constructions of Checkpoints, ICML 2020, section 3",
    {
        "quantize": {
            "weights": {"codebook": {"fit": "exponent", "bits": 2}, "refinement_bits": 0},
            "share": "tensor", **EXACT_MOMENTS,
        },
        "delta": {"against": "values", "coder": "huffman", "run_length": False},
    },
    Space((Axis("bits", (WEIGHTS + "bits",), (1, 2, 3, 4, 5, 6)),)),
)
