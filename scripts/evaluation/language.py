"""Language workloads: decoders, experts, a BERT, an LSTM, adapters, over the bytes of Python's standard library."""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpt import GPT, GPTConfig, StdlibText
from torch import Tensor, nn

from evaluation.models import LSTM, MASK, Bfloat16, Decoder, DecoderConfig, MixedGPT, with_adapters
from evaluation.workloads import NO_TARGET, Plan, Workload, register, seeded

HELD_OUT_BATCHES, HELD_OUT_ROWS = 8, 4
MASKS = 4
"""Of each held-out row, where bytes are masked, which leaves few to predict."""


@cache
def _text(megabytes: float, context: int, seed: int, headers: bool) -> StdlibText:
    """Read the text once in a process: finding the files takes longer than the steps of a test."""
    return StdlibText(megabytes, context, seed, _headers() if headers else None)


def stdlib_bytes() -> bytes:
    """Return the training text of most language workloads: 4 MB of the source of Python's standard library."""
    return _text(4.0, 128, 0, False).train.tobytes()


def _headers() -> list[Path]:
    """Return the C++ headers of PyTorch that people wrote, in sorted order."""
    root = Path(torch.__file__).parent / "include"
    return sorted(path for part in ("c10", "torch/csrc") for path in (root / part).rglob("*.h"))


class LanguageWorkload(Workload):
    """A model of bytes with AdamW; loss in nats per byte, accuracy that of the next byte."""

    def __init__(
        self, name: str, plan: Plan, seed: int, build: Callable[[], nn.Module], context: int = 128,
        megabytes: float = 4.0, betas: tuple[float, float] = (0.9, 0.95), first: int = 0, headers: bool = False,
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
            headers: The text is that of PyTorch's C++ headers.
        """
        with seeded(seed):
            model = build()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=plan.rate, betas=betas, weight_decay=0.1)
        super().__init__(name, plan, seed, model, optimizer)
        self.first = first
        self.headers = headers
        self.text = _text(megabytes, context, seed, headers)
        # Other rows for every seed, as in scripts/train_fsdp.py: losses compare within a seed.
        self._held_out = list(self.text.validation_batches(HELD_OUT_BATCHES, 0, 1, HELD_OUT_ROWS))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return rows of the training text, and the bytes that follow."""
        return self.text.batch(self.first + step, 0, 1, self.plan.batch_size)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return rows of files that are not used for training."""
        return iter(self._held_out)

    def data_checksum(self) -> int:
        """Return the checksum of the text, which is that of the running Python or PyTorch."""
        return zlib.crc32(self.text.validation.tobytes(), zlib.crc32(self.text.train.tobytes()))

    def settings(self) -> dict[str, Any]:
        """Return the settings of every workload, and whose text it is."""
        python = f"standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
        return super().settings() | {"text": f"headers of PyTorch {torch.__version__}" if self.headers else python}


class LargeWorkload(LanguageWorkload):
    """A model that trains on a GPU, if there is one, with batches that are moved there."""

    def __init__(self, name: str, plan: Plan, seed: int, build: Callable[[], nn.Module], **options: Any) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(name, plan, seed, lambda: build().to(self.device), **options)
        self._held_out = [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in self._held_out]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return rows of the training text, and the bytes that follow, on the device."""
        inputs, targets = super().batch(step)
        return inputs.to(self.device), targets.to(self.device)


class MaskedWorkload(LanguageWorkload):
    """A model of masked bytes, a share of `MASKED` of each row; the others have no target."""

    MASKED = 0.15

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return rows of the training text, masked, and the bytes that were."""
        return self._masked(super().batch(step)[0], self.seed, step)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of files that are not used for training, each masked in several ways, the same each time."""
        for number, (tokens, _) in enumerate(super().held_out()):
            yield self._masked(tokens.repeat(MASKS, 1), 0, number)

    def _masked(self, tokens: Tensor, *seed: int) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(np.random.default_rng(seed).random(tokens.shape) < self.MASKED)
        return tokens.masked_fill(chosen, MASK), tokens.masked_fill(~chosen, NO_TARGET)


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
    """Make a GPT of 41 thousand parameters that trains in half a second, for tests."""
    plan = Plan(steps=60, checkpoint_every=10, batch_size=4, rate=3e-3, warm_up=10, floor=0.1, clip=1.0)
    build = partial(GPT, GPTConfig(context=32, layers=1, width=40, heads=4))
    return LanguageWorkload(name, plan, seed, build, context=32, megabytes=1.0)


@register("gpt-large")
def gpt_large(name: str, seed: int) -> Workload:
    """Make a GPT of 86 million parameters, for a GPU: blocks of GPT-2's smallest model, over bytes."""
    plan = Plan(steps=960, checkpoint_every=40, batch_size=32, rate=6e-4, warm_up=60, floor=0.1, clip=1.0)
    build = partial(MixedGPT, GPTConfig(context=512, layers=12, width=768, heads=12))
    return LargeWorkload(name, plan, seed, build, context=512, megabytes=12.0)


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


@register("lora")
def lora(name: str, seed: int) -> Workload:
    """Make the same decoder with adapters on its attention, which alone are trained, on other text."""
    plan = Plan(steps=400, checkpoint_every=20, batch_size=8, rate=1e-3, warm_up=10, floor=1.0, clip=1.0)
    return LanguageWorkload(
        name, plan, seed, lambda: with_adapters(_pretrained(seed)), context=64, betas=(0.9, 0.999), first=SHORT.steps
    )


@register("headers")
def headers(name: str, seed: int) -> Workload:
    """Make the decoder of `llama`, untrained, to learn C++ in half its steps at a third of its rate."""
    plan = Plan(steps=200, checkpoint_every=20, batch_size=8, rate=1e-3, warm_up=20, floor=0.1, clip=1.0)
    return LanguageWorkload(name, plan, seed, Decoder, context=64, betas=(0.9, 0.98), headers=True)


@register("bert")
def bert(name: str, seed: int) -> Workload:
    """Make a masked language model of 0.7 million parameters."""
    plan = replace(SHORT, steps=800, checkpoint_every=40, batch_size=16)
    build = partial(Decoder, DecoderConfig(masked=True))
    return MaskedWorkload(name, plan, seed, build, context=64, betas=(0.9, 0.999))


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
