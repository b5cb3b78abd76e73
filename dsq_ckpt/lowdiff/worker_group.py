"""Checkpointing processes of all ranks, seen from training: started, lost, and started again, together."""

from __future__ import annotations

import atexit
import os
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from dsq_ckpt.core.interrupts import held_signals
from dsq_ckpt.core.notices import warn
from dsq_ckpt.distributed.comm import Communicator, run_on_all_ranks
from dsq_ckpt.errors import CheckpointExists, ConfigError, SaveFailed
from dsq_ckpt.lowdiff import segments, snapshots
from dsq_ckpt.lowdiff.capture import Captured
from dsq_ckpt.lowdiff.consensus import Consensus, cpu_group
from dsq_ckpt.lowdiff.locks import wait_for_writers
from dsq_ckpt.lowdiff.memory import Survivors
from dsq_ckpt.lowdiff.recovery import Recovered
from dsq_ckpt.lowdiff.train_state import Entry, TrainState
from dsq_ckpt.lowdiff.worker_client import NotSparse, ProcessGone, WorkerClient

_POSTED = ("broken", "starting", "saving", "wanted", "whole", "restart")
_START = 120.0
_PAUSES = (0.0, 5.0, 30.0, 120.0, 600.0)
"""Seconds before the checkpointing processes are started again, after as many failures in a row."""


