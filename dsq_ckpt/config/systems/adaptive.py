"""Check-N-Run: adaptive asymmetric uniform quantization; no deltas."""

from __future__ import annotations

from dsq_ckpt.config.space import Axis, Space
from dsq_ckpt.config.systems.base import EXACT_MOMENTS, WEIGHTS, System, bins_axis

SYSTEM = System(
    "adaptive",
    "Eisenman et al., Check-N-Run, NSDI 2022; Inshrinkerator, section 8.2 and Table 11",
    {
        "quantize": {
            "weights": {"codebook": {"fit": "adaptive"}, "refinement_bits": 0}, "share": "tensor", **EXACT_MOMENTS,
        },
        # Codes are entropy-coded, to the system's advantage: the original stores them at fixed width.
        "delta": {"enabled": False, "coder": "huffman", "run_length": False},
    },
    Space((
        bins_axis((8, 16, 32, 64, 128, 256)),
        Axis("step bins", (WEIGHTS + "step_bins",), (10, 25, 50, 100)),
        Axis("range", (WEIGHTS + "search_range",), (0.1, 0.2, 0.3, 0.4, 0.5)),
    )),
)
