"""Ranks that are threads of this process."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt


class ThreadRank:
    """A communicator of one of them; `sent` has the bytes of each of its sums."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._barrier = rank, len(values), values, barrier
        self.sent: list[int] = []

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def sum(self, counts: npt.NDArray[np.int64]) -> None:
        self.sent.append(counts.nbytes)
        counts[...] = np.sum(self.gather(counts.copy()), axis=0)

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


def make_thread_ranks(size: int, timeout: float = 300) -> list[ThreadRank]:
    """Return the communicators of `size` threads, which wait for each other for that many seconds at most."""
    values, barrier = [None] * size, threading.Barrier(size, timeout=timeout)
    return [ThreadRank(rank, values, barrier) for rank in range(size)]
