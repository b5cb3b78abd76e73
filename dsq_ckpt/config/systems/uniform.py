"""QD-Compressor: uniform quantization with as many bins as a layer's entropy asks for, Huffman of cyclic deltas."""

from __future__ import annotations

from dsq_ckpt.config.space import Axis, Space
from dsq_ckpt.config.systems.base import EXACT_MOMENTS, WEIGHTS, System

_BINS = (8, 16, 32, 64, 128, 254)

SYSTEM = System(
    "uniform",
    "Zhang et al., QD-Compressor, ICCD 2021; Inshrinkerator, section 8.2 and Table 10",
    {
        "quantize": {
            "weights": {"codebook": {"fit": "uniform"}, "refinement_bits": 0}, "share": "tensor", **EXACT_MOMENTS,
        },
        "delta": {"coder": "huffman", "rearrange": False, "run_length": False},
    },
    Space((Axis("min bins", (WEIGHTS + "min_bins",), _BINS), Axis("max bins", (WEIGHTS + "max_bins",), _BINS))),
)
