"""The training process's client of its checkpointing process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

import dsq_ckpt
from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.lowdiff.arena import Arena, align
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed

_POLL_SECONDS = 1.0


class ProcessGone(SaveFailed):
    """Raised when the checkpointing process died or failed; `self_reported` is True if the process sent the reason."""

    self_reported = False


class CompletionEvent(Protocol):
    """An event with the methods of `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class WorkerClient:
    """A client that starts a checkpointing process, and exchanges messages and shared memory with it.

    Args:
        begin: first message; see `server.Server`.
        queue: number of slots of shared memory, and so the largest number of steps in transit.
        timeout: seconds after which a process that accepts no message is treated as dead.
        module: Python module that the process runs.

    Attributes:
        ready: report of the process after its start; None while it is starting.
        reports: received reports that were not handled yet, such as "written" and "snapshot".
        saving: True while a snapshot is under way.
        waited: seconds that training waited for a free slot.
    """

    def __init__(
        self, begin: Mapping[str, Any], queue: int, timeout: float, module: str = "dsq_ckpt.lowdiff.process"
    ) -> None:
        self._timeout = timeout
        self.ready: dict[str, Any] | None = None
        self.reports: list[dict[str, Any]] = []
        self.saving = False
        self.waited = 0.0
        self._arenas: dict[int, Arena] = {}
        self._unsent: deque[tuple[CompletionEvent | None, dict[str, Any], Arena | None]] = deque()
        self._free = deque(range(queue))
        self._staging: Arena | None = None
        self._stderr = os.memfd_create("errors")  # stderr of the process
        self._channel, worker_channel = Channel.pair()
        root = str(Path(dsq_ckpt.__file__).resolve().parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            # multiprocessing's spawn would import the user's script again, which then needs a `__main__` guard.
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(worker_channel.fileno())], pass_fds=[worker_channel.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._stderr,
                start_new_session=True, env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            raise ProcessGone(f"the checkpointing process cannot be started: {error}") from error
        finally:
            worker_channel.close()
        self.send(begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any], arena: Arena | None = None) -> None:
        """Send a message, after all pending messages.

        Raises:
            ProcessGone: the process ended or failed.
        """
        self._send_ready(wait=True)
        self._send(message, arena)

    def _send(self, message: Mapping[str, Any], arena: Arena | None) -> None:
        try:
            self._channel.send(dict(message), arena, self._timeout)
        except ChannelClosed:
            self.poll()  # the process may have sent the reason
            self._raise_gone()

    def send_when(self, ready: CompletionEvent | None, message: Mapping[str, Any], arena: Arena | None = None) -> None:
        """Send a message after `ready` has completed, in order. Later calls check for completion.

        Raises:
            ProcessGone: the process ended or failed.
        """
        self._unsent.append((ready, dict(message), arena))
        self._send_ready(wait=False)

    def _send_ready(self, wait: bool) -> None:
        while self._unsent:
            ready, message, arena = self._unsent[0]
            if ready is not None and not wait and not ready.query():
                return
            if ready is not None:
                ready.synchronize()
            self._unsent.popleft()
            self._send(message, arena)

    def poll(self, timeout: float = 0.0) -> bool:
        """Receive reports; return whether any arrived within `timeout` seconds.

        Raises:
            ProcessGone: the process ended, or reported a failure.
        """
        arrived = False
        while True:
            try:
                received = self._channel.receive(timeout)
            except ChannelClosed:
                self._raise_gone()
            if received is None:
                return arrived
            arrived, timeout = True, 0.0
            self._handle_report(received[0])

    def acquire_slot(self) -> int:
        """Return a free slot. Wait until a slot is free, so that the number of steps in transit is bounded.

        Raises:
            ProcessGone: the process ended or failed, or freed no slot within the timeout.
        """
        self._send_ready(wait=False)
        started = time.perf_counter()
        while not self._free:
            self._send_ready(wait=True)
            if not self.poll(_POLL_SECONDS) and time.perf_counter() - started > self._timeout:
                raise ProcessGone(
                    f"the checkpointing process ({self.pid}) is there, but took no step for {self._timeout:.0f} s; its "
                    "disk may hang"
                )
        self.waited += time.perf_counter() - started
        return self._free.popleft()

    def release(self, slot: int) -> None:
        """Free a slot that was not sent, and its memory, which the process may not have mapped."""
        arena = self._arenas.pop(slot, None)
        if arena is not None:
            arena.close()
        self._free.append(slot)

    def ensure_arena(self, slot: int, size: int) -> tuple[Arena, bool]:
        """Return a slot's shared memory of at least `size` bytes, and whether it is newly allocated."""
        arena = self._arenas.get(slot)
        if arena is not None and arena.size >= size:
            return arena, False
        if arena is not None:
            arena.close()
        self._arenas[slot] = Arena.create(align(size + size // 8))
        return self._arenas[slot], True

    def arena(self, slot: int) -> Arena:
        """Return the shared memory of a slot."""
        return self._arenas[slot]

    def ensure_staging(self, size: int) -> tuple[Arena, bool]:
        """Return shared memory for a snapshot, and whether it is newly allocated. No snapshot may be under way."""
        assert not self.saving
        if self._staging is not None and self._staging.size >= size:
            return self._staging, False
        if self._staging is not None:
            self._staging.close()
        self._staging = Arena.create(align(size))
        return self._staging, True

    def wait(self, condition: str, timeout: float) -> None:
        """Wait until the process is "ready", or has "saved" the current snapshot.

        Raises:
            ProcessGone: the process ended or failed, or the wait took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (self.ready is None) if condition == "ready" else self.saving:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ProcessGone(f"the checkpointing process was not {condition} within {timeout:.0f} s")
            run_pending_handlers()
            self.poll(min(remaining, _POLL_SECONDS))

    def close(self, timeout: float | None, done: bool = False) -> str | None:
        """Request that the process finishes its writes and ends; return a problem as text, or None.

        Args:
            timeout: seconds to wait; None to return immediately, without a problem.
            done: True if training ended without a failure; stored for recovery.
        """
        problem, failure = None, "the checkpointing process failed"
        try:
            if timeout is not None:
                self._send_ready(wait=True)
            try:
                send_timeout = _POLL_SECONDS if timeout is None else timeout
                self._channel.send({"kind": "close", "done": done}, timeout=send_timeout)
            except ChannelClosed:
                self.poll()  # the process may have sent the reason
                raise
            if timeout is not None:
                deadline = time.monotonic() + timeout
                while self._process.poll() is None and time.monotonic() < deadline:
                    self.poll(0.05)
                self.poll()  # receive the last reports
        except ProcessGone as error:
            problem = str(error) if error.self_reported else None
            failure = str(error)
        except ChannelClosed as error:
            failure = str(error)
        if timeout is not None:
            try:
                problem = problem or (None if self._process.wait(0.5) == 0 else failure)
            except subprocess.TimeoutExpired:
                problem = problem or "the checkpointing process still has work to do, and goes on with it"
        for ready, _, _ in self._unsent:
            if ready is not None:
                ready.synchronize()  # a GPU may still write into the memory released below
        self._unsent.clear()
        self._channel.close()
        os.close(self._stderr)
        for arena in (*self._arenas.values(), *filter(None, [self._staging])):
            arena.close()
        self._arenas.clear()
        self._staging = None
        return problem

    def _handle_report(self, report: dict[str, Any]) -> None:
        kind = report["kind"]
        if kind == "free":
            self._free.append(report["slot"])
        elif kind == "ready":
            self.ready = report
        elif kind == "failed":
            error = ProcessGone(report["text"])
            error.self_reported = True
            raise error
        elif kind == "unfaithful":
            raise NotSparse(report["name"])
        else:
            if kind in ("snapshot", "unsaved"):
                self.saving = False
            self.reports.append(report)

    def _raise_gone(self) -> NoReturn:
        """Raise a `ProcessGone` with the exit status and the last line of the process's stderr."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        fate = "is gone" if status is None else f"was killed by signal {-status}" if status < 0 else f"ended ({status})"
        size = os.fstat(self._stderr).st_size
        printed = os.pread(self._stderr, 4096, max(size - 4096, 0)).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(printed) if line.strip()), "")
        raise ProcessGone(f"the checkpointing process {fate}{last and ': '}{last}")


class NotSparse(ProcessGone):
    """Raised when a gradient is non-zero outside of the support that its compressor reported."""

    self_reported = True

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the gradient of '{name}' is not zero where its compression had left it so: something changed it after "
            "it was synchronized; from now on gradients are logged whole"
        )


class ArenaLayout:
    """The layout of consecutive tensors in an arena.

    Attributes:
        size: total size in bytes.
    """

    def __init__(self) -> None:
        self.size = 0

    def add(self, size: int) -> int:
        """Reserve `size` bytes; return their offset."""
        offset, self.size = self.size, align(self.size + size)
        return offset


def nbytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()
