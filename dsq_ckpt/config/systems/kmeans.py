"""GOBO: outliers apart, the rest by k-means that watches the L1 norm; no deltas."""

from __future__ import annotations

from dsq_ckpt.config.space import Space
from dsq_ckpt.config.systems.base import EMBEDDING_BINS, EXACT_MOMENTS, System, bins_axis

SYSTEM = System(
    "kmeans",
    "Zadeh et al., GOBO, MICRO 2020; Inshrinkerator, section 8.2 and Table 12",
    {
        "quantize": {
            "weights": {"codebook": {"fit": "gobo"}, "refinement_bits": 0},
            "groups": {"embedding": {"codebook": {"fit": "gobo", "bins": 32}, "refinement_bits": 0}},
            "share": "tensor", **EXACT_MOMENTS,
        },
        # Codes are entropy-coded, to the system's advantage: the original stores them at fixed width.
        "delta": {"enabled": False, "coder": "huffman", "run_length": False},
    },
    Space((bins_axis((8, 16, 32, 64, 128, 256)), EMBEDDING_BINS)),
)
