"""Averaged gradients of DeepSpeed's flat buffers, captured at the steps of its optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dsq_ckpt.config.schema import SearchConfig
from dsq_ckpt.deepspeed.flat_buffers import MASTER, Buffer, get_base_optimizer, take_inventory
from dsq_ckpt.deepspeed.tensor_substitution import split_by_chunk
from dsq_ckpt.gradients.sensitivity import GradientAverage
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.layout import Fractions


class FlatGradients:
    """Moving averages of the basic optimizer's gradients: reduced, unscaled, clipped, and aligned with the masters.

    Each rank averages the gradients of its own partitions, without communication.

    Args:
        engine: DeepSpeed engine.
        search: configuration with `beta`, the weight of the newest gradient, and `window`, the number of batches before
            a checkpoint.
        fractions: fractions of elements that are pruned and protected by sensitivity.
    """

    def __init__(self, engine: Any, search: SearchConfig, fractions: Fractions) -> None:
        self.fractions = fractions
        masters = [buffer.tensor for buffer in take_inventory(engine).buffers if buffer.kind == MASTER]
        self._names = {id(tensor): str(number) for number, tensor in enumerate(masters)}
        self._average = GradientAverage(
            {str(number): tensor for number, tensor in enumerate(masters)},  # type: ignore[misc]
            search.beta, search.window,
        )
        self._average.attach(get_base_optimizer(engine), later=True)

    def split_by_chunk(self, buffers: Iterable[Buffer]) -> dict[str | ChunkKey, torch.Tensor]:
        """Return the available averages by chunk of the weights."""

        def get_average(buffer: Buffer) -> torch.Tensor | None:
            name = self._names.get(id(buffer.tensor))
            gradient = None if name is None else self._average.average(name)
            return None if gradient is None else gradient.view(-1)

        return {key: average for key, average in split_by_chunk(buffers, get_average).items()}

    def reset(self) -> None:
        """Reset the averages, after a checkpoint."""
        self._average.reset()
