"""The systems behind `config.system`: ours and the published ones it is compared with, a row each.

All of them work on the same sketch, coders, container and reader. Codes are entropy-coded everywhere, to the advantage
of the published systems whose originals store them at fixed width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsq_ckpt.config.space import Axis, Space, Variant
from dsq_ckpt.core.registry import Registry

WEIGHTS = "quantize.weights.codebook."
EMBEDDING = "quantize.groups.embedding.codebook."


@dataclass(frozen=True)
class System:
    """One way to compress checkpoints.

    Attributes:
        name: Value of `config.system`.
        method: What it does, in a line.
        source: Paper and section that describe it, or a page of the documentation.
        defaults: A configuration tree; the user's configuration goes over it.
        space: The settings that a search varies; None: there is nothing to search.
    """

    name: str
    method: str
    source: str
    defaults: Mapping[str, Any]
    space: Space | None


SYSTEMS: Registry[System] = Registry("system", "dsq_ckpt.systems")


def register_system(system: System) -> System:
    """Make a system known to configurations, by its name.

    A package that is installed names what it registers as an entry point of `dsq_ckpt.systems`, by the same name.

    Raises:
        ConfigError: The name is taken.
    """
    return SYSTEMS.register(system.name, system)


EXACT_MOMENTS: dict[str, Any] = {kind: {"method": "exact"} for kind in ("exp_avg", "exp_avg_sq", "momentum")}
"""The papers compress weights and do not speak of the optimizer's state; it is kept bit for bit."""


def _weights(
    embedding: Mapping[str, Any] | None = None, granularity: str = "tensor", **codebook: Any
) -> dict[str, Any]:
    """Return a tree for `quantize`: codebooks of weights, and of embeddings if they have their own; no refinement."""
    groups = {} if embedding is None else {"groups": {"embedding": _block({**codebook, **embedding})}}
    return {"weights": _block(codebook), "granularity": granularity, **EXACT_MOMENTS, **groups}


def _block(codebook: Mapping[str, Any]) -> dict[str, Any]:
    return {"codebook": dict(codebook), "refinement_bits": 0}


def _axis(leaf: str, *values: float, embedding: bool = False) -> Axis:
    """Return an axis of one key of the weights' codebook, with `embedding` also of the embeddings'."""
    keys = (WEIGHTS + leaf, EMBEDDING + leaf) if embedding else (WEIGHTS + leaf,)
    return Axis(leaf.replace("_", " "), keys, values)


_EMBEDDING_BINS = Axis("embedding bins", (EMBEDDING + "bins",), (16, 32))
_FIXED_TABLES = {"coder": "huffman", "run_length": False}
_NO_DELTAS = {"enabled": False, **_FIXED_TABLES}
_DIFFERENCES = {"against": "values", **_FIXED_TABLES}

_INSHRINKERATOR = {
    "quantize": _weights(
        fit="lloyd", bins=16, prune=0.2, protect=0.005, sigma=0.2, rate_distortion=0.0, granularity="layer",
        embedding={"bins": 32, "prune": 0.0},
    ),
    "delta": {"coder": "huffman"},
}
_INSHRINKERATOR_SPACE = Space(
    (
        _axis("bins", 4, 6, 8, 12, 16, 32),
        _axis("prune", 0.5, 0.4, 0.3, 0.2, 0.1, 0.0),
        _axis("protect", 0.0005, 0.005, 0.01, embedding=True),
        _EMBEDDING_BINS,
    ),
    tuple(Variant(metric, {WEIGHTS + "metric": metric}) for metric in ("magnitude", "sensitivity")),
)