class WorkerGroup(ABC):
    """The checkpointing process of this rank, and what all ranks agree on about theirs.

    They are *running*, or *waiting* until rank 0 says that they are started again, or *starting*. What happens is
    decided by all ranks together, a step late (`Consensus`), so that all of them do it at the same step.

    Args:
        run: the run directory.
        subject: what is logged.
        comm: of the ranks.
        base: how snapshots are stored; see `snapshots.config_of`.
        queue, keep, cores, timeout: see `GradientLog`.
    """

    def __init__(
        self, run: Path, subject: TrainState, comm: Communicator, base: str | Mapping[str, Any], queue: int, keep: int,
        cores: Collection[int] | None, timeout: float,
    ) -> None:
        for name, value in (("queue", queue), ("keep", keep)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; expected a positive number")
        if wrong := [core for core in cores or () if core not in range(os.cpu_count() or 1)]:
            raise ConfigError(f"cores: there is no CPU {wrong[0]!r}; this machine has 0 to {(os.cpu_count() or 1) - 1}")
        self.run = run
        self._subject = subject
        self._comm = comm
        self._config = snapshots.config_of(base)
        self._threads = self._config.storage.thread_count()
        self._queue, self._keep, self._cores, self._timeout = queue, keep, sorted(cores or ()), timeout
        self._handle: WorkerClient | None = None
        self._pending: Captured | None = None
        """Gradients of the step that is being done."""
        self._state: Literal["running", "starting", "waiting"] = "waiting"
        self._whole = False
        """Gradients are logged whole, whatever compression knows of them."""
        self._gap = False
        """Gradients do not lead to the parameters as they are: the next to be sent is a snapshot."""
        self._broken = False
        """The process of this rank failed, which the others do not know yet."""
        self._needed: int | None = None
        """Steps done at the snapshot that nothing can be recovered without, until it is on disk."""
        self._fresh = False
        """The process was sent no snapshot yet."""
        self._failures, self._retry_at, self._starting_since = 0, 0.0, 0.0
        self._told: set[str] = set()
        self._hooks: list[Any] = []

    @abstractmethod
    def _close(self, done: bool) -> None:
        """Write all that was handed over, and stop; `done`: because training is, not because it failed."""

    @abstractmethod
    def _detach(self) -> None:
        """Leave the gradients alone."""

    @abstractmethod
    def _begin(self) -> dict[str, Any]:
        """What the checkpointing process is told first, besides what all are."""

    @abstractmethod
    def _send_snapshot(self) -> None:
        """Send all of the state that this rank has to bring."""

    @abstractmethod
    def _observe(self, **measured: Any) -> None:
        """A measurement; see `tuning.Tuner.observe`."""

    def _started(self) -> None:  # noqa: B027
        """A checkpointing process was started."""

    def _settings(self) -> dict[str, int]:
        """What rank 0 decides for all."""
        return {}

    def _held_back(self) -> Mapping[str, torch.Tensor]:
        """What of the gradients was not sent yet, by parameter."""
        return {}

    def _agree(self) -> None:
        """Make what ranks agree by; collective."""
        self._seed, self._starts = self._comm.broadcast(uuid.uuid4().int >> 80), 0
        self._group = cpu_group(self._comm, self._timeout)
        self._consensus = Consensus((*_POSTED, *self._settings()), self._group)

    def _prepare(self, resume: Recovered | None) -> None:
        """What can be wrong before anything was started."""
        (self.run / segments.LOG).mkdir(parents=True, exist_ok=True)
        if resume is None and (found := snapshots.newest_first(self.run)):
            raise CheckpointExists(
                f"'{self.run}' has snapshots, the newest '{found[0][0].name}': recover from them and pass what "
                "`recover` returned as resume=, or log into another directory"
            )
        Survivors(self.run, self._comm).dismiss()  # its state was recovered, or is not wanted
        wait_for_writers(self.run, self._timeout)
        if self._comm.rank == 0:
            for path in segments.leftovers(self.run):
                path.unlink(missing_ok=True)
            snapshots.clear_interrupted(self.run)
        self._subject.hyper()
        self._subject.states_now()

    @held_signals()
    def _begin_first(self) -> None:
        """Start, and wait until the first snapshot is on disk: from then on every step counts."""
        try:
            run_on_all_ranks(self._comm, self._start)
            run_on_all_ranks(self._comm, lambda: self._running().wait("ready", _START))
            self._join()
            run_on_all_ranks(self._comm, self._send_snapshot)
            run_on_all_ranks(self._comm, self._saved)
        except BaseException:
            for hook in self._hooks:
                hook.remove()
            self._detach()
            if self._handle is not None:
                self._handle.close(None)
            raise
        self._state = "running"
        self._take(self._running())
        atexit.register(self._at_exit)

    def _saved(self) -> None:
        """Wait for the first snapshot."""
        handle = self._running()
        handle.wait("saved", self._timeout + _START)
        for report in handle.reports:
            if report["kind"] == "unsaved":
                raise SaveFailed(report["text"])

    def _start(self) -> None:
        self._session = self._comm_session()
        self._entries: list[Entry] = self._subject.entries(self._comm.size)
        self._owner = {entry.name: entry.owner for entry in self._entries}
        self._own = [entry for entry in self._entries if entry.owner == self._comm.rank]
        config = snapshots.with_residuals(self._config) if self._held_back() else self._config
        self._handle = WorkerClient({
            "run": str(self.run), "session": self._session, "rank": self._comm.rank, "ranks": self._comm.size,
            "parameters": [list(entry) for entry in self._own], "keep": self._keep,
            "config": config.model_dump(mode="json"),
            "cores": self._cores,
            "threads": len(self._cores) or self._threads, "timeout": self._timeout,
            **self._begin(),
        }, self._queue, self._timeout)
        self._gap, self._fresh = False, True
        self._started()

    def _comm_session(self) -> str:
        """The name of a session, the same on all ranks without asking: each start gives the next."""
        self._starts += 1
        return f"{self._seed:012x}{self._starts:04x}"

    def _join(self) -> None:
        """Tell the checkpointing processes of each other; all ranks at the same step."""
        if self._group is None:
            return
        address: list[Any] = [None]
        if self._comm.rank == 0 and self._handle is not None and self._handle.ready is not None:
            address = [[self._handle.ready["host"], self._handle.ready["port"]]]
        try:
            dist.broadcast_object_list(address, group=self._group, group_src=0)
        except RuntimeError as error:
            raise SaveFailed(f"the ranks of the gradient log cannot reach each other: {error}") from error
        if address[0] is None:
            self._broken = True
            return
        host, port = address[0]
        self._guarded(lambda: self._running().send({"kind": "join", "host": host, "port": port}))

    def _running(self) -> WorkerClient:
        assert self._handle is not None
        return self._handle

    def _suspend(self) -> None:
        """Stop logging on all ranks; the processes write what they were given. Rank 0 says when to go on."""
        if self._pending is not None and self._pending.copied is not None:
            self._pending.copied.synchronize()
        if self._handle is not None:
            self._handle.close(None)
            self._handle = None
        self._pending = None
        self._state, self._broken = "waiting", False
        pause = _PAUSES[min(self._failures, len(_PAUSES) - 1)]
        self._failures += 1
        self._retry_at = time.monotonic() + pause

    def _guarded(self, work: Callable[[], None]) -> None:
        """Work that training goes on without."""
        if self._broken:
            return
        try:
            work()
        except (ProcessGone, OSError) as error:
            self._broken = True
            self._whole = self._whole or isinstance(error, NotSparse)
            self._warn(f"{error}. Training goes on; the log goes on with a snapshot as soon as it can")

    def _post(self) -> None:
        """Tell the other ranks how this one stands."""
        if self._handle is not None:
            self._guarded(lambda: self._take(self._running()))
        if self._state == "starting" and time.monotonic() - self._starting_since > _START:
            self._guarded(self._too_late)
        self._consensus.post({
            "broken": self._broken, "wanted": self._gap, "whole": self._whole,
            "saving": self._handle is not None and self._handle.saving,
            "starting": self._state == "starting" and (self._handle is None or self._handle.ready is None),
            "restart": self._comm.rank == 0 and self._state == "waiting" and time.monotonic() >= self._retry_at
            and bool(self._hooks),
            **(self._settings() if self._comm.rank == 0 else {}),
        })

    def _too_late(self) -> None:
        raise ProcessGone(f"the checkpointing process did not start within {_START:.0f} s")

    def _take(self, handle: WorkerClient) -> None:
        handle.poll()
        reports, handle.reports = handle.reports, []
        for report in reports:
            if report["kind"] == "snapshot":
                self._observe(snapshot=(report["seconds"], report["bytes"]))
                self._failures = 0
                if self._needed is not None and report["step"] >= self._needed:
                    self._needed = None
            elif report["kind"] == "unsaved":
                self._warn(f"{report['text']}. Training goes on, and so does its replica; it is saved again later")
            elif report["kind"] == "written":
                count = report["last"] - report["first"] + 1
                self._observe(batch=(report["seconds"], report["bytes"], count), encoding=report["encoding"])

    def _warn(self, text: str) -> None:
        """Say something once."""
        if text not in self._told:
            self._told.add(text)
            warn(text if self._comm.size == 1 else f"rank {self._comm.rank}: {text}")

    def _at_exit(self) -> None:
        if self._hooks:  # Python sets what is asked for when an exception ends it
            self._close(done=not hasattr(sys, "last_value"))
