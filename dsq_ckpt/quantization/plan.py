"""Plans of how to store a save, and the policies that choose them from the merged sketches of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.quantization.analysis import Analysis, GlobalSketch
from dsq_ckpt.quantization.chunk import Chunk, ChunkKey
from dsq_ckpt.quantization.compensation import Compensation


@dataclass(frozen=True)
class QuantizationPlan:
    """Codebooks and configuration with which a save is stored.

    Attributes:
        analysis: codebooks by group; groups that are absent are stored exactly.
        config: the configuration, for the manifest.
        quality: measured quality of the plan, for the manifest.
        compensations: compensations of rounding errors, by chunk.
    """

    analysis: Analysis
    config: DSQConfig
    quality: dict[str, Any] | None = None
    compensations: Mapping[ChunkKey, Compensation] = field(default_factory=dict)


class ConfigPolicy(Protocol):
    """Function that chooses the configuration of a save; collective."""

    def __call__(
        self, sketches: GlobalSketch, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
    ) -> QuantizationPlan:
        """Return the plan of a save.

        Args:
            sketches: the global sketch; its `chunks` are the chunks that this rank writes.
            local: chunks of all weights on this rank, including chunks that another rank writes.
            config: configuration of the save.
            comm: communicator of the ranks that save.
            workers: threads.
        """


def plan_as_configured(
    sketches: GlobalSketch, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
) -> QuantizationPlan:
    """Return a plan with the unchanged configuration; a policy.

    Raises:
        ConfigError: the configuration bounds the cost of restores, which only a search measures.
    """
    plan = QuantizationPlan(sketches.fit(), config)
    if config.search.max_run_loss is not None and any(name.startswith("weights/") for name in plan.analysis.fitted):
        raise ConfigError(
            "search.max_run_loss is set, and no search measures what a restore of this checkpoint costs: save with a "
            "Compressor that has `evaluate` (DeepSpeed: of `initialize`) and a system that searches, or leave it out"
        )
    return plan


def plan_exact(
    sketches: GlobalSketch, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
) -> QuantizationPlan:
    """Return a plan that stores all groups exactly; a policy."""
    return QuantizationPlan(Analysis({}, {}, sketches.nonfinite), config)
