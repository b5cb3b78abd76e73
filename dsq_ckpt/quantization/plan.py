"""How a save is to be stored: decided by a policy, once the sketches of all ranks are merged."""

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
    """How a save is to be stored, once its sketches are known.

    Attributes:
        analysis: codebooks by group; groups that are absent are stored exactly.
        config: the configuration, for the manifest.
        quality: what was measured about it, for the manifest.
        compensations: of chunks whose codes are chosen so.
    """

    analysis: Analysis
    config: DSQConfig
    quality: dict[str, Any] | None = None
    compensations: Mapping[ChunkKey, Compensation] = field(default_factory=dict)


class ConfigPolicy(Protocol):
    """Chooses the configuration of a save; collective."""

    def __call__(
        self, sketches: GlobalSketch, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
    ) -> QuantizationPlan:
        """Choose.

        Args:
            sketches: global; their `chunks` are those this rank writes.
            local: chunks of all weights that lie on this rank, those included that another rank writes.
            config: the save's configuration.
            comm: of the ranks that save.
            workers: threads.
        """


def plan_as_configured(
    sketches: GlobalSketch, local: Sequence[Chunk], config: DSQConfig, comm: Communicator, workers: Workers
) -> QuantizationPlan:
    """Return the plan of the configuration as it is; a policy.

    Raises:
        ConfigError: the configuration bounds what restores cost, which only a search measures.
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
    """Return the plan of a save that has to be exact; a policy."""
    return QuantizationPlan(Analysis({}, {}, sketches.nonfinite), config)
