"""Matrix factorization: how often words of Python's standard library come near each other.

The matrix has a row and a column for each of the most frequent words. Known are the entries of pairs that occur: the
logarithm of how often the second follows the first within a few words. As with ratings of films, most entries are not
known, and some rows have many more than others.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dsq_ckpt.core.arrays import F32, I64
from evaluation.language import stdlib_bytes
from evaluation.workloads import Plan, Workload, register, seeded

WORDS, NEAR = 2000, 5
"""Words that have a row and a column; places after a word that count as near it."""
HELD_OUT_EVERY = 10
HELD_OUT_ROWS = 4096


class Entries(NamedTuple):
    """Known entries of a matrix: int64 `(count, 2)` of row and column, and their values, float32."""

    places: I64
    values: F32


@cache
def load_entries() -> tuple[Entries, Entries]:
    """Return the entries to train on and those held out: every tenth of a random order that is always the same."""
    words = re.findall(rb"[A-Za-z_]\w*", stdlib_bytes())
    number = {word: place for place, (word, _) in enumerate(Counter(words).most_common(WORDS))}
    text = np.array([number.get(word, -1) for word in words])
    pairs = [
        (first * WORDS + second)[(first >= 0) & (second >= 0)]
        for first, second in ((text[:-apart], text[apart:]) for apart in range(1, NEAR + 1))
    ]
    unique_pairs, counts = np.unique(np.concatenate(pairs), return_counts=True)
    order = np.random.default_rng(0).permutation(len(unique_pairs))
    places = np.stack(np.divmod(unique_pairs[order], WORDS), axis=1)
    values = np.log(counts[order]).astype(np.float32)
    values -= values.mean()
    held_out = np.arange(len(unique_pairs)) % HELD_OUT_EVERY == 0
    return Entries(places[~held_out], values[~held_out]), Entries(places[held_out], values[held_out])


class Factors(nn.Module):
    """Two matrices of `width` columns and two vectors: an entry is a product of rows and a sum of both vectors."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.row_means, self.column_means = nn.Embedding(WORDS, 1), nn.Embedding(WORDS, 1)
        for factor in (self.rows, self.columns):
            nn.init.normal_(factor.weight, std=0.1)
        for mean in (self.row_means, self.column_means):
            nn.init.zeros_(mean.weight)

    def forward(self, places: Tensor) -> Tensor:
        """Return the entries at int64 `places` of `(count, 2)`."""
        row, column = places.unbind(1)
        product = (self.rows(row) * self.columns(column)).sum(1)
        entries: Tensor = product + self.row_means(row).squeeze(1) + self.column_means(column).squeeze(1)
        return entries


class FactorizationWorkload(Workload):
    """SGD on known entries of the matrix; loss is the mean squared error, accuracy the share within half a nat."""

    def __init__(self, name: str, plan: Plan, seed: int) -> None:
        with seeded(seed):
            model = Factors()
        self.train_entries, self.test_entries = load_entries()
        super().__init__(name, plan, seed, model, torch.optim.SGD(model.parameters(), lr=plan.rate))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return known entries, drawn at random."""
        count = len(self.train_entries.values)
        chosen = np.random.default_rng((self.seed, step)).integers(0, count, size=self.plan.batch_size)
        return tuple(torch.from_numpy(part[chosen]) for part in self.train_entries)  # type: ignore[return-value]

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the entries that are not trained on."""
        places, values = map(torch.from_numpy, self.test_entries)
        yield from zip(places.split(HELD_OUT_ROWS), values.split(HELD_OUT_ROWS), strict=True)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the squared error."""
        return nn.functional.mse_loss(outputs, targets, reduction=reduction)

    def accuracy(self) -> float:
        """Return the share of held-out entries that the model is within half a nat of."""
        return self._mean_over_held_out(lambda outputs, targets: ((outputs - targets).abs() < 0.5).sum())

    def data_checksum(self) -> int:
        """Return the checksum of all entries used."""
        checksum = 0
        for array in (*self.train_entries, *self.test_entries):
            checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
        return checksum


@register("mf")
def mf(name: str, seed: int) -> Workload:
    """Make the factorization of 68 thousand parameters."""
    return FactorizationWorkload(name, Plan(800, 50, batch_size=2500, rate=10.0, floor=1.0), seed)
