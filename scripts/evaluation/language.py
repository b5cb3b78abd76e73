"""Language workloads: decoders, a mixture of experts and an LSTM over the bytes of Python's standard library."""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from gpt import GPT, GPTConfig, StdlibText
from torch import Tensor, nn

from evaluation.models import LSTM, Bfloat16, Decoder, DecoderConfig
from evaluation.workloads import Plan, Workload, register, seeded

HELD_OUT_BATCHES, HELD_OUT_ROWS = 8, 4


@cache
def _text(megabytes: float, context: int, seed: int) -> StdlibText:
    """Read the text once in a process: finding the files takes longer than the steps of a test."""
    return StdlibText(megabytes, context, seed)


class LanguageWorkload(Workload):
    """A model of bytes with AdamW; loss in nats per byte, accuracy that of the next byte."""

    def __init__(
        self, name: str, plan: Plan, seed: int, build: Callable[[], nn.Module], context: int = 128,
        megabytes: float = 4.0, betas: tuple[float, float] = (0.9, 0.95), first: int = 0,
    ) -> None:
        """Make the workload.

        Args:
            name: Of the workload.
            plan: Of the run.
            seed: Of the initial weights and of the batches.
            build: Makes the model; called with torch's generator seeded.
            context: Bytes per row.
            megabytes: Of text.
            betas: Of AdamW.
            first: Number of the first step's batch: another run may have seen those before.
        """
        with seeded(seed):
            model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=betas, weight_decay=0.1)
        super().__init__(name, plan, seed, model, optimizer)
        self.first = first
        self.text = _text(megabytes, context, seed)
        # Other rows for every seed, as in scripts/train_fsdp.py: losses compare within a seed.
        self._held_out = list(self.text.validation_batches(HELD_OUT_BATCHES, 0, 1, HELD_OUT_ROWS))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return rows of the training text, and the bytes that follow."""
        return self.text.batch(self.first + step, 0, 1, self.plan.batch_size)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return rows of files that are not used for training."""
        return iter(self._held_out)

    def data_checksum(self) -> int:
        """Return the checksum of the text, which is the standard library of the running Python."""
        return zlib.crc32(self.text.validation.tobytes(), zlib.crc32(self.text.train.tobytes()))

    def settings(self) -> dict[str, Any]:
        """Return the settings of every workload, and the version of the standard library."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return super().settings() | {"text": f"standard library of Python {version}"}


@register("gpt")
def gpt(name: str, seed: int) -> Workload:
    """Make the demo's GPT of 2.8 million parameters."""
    plan = Plan(steps=1600, checkpoint_every=100, batch_size=4, rate=2e-3, warm_up=50, floor=0.1, clip=1.0)
    return LanguageWorkload(name, plan, seed, GPT)


@register("gpt-short")
def gpt_short(name: str, seed: int) -> Workload:
    """Make the same GPT for a run of ten checkpoints, where what is compared takes minutes per checkpoint."""
    plan = Plan(steps=400, checkpoint_every=40, batch_size=4, rate=2e-3, warm_up=50, floor=0.1, clip=1.0)
    return LanguageWorkload(name, plan, seed, GPT)


@register("gpt-tiny")
def gpt_tiny(name: str, seed: int) -> Workload:
    """Make a GPT of 60 thousand parameters that trains in a second, for tests."""
    plan = Plan(steps=60, checkpoint_every=10, batch_size=8, rate=3e-3, warm_up=10, floor=0.1, clip=1.0)
    build = partial(GPT, GPTConfig(context=32, layers=2, width=40, heads=4))
    return LanguageWorkload(name, plan, seed, build, context=32, megabytes=1.0)


SHORT = Plan(steps=400, checkpoint_every=20, batch_size=8, rate=3e-3, warm_up=40, floor=0.1, clip=1.0)
"""Runs of a minute or two, with checkpoints as close as a run in trouble makes them."""


@register("llama")
def llama(name: str, seed: int) -> Workload:
    """Make a Llama-like decoder of 0.7 million parameters; its second moments remember fifty steps."""
    return LanguageWorkload(name, SHORT, seed, Decoder, context=64, betas=(0.9, 0.98))


@register("llama-long")
def llama_long(name: str, seed: int) -> Workload:
    """Make a decoder of half that size for a run of 21,000 steps and 210 checkpoints, in steps of some 15 ms."""
    plan = Plan(steps=21_000, checkpoint_every=100, batch_size=4, rate=3e-3, warm_up=200, floor=0.1, clip=1.0)
    build = partial(Decoder, DecoderConfig(layers=2))
    return LanguageWorkload(name, plan, seed, build, context=64, betas=(0.9, 0.98))


@register("llama-bf16")
def llama_bf16(name: str, seed: int) -> Workload:
    """Make the same decoder computing in bfloat16, with float32 weights and moments."""
    return LanguageWorkload(name, SHORT, seed, lambda: Bfloat16(Decoder()), context=64, betas=(0.9, 0.98))


@register("moe")
def moe(name: str, seed: int) -> Workload:
    """Make a decoder with four experts in each block, two of which serve a token."""
    config = DecoderConfig(layers=3, width=96, hidden=128, experts=4)
    return LanguageWorkload(name, SHORT, seed, lambda: Decoder(config), context=64)


@register("lstm")
def lstm(name: str, seed: int) -> Workload:
    """Make a byte-level LSTM of 0.7 million parameters."""
    return LanguageWorkload(name, SHORT, seed, LSTM, context=64, betas=(0.9, 0.999))


@register("finetune")
def finetune(name: str, seed: int) -> Workload:
    """Make the decoder that the run of `llama` ends with; go on with other text, at a hundredth of the rate."""
    plan = Plan(steps=400, checkpoint_every=20, batch_size=8, rate=3e-5, warm_up=10, floor=1.0, clip=1.0)
    return LanguageWorkload(
        name, plan, seed, lambda: _pretrained(seed), context=64, betas=(0.9, 0.999), first=SHORT.steps
    )


@cache
def _llama_weights(seed: int) -> dict[str, Tensor]:
    """Return the weights of `llama` at the end of its run."""
    run = llama("llama", seed)
    run.train(0, run.steps)
    return copy.deepcopy(run.model.state_dict())


def _pretrained(seed: int) -> nn.Module:
    model = Decoder()
    model.load_state_dict(_llama_weights(seed))
    return model
