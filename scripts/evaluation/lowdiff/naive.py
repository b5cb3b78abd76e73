"""Naive differential checkpoints: the difference of two states in every iteration (LowDiff, equations 5 and 6).

As LowDiff's comparison has it (section VIII, after Check-N-Run, Eisenman et al.; NSDI '22): of the difference of each
weight tensor the largest elements are kept, of the optimizer's state everything. What is left out of the weights is
lost until the next full checkpoint; moments come back up to the rounding of the sums.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evaluation.lowdiff.base import Layout, OnDisk, copy_all, keep_to, live_tensors, read_state
from evaluation.lowdiff.durable import HEADER, MAGIC, SUFFIX, read_raw, steps_in, write_durably

RATIO = 0.01
FULL_EVERY = 50
"""Iterations between full checkpoints."""
_DIFFERENCES = "differences"


class _Difference(NamedTuple):
    """A difference of two states, in one piece of memory.

    Attributes:
        memory: All of it, uint8.
        places: For each weight tensor flat indices, int32.
        values: For each weight tensor what is added there.
        dense: For each other tensor what is added to it.
    """

    memory: Tensor
    places: list[Tensor]
    values: list[Tensor]
    dense: list[Tensor]

    @classmethod
    def empty(cls, weights: list[Tensor], others: list[Tensor], ratio: float) -> _Difference:
        counts = [max(1, math.ceil(ratio * tensor.numel())) for tensor in weights]
        parts = [torch.empty(count, dtype=torch.int32) for count in counts]
        parts += [torch.empty(count, dtype=tensor.dtype) for count, tensor in zip(counts, weights, strict=True)]
        layout = Layout([*parts, *others])
        memory = torch.zeros(layout.size, dtype=torch.uint8)
        views, count = layout.views(memory), len(weights)
        return cls(memory, views[:count], views[count : 2 * count], views[2 * count :])


class NaiveDifferences(OnDisk):
    """The system.

    Args:
        directory: Where checkpoints go.
        every: Iterations between differences.
        core: CPU for writes.
        full_every: Iterations between full checkpoints, a multiple of `every`.
        ratio: Share of the weights whose difference is kept.
    """

    def __init__(
        self, directory: Path, every: int = 1, core: int | None = None, full_every: int = FULL_EVERY,
        ratio: float = RATIO,
    ) -> None:
        super().__init__(directory, every, core)
        self._full_every = max(every, full_every // every * every)
        self._ratio = ratio

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Write the state as it is: differences add up to it."""
        (self._directory / _DIFFERENCES).mkdir(parents=True, exist_ok=True)
        self._weights, self._others = _parts(model, optimizer)
        self._live = self._weights + self._others
        layout = Layout(self._live)
        self._full = torch.zeros(layout.size, dtype=torch.uint8)
        self._full_views = layout.views(self._full)
        self._before = [tensor.clone() for tensor in self._live]
        self._made = [_Difference.empty(self._weights, self._others, self._ratio) for _ in range(2)]
        self._writer = ThreadPoolExecutor(1, initializer=keep_to, initargs=(self._core,))
        self._writing: list[Future[None]] = []
        self._write_full(step)
        self.wait()

    def after_step(self, step: int) -> None:
        """Take the difference, and have it written; training waits for the write before, not for this one."""
        if step % self._every:
            return
        # Two pieces of memory take turns: what was begun before the last write has to be there before they are reused.
        difference = self._made[step // self._every % 2]
        self._take(difference)
        copy_all(self._live, self._before)
        self._wait_for_all_but(0)
        self._submit(self._directory / _DIFFERENCES, step, difference.memory)
        if step % self._full_every == 0:
            self._write_full(step)

    def wait(self) -> None:
        """Wait for all writes."""
        self._wait_for_all_but(0)

    def finish(self) -> None:
        """Wait, and end the thread."""
        self.wait()
        self._writer.shutdown()

    def recover(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Read the newest full checkpoint and add every difference after it."""
        fulls = steps_in(self._directory)
        if not fulls:
            return 0
        weights, others = _parts(model, optimizer)
        step = read_state(fulls[max(fulls)], weights + others)
        difference = _Difference.empty(weights, others, self._ratio)
        differences = steps_in(self._directory / _DIFFERENCES)
        while (path := differences.get(step // self._every * self._every + self._every)) is not None:
            step = read_raw(path, difference.memory.numpy().data)
            _add(difference, weights, others)
        return step

    @torch.no_grad()
    def _take(self, into: _Difference) -> None:
        count = len(self._weights)
        for number, (now, before) in enumerate(zip(self._weights, self._before[:count], strict=True)):
            difference = (now - before).view(-1)
            places = difference.abs().topk(len(into.places[number]), sorted=False).indices
            into.places[number].copy_(places)
            into.values[number].copy_(difference[places])
        for now, before, target in zip(self._others, self._before[count:], into.dense, strict=True):
            torch.sub(now, before, out=target)

    def _write_full(self, step: int) -> None:
        self._wait_for_all_but(1)  # the difference just submitted may go on
        copy_all(self._live, self._full_views)
        self._submit(self._directory, step, self._full)

    def _submit(self, directory: Path, step: int, memory: Tensor) -> None:
        self._writing.append(self._writer.submit(self._write, directory, step, memory))

    def _write(self, directory: Path, step: int, memory: Tensor) -> None:
        head = HEADER.pack(MAGIC, step, memory.nbytes)
        path = directory / f"{step:09d}{SUFFIX}"
        self._written += write_durably(path, [head, memory.numpy().data])
        if directory == self._directory:  # a full checkpoint: nothing before it is needed any more
            for old in (directory, directory / _DIFFERENCES):
                for before, file in steps_in(old).items():
                    if before < step or (before == step and old != directory):
                        file.unlink()

    def _wait_for_all_but(self, last: int) -> None:
        while len(self._writing) > last:
            self._writing.pop(0).result()


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights, and all other state that a step changes."""
    live = live_tensors(model, optimizer)
    weights = [tensor for name, tensor in live.items() if name.startswith("model.")]
    return weights, [tensor for name, tensor in live.items() if not name.startswith("model.")]


@torch.no_grad()
def _add(difference: _Difference, weights: list[Tensor], others: list[Tensor]) -> None:
    for tensor, places, values in zip(weights, difference.places, difference.values, strict=True):
        tensor.view(-1)[places.long()] += values
    for tensor, dense in zip(others, difference.dense, strict=True):
        tensor += dense
