"""Gemini (Wang et al.; SOSP '23): every iteration a copy of the state in the memory of a peer.

The peer is a process of its own, as if it were another machine: it outlives the training process. Its memory holds two
buffers, so that one complete copy is there at any time. The traffic goes in chunks, spread over the time in which the
network is idle: here from one update to the next, since one rank has no gradients to synchronize. The peer seldom
writes a copy to disk. A recovery copies from the peer's memory if that is there, else it reads the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsq_ckpt.lowdiff.arena import Arena
from evaluation.lowdiff.base import Layout, OnDisk, copy_all, keep_to, live_tensors, read_state
from evaluation.lowdiff.durable import SUFFIX, Host, steps_in

CHUNK = 1 << 20
"""Bytes of a piece of traffic."""
SPREAD = 0.7
"""Share of the time between updates that the traffic is spread over; the rest is for iterations that are shorter."""
PERSIST_EVERY = 10_000
"""Steps between writes to disk; the paper has them hours apart."""
_BUFFERS = 2
_HEAD = 64  # bytes before the buffers: which step each of them holds
_NOTHING, _INCOMPLETE = 0, -1  # in the place of a step


class Gemini(OnDisk):
    """The system.

    Args:
        directory: Where checkpoints go that are written to disk; each has its peer.
        every: Iterations between copies.
        core: CPU for the traffic and for the peer.
        persist_every: Iterations between writes to disk.
        link: Bytes per second to the peer's memory; None: as fast as memory is.
        owner: Process that the peer ends with; by default the one that started this one.
    """

    def __init__(
        self, directory: Path, every: int = 1, core: int | None = None, persist_every: int = PERSIST_EVERY,
        link: float | None = None, owner: int | None = None,
    ) -> None:
        super().__init__(directory, every, core)
        self._persist_every = persist_every
        self._link = link
        self._owner = os.getppid() if owner is None else owner
        self._name = _peer_of(directory)
        self._host: Host | None = None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Connect to the peer of this directory, or start it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        live = list(live_tensors(model, optimizer).values())
        layout = Layout(live)
        self._size = layout.size
        if self._host is None:
            self._host = Host.start(self._name, _HEAD + _BUFFERS * layout.size, self._core, self._owner)
        self._arena = Arena(self._host.descriptor, self._host.size)
        self._steps = self._arena.tensor[: 8 * _BUFFERS].view(torch.int64)
        views = [layout.views(memory) for memory in self._memories()]
        self._chunks = [list(_chunks(live, view)) for view in views]
        self._sender = ThreadPoolExecutor(1, initializer=keep_to, initargs=(self._core,))
        self._sending: Future[None] | None = None
        self._hurry = threading.Event()
        self._persisting: int | None = None  # the buffer that is being written to disk
        self._persisted = step
        self._spans: deque[float] = deque(maxlen=16)
        self._began = 0.0
        self._hook = optimizer.register_step_pre_hook(self._before_update)

    def after_step(self, step: int) -> None:
        """Begin to send a copy."""
        self._began = time.perf_counter()
        if step % self._every == 0:
            self._wait_for_copy()
            target = int(self._steps.argmin())
            if target == self._persisting:
                self._wait_for_disk()
            self._hurry.clear()
            span = statistics.median(self._spans) if self._spans else 0.0
            self._sending = self._sender.submit(self._send, step, target, SPREAD * span)

    def wait(self) -> None:
        """Wait until the last copy is complete, and a write to disk that is under way."""
        self._wait_for_copy()
        self._wait_for_disk()
        self._began = 0.0

    def finish(self) -> None:
        """Write the last copy to disk, and end the peer."""
        self._wait_for_copy()
        self._persist(int(self._steps.argmax()))
        self._wait_for_disk()
        self._hook.remove()
        self._sender.shutdown()
        if self._host is not None:
            self._host.stop()
            self._host = None
        self._arena.close()

    def recover(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Copy the newest complete copy from the peer, or from disk if there is no peer."""
        live = list(live_tensors(model, optimizer).values())
        layout = Layout(live)
        with contextlib.suppress(OSError):
            self._host = Host(self._name)
            arena = Arena(self._host.descriptor, self._host.size)
            steps = arena.tensor[: 8 * _BUFFERS].view(torch.int64)
            newest = int(steps.argmax())
            if int(steps[newest]) > _NOTHING:
                start = _HEAD + newest * layout.size
                copy_all(layout.views(arena.tensor[start : start + layout.size]), live)
                return int(steps[newest])
        by_step = steps_in(self._directory)
        return read_state(by_step[max(by_step)], live) if by_step else 0

    def _memories(self) -> Iterator[Tensor]:
        for number in range(_BUFFERS):
            start = _HEAD + number * self._size
            yield self._arena.tensor[start : start + self._size]

    def _send(self, step: int, target: int, span: float) -> None:
        """Copy the state chunk by chunk, each when its time has come."""
        self._steps[target] = _INCOMPLETE
        started, chunks, sent = time.perf_counter(), self._chunks[target], 0
        for number, (sources, targets) in enumerate(chunks):
            due = started + span * number / len(chunks)
            if not self._hurry.is_set() and (early := due - time.perf_counter()) > 0:
                self._hurry.wait(early)
            copy_all(sources, targets)
            sent += sum(source.nbytes for source in sources)
            if self._link is not None and (early := started + sent / self._link - time.perf_counter()) > 0:
                time.sleep(early)
        self._steps[target] = step
        if step - self._persisted >= self._persist_every:
            self._wait_for_disk()
            self._persisted = step
            self._persist(target)

    def _persist(self, source: int) -> None:
        step = int(self._steps[source])
        if step > _NOTHING and self._host is not None:
            self._persisting = source
            path = self._directory / f"{step:09d}{SUFFIX}"
            self._host.persist(_HEAD + source * self._size, self._size, path, step)

    def _before_update(self, *_: Any) -> None:
        if self._began:
            self._spans.append(time.perf_counter() - self._began)
        self._wait_for_copy()

    def _wait_for_copy(self) -> None:
        if self._sending is not None:
            self._hurry.set()
            self._sending.result()
            self._sending = None

    def _wait_for_disk(self) -> None:
        if self._persisting is not None and self._host is not None:
            self._written += sum(self._host.wait())
            self._persisting = None


def copies(directory: Path) -> list[int]:
    """Return the steps of the copies that the peer of a directory holds; -1 for an incomplete copy.

    Raises:
        OSError: There is no peer.
    """
    host = Host(_peer_of(directory))
    arena = Arena(host.descriptor, host.size)
    steps: list[int] = arena.tensor[: 8 * _BUFFERS].view(torch.int64).tolist()
    arena.close()
    host.close()
    return steps


def _peer_of(directory: Path) -> str:
    return f"gemini-{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:24]}"


def _chunks(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield pairs of tensors, in groups of about `CHUNK` bytes; larger tensors are cut."""
    group: tuple[list[Tensor], list[Tensor]] = ([], [])
    size = 0
    for source, target in zip(sources, targets, strict=True):
        count = max(1, CHUNK // source.element_size())
        for left, right in zip(source.view(-1).split(count), target.view(-1).split(count), strict=True):
            group[0].append(left)
            group[1].append(right)
            size += left.nbytes
            if size >= CHUNK:
                yield group
                group, size = ([], []), 0
    if group[0]:
        yield group
