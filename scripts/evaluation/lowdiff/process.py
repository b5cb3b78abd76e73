"""A training in a process of its own, which can be told what to do, and killed."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import xxhash

from evaluation.lowdiff.base import keep_to, live_tensors
from evaluation.lowdiff.durable import evict
from evaluation.lowdiff.loop import Loop, Setting, Training
from evaluation.lowdiff.systems import compresses, make

PATIENCE = 600.0
"""Seconds that a process may take for what it was told."""


class Cores(NamedTuple):
    """CPUs of training and of checkpointing; None: any."""

    training: int | None
    checkpointing: int | None

    @classmethod
    def available(cls) -> Cores:
        """Return the first two CPUs of this process; if there is one, training and checkpointing share it."""
        usable = sorted(os.sched_getaffinity(0))
        return cls(usable[0], usable[min(1, len(usable) - 1)])


ANY = Cores(None, None)


@dataclass(frozen=True)
class Job:
    """What a process trains, and how it is checkpointed.

    Attributes:
        setting: What is trained.
        system: Name of the system of checkpointing.
        directory: Where its checkpoints go.
        cores: CPUs of the two.
        options: Of the system.
    """

    setting: Setting
    system: str
    directory: Path
    cores: Cores = ANY
    options: Mapping[str, Any] = field(default_factory=dict)


class WorkerError(RuntimeError):
    """A process died, or failed at what it was told; the message says how."""


class Worker:
    """A process that waits for what it is told; idle, it takes no time from others.

    Args:
        job: Of the process.
    """

    def __init__(self, job: Job) -> None:
        context = processes()
        self.job = job
        self._connection, child_connection = context.Pipe()
        self._done = context.RawValue("q", 0)
        self._process = context.Process(target=_serve, args=(child_connection, self._connection, job, self._done))
        self._process.start()
        child_connection.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop() if kind is None else self.kill()

    @property
    def done(self) -> int:
        """Steps that are done, also while it trains."""
        return int(self._done.value)

    def call(self, what: str, *arguments: Any, timeout: float = PATIENCE) -> Any:
        """Send a call, and wait for its result.

        Args:
            what: Name of a method of `_Service`.
            arguments: Of that.
            timeout: Seconds.

        Raises:
            WorkerError: It failed, died, or took too long.
        """
        self.tell(what, *arguments)
        return self.result(timeout)

    def tell(self, what: str, *arguments: Any) -> None:
        """Send a call, without waiting."""
        self._connection.send((what, arguments))

    def result(self, timeout: float = PATIENCE) -> Any:
        """Wait for the outcome of what it was told.

        Raises:
            WorkerError: It failed, died, or took too long.
        """
        name = self.job.system
        try:
            if not self._connection.poll(timeout):
                raise WorkerError(f"{name}: no answer within {timeout:.0f} s")
            failed, outcome = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(5)
            raise WorkerError(f"{name}: the process ended with status {self._process.exitcode}") from error
        if failed:
            raise WorkerError(f"{name}: {outcome}")
        return outcome

    def wait_for(self, step: int, timeout: float = PATIENCE) -> None:
        """Return when it has done so many steps."""
        deadline = time.monotonic() + timeout
        while self.done < step:
            if time.monotonic() > deadline or not self._process.is_alive():
                raise WorkerError(f"{self.job.system}: step {step} was not reached, the last is {self.done}")
            time.sleep(0.001)

    def kill(self) -> None:
        """Kill the process with SIGKILL, in the middle of its work. Processes that it started continue."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def stop(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@functools.cache
