"""What a system is: default settings and a search space over the same sketch, coders, container and reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsq_ckpt.config.space import Axis, Space

WEIGHTS = "quantize.weights.codebook."
EMBEDDING = "quantize.groups.embedding.codebook."

EXACT_MOMENTS: dict[str, Any] = {kind: {"method": "exact"} for kind in ("exp_avg", "exp_avg_sq", "momentum")}
"""The papers compress weights and do not speak of the optimizer's state; it is kept bit for bit."""


@dataclass(frozen=True)
class System:
    """One way to compress checkpoints, ours or a published one.

    Attributes:
        name: value of `config.system`.
        source: where it is described.
        defaults: a configuration tree; what the user gives goes over it.
        space: what a search varies; None: there is nothing to search.
    """

    name: str
    source: str
    defaults: Mapping[str, Any]
    space: Space | None


def both(leaf: str) -> tuple[str, str]:
    """A codebook's key for all weights, embeddings included."""
    return (WEIGHTS + leaf, EMBEDDING + leaf)


def bins_axis(values: tuple[int, ...]) -> Axis:
    """Number of levels of all weights but embeddings; 256 of the papers is 254 here, where two codes are taken."""
    return Axis("bins", (WEIGHTS + "bins",), tuple(min(value, 254) for value in values))


EMBEDDING_BINS = Axis("embedding bins", (EMBEDDING + "bins",), (16, 32))