_TABLE = (
    System(
        "dsq",
        "lattices whose steps follow the gradients, rate-distortion choice, rANS, refinement for the newest",
        "docs/design.md",
        {},
        Space((_axis("step", 8.0, 5.6, 4.0, 2.8, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125),)),
    ),
    System(
        "inshrinkerator",
        "log sketch, sigma-weighted k-means++, pruning and protection, RLE + Huffman of rearranged deltas",
        "Agrawal et al., Inshrinkerator, SoCC 2024, sections 4 to 6, Table 9",
        {**_INSHRINKERATOR, "search": {"bound": "relative", "trials": None, "monotone": True}},
        _INSHRINKERATOR_SPACE,
    ),
    System(
        "inshrinkerator_relaxed",
        "Inshrinkerator with our search: at most two trials, and configurations may become more aggressive again",
        "the system above; docs/evaluation/history.md",
        {**_INSHRINKERATOR, "search": {"bound": "relative"}},
        _INSHRINKERATOR_SPACE,
    ),
    System(
        "uniform",
        "QD-Compressor: equal cells, as many as a layer's entropy asks for; Huffman of deltas",
        "Zhang et al., QD-Compressor, ICCD 2021; Inshrinkerator, section 8.2 and Table 10",
        {"quantize": _weights(fit="uniform"), "delta": {"rearrange": False, **_FIXED_TABLES}},
        Space((_axis("min_bins", 8, 16, 32, 64, 128, 254), _axis("max_bins", 8, 16, 32, 64, 128, 254))),
    ),
    System(
        "adaptive",
        "Check-N-Run: adaptive asymmetric uniform quantization; no deltas",
        "Eisenman et al., Check-N-Run, NSDI 2022; Inshrinkerator, section 8.2 and Table 11",
        {"quantize": _weights(fit="adaptive"), "delta": _NO_DELTAS},
        Space((
            _axis("bins", 8, 16, 32, 64, 128, 254),  # the paper's 256, less the two codes that are taken
            _axis("step_bins", 10, 25, 50, 100),
            Axis("range", (WEIGHTS + "search_range",), (0.1, 0.2, 0.3, 0.4, 0.5)),
        )),
    ),
    System(
        "kmeans",
        "GOBO: outliers apart, the rest by k-means that watches the L1 norm; no deltas",
        "Zadeh et al., GOBO, MICRO 2020; Inshrinkerator, section 8.2 and Table 12",
        {"quantize": _weights(fit="gobo", embedding={"bins": 32}), "delta": _NO_DELTAS},
        Space((_axis("bins", 8, 16, 32, 64, 128, 254), _EMBEDDING_BINS)),
    ),
    System(
        "lc",
        "LC-Checkpoint: exponent buckets of the difference to the last reconstructed state, priority promotion",
        "Chen et al., On Efficient Constructions of Checkpoints, ICML 2020, section 3",
        {"quantize": _weights(fit="exponent", bits=2), "delta": _DIFFERENCES},
        Space((_axis("bits", 1, 2, 3, 4, 5, 6),)),
    ),
    System(
        "topn",
        "top-n: the largest differences to the last reconstructed state, the rest left as it was",
        "Chen et al., On Efficient Constructions of Checkpoints, ICML 2020, sections 2 and 4.2",
        {"quantize": _weights(fit="largest", fraction=0.05), "delta": _DIFFERENCES},
        Space((_axis("fraction", 0.01, 0.02, 0.05, 0.1, 0.2, 0.4),)),
    ),
    System(
        "scar",
        "SCAR, as LC-Checkpoint compares itself with it: each checkpoint updates one partition of the parameters",
        "Qiao et al., SCAR, ICML 2019; Chen et al., ICML 2020, section 4.1",
        {"quantize": _weights(fit="partition", parts=20), "delta": _DIFFERENCES},
        Space((_axis("parts", 100, 50, 20, 10, 5, 2),)),
    ),
    System(
        "exact",
        "every tensor bit for bit, compressed by shuffled zstd",
        "docs/format.md",
        {"quantize": {"weights": {"method": "exact"}, **EXACT_MOMENTS}},
        None,
    ),
)
for _row in _TABLE:
    register_system(_row)