def processes() -> ForkServerContext:
    """Start the server that forks processes: it has imported all modules and done nothing else, so they start fast."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # the first optimizer imports it
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # which it is not told otherwise
    try:
        ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


class _Service:
    """What a process can be told to do."""

    def __init__(self, job: Job, done: Any) -> None:
        keep_to(job.cores.training)
        self._job = job
        self._counter = done
        self._training = Training(job.setting)
        self._system = make(job.system, job.directory, job.cores.checkpointing, job.setting.compressor, job.options)
        self._loop = Loop(self._training)

    def prepare(self) -> float:
        """Begin to checkpoint; seconds that it took."""
        started = time.perf_counter()
        if compresses(self._job.system):
            self._training.leave_compression()
        self._loop.begin(self._system)
        return time.perf_counter() - started

    def train(self, steps: int, lead: int = 0) -> Any:
        """Train; the `Block` of the steps after the first `lead`."""
        return self._loop.run(steps, lead, self._count)

    def lag(self) -> float:
        """Train one step; seconds from its end until the system has no more work."""
        stall: float = self.train(1).stalls[0]
        started = time.perf_counter()
        self._system.wait()
        return stall + time.perf_counter() - started

    def retrain(self, steps: int) -> float:
        """Train without checkpoints; seconds."""
        started = time.perf_counter()
        for _ in range(steps):
            self._training.step()
        return time.perf_counter() - started

    def persisted(self, steps: int) -> list[int]:
        """Train; steps of the states that were found on disk, looking after every step."""
        persisted_steps: list[int] = []
        for _ in range(steps):
            self.train(1)
            newest = getattr(self._system, "persisted", 0)
            if newest not in persisted_steps:
                persisted_steps.append(newest)
        return persisted_steps

    def costs(self) -> dict[str, Any] | None:
        """Return LowDiff's own measurements, after a recovery."""
        costs: dict[str, Any] | None = getattr(self._system, "costs", lambda: None)()
        return costs

    def wait(self) -> None:
        """Wait for the system's work, if it began."""
        self._loop.system.wait()

    def finish(self) -> dict[str, int]:
        """End checkpointing; bytes that it wrote, that are there, and of a state in memory."""
        self._system.finish()
        return self.bytes()

    def bytes(self) -> dict[str, int]:
        """Return the bytes written, the bytes on disk, and the bytes of a state in memory."""
        return {
            "written": self._system.bytes_written, "stored": self._system.bytes_stored,
            "state": self._training.state_bytes(),
        }

    def about(self) -> dict[str, Any]:
        """Return the settings that the system chose."""
        names = ("every", "batch", "snapshot_every")
        return {name: getattr(self._system, name) for name in names if hasattr(self._system, name)}

    def recover(self, cold: bool = False) -> tuple[int, float]:
        """Recover; return the step, and seconds. With `cold`, the system's files are read from the disk."""
        if cold and self._job.directory.exists():
            evict(self._job.directory)
        started = time.perf_counter()
        step = self._system.recover(self._training.model, self._training.optimizer)
        seconds = time.perf_counter() - started
        self._training.go_to(step)
        self._count()
        return step, seconds

    def digest(self) -> str:
        """Return the checksum of all state that a step changes."""
        checksum = xxhash.xxh3_128()
        for tensor in live_tensors(self._training.model, self._training.optimizer).values():
            checksum.update(tensor.contiguous().numpy().data)
        return checksum.hexdigest()

    def digests(self, steps: int) -> list[str]:
        """Train step by step; checksums before the first and after each."""
        digests = [self.digest()]
        for _ in range(steps):
            self.train(1)
            digests.append(self.digest())
        return digests

    def tensors(self) -> dict[str, Any]:
        """Yield all state that a step changes, as arrays."""
        live = live_tensors(self._training.model, self._training.optimizer)
        return {name: tensor.numpy().copy() for name, tensor in live.items()}

    def _count(self) -> None:
        self._counter.value = self._training.done


def _serve(connection: Connection, other: Connection, job: Job, done: Any) -> None:
    """Do what is told, until nobody is there to tell."""
    other.close()  # inherited: it would keep this end from seeing that the other one is gone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this
    service: _Service | None = None
    while True:
        try:
            what, arguments = connection.recv()
        except EOFError:
            return
        try:
            service = service or _Service(job, done)
            command: Callable[..., Any] = getattr(service, what)
            answer = (False, command(*arguments))
        except Exception as error:
            answer = (True, f"{what}: {type(error).__name__}: {error}")
        connection.send(answer)
