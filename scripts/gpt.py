"""A small byte-level GPT and the text it learns: the source code of Python's own standard library.

Both are here so that the demo trains on something real without downloading anything. The model has about
2.8 million parameters, and a few hundred steps teach it enough to see whether a restored run continues
where the killed one stopped.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256
SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
VALIDATION_EVERY = 16
"""Every sixteenth file goes to the validation text, so no file is split between the two."""


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a `GPT`.

    Attributes:
        context: Longest sequence, in bytes.
        layers: Number of transformer blocks.
        width: Size of the residual stream.
        heads: Attention heads; divides `width`.
    """

    context: int = 128
    layers: int = 6
    width: int = 192
    heads: int = 6

    def __post_init__(self) -> None:
        """Reject a width that the heads cannot share evenly."""
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a feed-forward layer four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, time, width)` to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + hidden


class GPT(nn.Module):
    """Decoder-only transformer over bytes, with learned positions and an untied output layer."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        self.bytes = nn.Embedding(VOCAB, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * config.layers) ** 0.5 if residual else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte, `(batch, time, 256)`, for int64 `tokens` of `(batch, time)`."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_sum(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of `targets` in nats, summed over all bytes: shares of a batch add up."""
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


Batch = tuple[Tensor, Tensor]
"""Inputs and targets, both int64 of shape `(rows, context)`; the targets are the inputs one byte later."""


class StdlibText:
    """Training and validation batches from the standard library's `*.py` files.

    The files are read in sorted order, without tests and installed packages, until `megabytes` are reached.
    Which rows a batch holds depends on the seed, the split and the step alone; ranks take consecutive shares
    of it. A run may therefore stop and go on with another number of ranks and sees the same global batches.
    """

    def __init__(
        self, megabytes: float = 4.0, context: int = 128, seed: int = 0, files: Iterable[Path] | None = None
    ) -> None:
        """Read the text.

        Args:
            megabytes: Total size of the two splits, in millions of bytes.
            context: Bytes per row.
            seed: Seed of the batches.
            files: Others than the standard library's, in order.
        """
        self.context = context
        self.seed = seed
        splits: tuple[list[bytes], list[bytes]] = ([], [])
        room = int(megabytes * 1e6)
        for index, path in enumerate(stdlib_files() if files is None else files):
            content = path.read_bytes()[:room]
            splits[index % VALIDATION_EVERY == VALIDATION_EVERY - 1].append(content)
            room -= len(content)
            if room <= 0:
                break
        self.train, self.validation = (np.frombuffer(b"".join(files), dtype=np.uint8) for files in splits)
        for name, text in (("training", self.train), ("validation", self.validation)):
            if len(text) <= context:
                raise ValueError(f"{name} text has {len(text)} bytes, needs {context + 1}: raise megabytes")

    def batch(self, step: int, rank: int, world: int, batch_size: int) -> Batch:
        """Return this rank's share of training step `step`.

        Args:
            step: Number of the step; equal steps give equal batches.
            rank: This rank, `0 <= rank < world`.
            world: Number of ranks.
            batch_size: Rows of the global batch; at least `world`. Shares differ by at most one row.

        Raises:
            ValueError: There are fewer rows than ranks.
        """
        return self._draw(self.train, (self.seed, 0, step), rank, world, batch_size)

    def validation_batches(self, count: int, rank: int, world: int, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's share of `count` fixed validation batches; arguments as in `batch`."""
        for index in range(count):
            yield self._draw(self.validation, (self.seed, 1, index), rank, world, batch_size)

    def _draw(self, text: np.ndarray, key: tuple[int, ...], rank: int, world: int, batch_size: int) -> Batch:
        if batch_size < world:
            raise ValueError(f"a batch of {batch_size} rows cannot be shared by {world} ranks")
        starts = np.random.default_rng(key).integers(0, len(text) - self.context, size=batch_size)
        share = starts[rank * batch_size // world : (rank + 1) * batch_size // world]
        rows = torch.from_numpy(np.stack([text[s : s + self.context + 1] for s in share]).astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


def stdlib_files() -> list[Path]:
    """Return the standard library's `*.py` files in sorted order, without tests and installed packages."""
    files: list[Path] = []
    for directory, below, names in os.walk(sysconfig.get_paths()["stdlib"]):
        below[:] = set(below) - SKIPPED_DIRECTORIES  # there may be a hundred thousand files in these
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(files)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean cross-entropy in nats per byte over `batches`."""
    total, count = 0.0, 0
    for inputs, targets in batches:
        total += loss_sum(model, inputs, targets).item()
        count += targets.numel()
    return total / count
