"""Language workloads: the byte-level GPT of the demo, on the source of Python's standard library."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from gpt import GPT, GPTConfig, StdlibText
from torch import Tensor

from evaluation.workloads import Plan, Workload, register, seeded

HELD_OUT_BATCHES, HELD_OUT_ROWS = 8, 4


@cache
def _text(megabytes: float, context: int, seed: int) -> StdlibText:
    """Read the text once in a process: finding the files takes longer than the steps of a test."""
    return StdlibText(megabytes, context, seed)


class LanguageWorkload(Workload):
    """A GPT with AdamW; loss in nats per byte, accuracy that of the next byte."""

    def __init__(self, name: str, plan: Plan, seed: int, config: GPTConfig, megabytes: float = 4.0) -> None:
        with seeded(seed):
            model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.1)
        super().__init__(name, plan, seed, model, optimizer)
        self.text = _text(megabytes, config.context, seed)
        # Other rows for every seed, as in scripts/train_fsdp.py: losses compare within a seed.
        self._held_out = list(self.text.validation_batches(HELD_OUT_BATCHES, 0, 1, HELD_OUT_ROWS))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows of the training text, and the bytes that follow."""
        return self.text.batch(step, 0, 1, self.plan.batch_size)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of files that are not trained on."""
        return iter(self._held_out)

    def data_checksum(self) -> int:
        """Checksum of the text, which is that of the running Python."""
        return zlib.crc32(self.text.validation.tobytes(), zlib.crc32(self.text.train.tobytes()))

    def settings(self) -> dict[str, Any]:
        """Those of every workload, and whose standard library it is."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return super().settings() | {"text": f"standard library of Python {version}"}


@register("gpt")
def gpt(name: str, seed: int) -> Workload:
    """Make the demo's GPT of 2.8 million parameters."""
    plan = Plan(steps=1600, checkpoint_every=100, batch_size=4, rate=2e-3, warm_up=50, floor=0.1, clip=1.0)
    return LanguageWorkload(name, plan, seed, GPTConfig())


@register("gpt-tiny")
def gpt_tiny(name: str, seed: int) -> Workload:
    """Make a GPT of 60 thousand parameters that trains in a second, for tests."""
    plan = Plan(steps=60, checkpoint_every=10, batch_size=8, rate=3e-3, warm_up=10, floor=0.1, clip=1.0)
    return LanguageWorkload(name, plan, seed, GPTConfig(context=32, layers=2, width=40, heads=4), megabytes=1.0)
