"""Inshrinkerator: log sketch, sigma-weighted k-means++, pruning and protection, RLE + Huffman of rearranged deltas."""

from __future__ import annotations

from dsq_ckpt.config.space import Axis, Space, Variant
from dsq_ckpt.config.systems.base import EMBEDDING_BINS, EXACT_MOMENTS, WEIGHTS, System, bins_axis, both

_CODEBOOK = {"fit": "lloyd", "bins": 16, "prune": 0.2, "protect": 0.005, "sigma": 0.2, "rate_distortion": 0.0}

SYSTEM = System(
    "inshrinkerator",
    "Agrawal et al., Inshrinkerator, SoCC 2024, sections 4 to 6, Table 9",
    {
        "quantize": {
            "weights": {"codebook": _CODEBOOK, "refinement_bits": 0},
            "groups": {"embedding": {"codebook": _CODEBOOK | {"bins": 32, "prune": 0.0}, "refinement_bits": 0}},
            **EXACT_MOMENTS,
        },
        "delta": {"coder": "huffman"},
    },
    Space(
        (
            bins_axis((4, 6, 8, 12, 16, 32)),
            Axis("prune", (WEIGHTS + "prune",), (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)),
            Axis("protect", both("protect"), (0.0005, 0.005, 0.01)),
            EMBEDDING_BINS,
        ),
        (
            Variant("magnitude", {WEIGHTS + "metric": "magnitude"}),
            Variant("sensitivity", {WEIGHTS + "metric": "sensitivity"}),
        ),
    ),
)
