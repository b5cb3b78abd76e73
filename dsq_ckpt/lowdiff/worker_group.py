"""The checkpointing processes of all ranks as one group: collective start, failure, and restart."""

from __future__ import annotations

import atexit
import os
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from dsq_ckpt.core.interrupts import hold_signals
from dsq_ckpt.core.notices import warn
from dsq_ckpt.distributed.comm import Communicator, run_on_all_ranks
from dsq_ckpt.engine import other_jobs
from dsq_ckpt.errors import CheckpointExists, ConfigError, SaveFailed
from dsq_ckpt.lowdiff import segments, snapshots
from dsq_ckpt.lowdiff.capture import CapturedStep
from dsq_ckpt.lowdiff.consensus import Consensus, cpu_group
from dsq_ckpt.lowdiff.locks import starting, wait_for_writers
from dsq_ckpt.lowdiff.memory import SurvivingReplica
from dsq_ckpt.lowdiff.recovery import Recovered
from dsq_ckpt.lowdiff.train_state import ParameterEntry, TrainState
from dsq_ckpt.lowdiff.worker_client import NotSparse, ProcessGone, WorkerClient
from dsq_ckpt.quantization.restored_values import load_counts

_POSTED = ("broken", "starting", "saving", "wanted", "whole", "restart")
_START = 120.0
_PAUSES = (0.0, 5.0, 30.0, 120.0, 600.0)
"""Seconds before a restart, by the number of consecutive failures."""


class StepsOnDisk:
    """The steps up to which a log leads without a gap, as far as the process of one rank has reported them.

    Attributes:
        last: last of these steps.
    """

    def __init__(self) -> None:
        self.last = 0
        self._beyond: list[tuple[int, int]] = []

    def add(self, report: Mapping[str, Any]) -> None:
        """Take note of a report of a saved snapshot or of written steps."""
        if report["kind"] == "snapshot":
            self.last = max(self.last, report["step"])
        elif report["kind"] == "written":
            self._beyond.append((report["first"], report["last"]))
        for first, last in self._beyond:
            if first <= self.last + 1:
                self.last = max(self.last, last)
        self._beyond = [steps for steps in self._beyond if steps[1] > self.last]


class WorkerGroup(ABC):
    """The checkpointing process of this rank, and the agreed state of the processes of all ranks.

    The group is *running*, *starting*, or *waiting* until rank 0 requests a restart. All ranks decide on transitions
    together, one step late (`Consensus`), so that they happen at the same step on all ranks.

    Args:
        run: directory of the run.
        train_state: state to be logged.
        comm: communicator of the ranks.
        base: configuration of snapshots; see `snapshots.snapshot_config`.
        queue, keep, cores, timeout: see `GradientLog`.
    """

    steps_done: int

    def __init__(
        self, run: Path, train_state: TrainState, comm: Communicator, base: str | Mapping[str, Any], queue: int,
        keep: int, cores: Collection[int] | None, timeout: float,
    ) -> None:
        for name, value in (("queue", queue), ("keep", keep)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; expected a positive number")
        if wrong := [core for core in cores or () if core not in range(os.cpu_count() or 1)]:
            raise ConfigError(f"cores: there is no CPU {wrong[0]!r}; this machine has 0 to {(os.cpu_count() or 1) - 1}")
        self.run = run
        self._train_state = train_state
        self._comm = comm
        self._config = snapshots.snapshot_config(base)
        self._threads = self._config.storage.thread_count()
        self._queue, self._keep, self._cores, self._timeout = queue, keep, sorted(cores or ()), timeout
        self._client: WorkerClient | None = None
        self._pending: CapturedStep | None = None
        """Captured gradients of the current step."""
        self._state: Literal["running", "starting", "waiting"] = "waiting"
        self._dense_only = False
        """True if gradients are logged dense, whatever the compressor reports."""
        self._gap = False
        """True if gradients do not reproduce the current parameters, so that the next message is a snapshot."""
        self._broken = False
        """True if the process of this rank failed, before the other ranks know."""
        self._required_snapshot: int | None = None
        """Step of the snapshot on which recovery depends, until it is on disk."""
        self._needs_first_snapshot = False
        """True before the first snapshot was sent to the process."""
        self._failures, self._retry_at, self._starting_since = 0, 0.0, 0.0
        self._on_disk = StepsOnDisk()
        self._stepped = False
        """True if the optimizer did its step in the current iteration."""
        self._warned: set[str] = set()
        self._hooks: list[Any] = []

    @abstractmethod
    def _detach(self) -> None:
        """Remove the hooks on gradients."""

    @abstractmethod
    def _begin(self) -> dict[str, Any]:
        """Return the part of the first message that depends on the kind of log."""

    @abstractmethod
    def _send_snapshot(self) -> None:
        """Send this rank's share of the state as a snapshot."""

    @abstractmethod
    def _observe(self, **measured: Any) -> None:
        """Record a measurement; see `tuning.Tuner.observe`."""

    def _started(self) -> None:  # noqa: B027
        """Handle the start of a checkpointing process, or another share of the parameters."""

    def _settings(self) -> dict[str, int]:
        """Return the settings that rank 0 decides for all ranks."""
        return {}

    def _held_back(self) -> Mapping[str, torch.Tensor]:
        """Return the residuals of error feedback, by parameter."""
        return {}

    def _set_up_consensus(self) -> None:
        """Create the communication for agreement between ranks; collective."""
        self._seed, self._starts = self._comm.broadcast(uuid.uuid4().int >> 80), 0
        self._group = cpu_group(self._comm, self._timeout)
        self._consensus = Consensus((*_POSTED, *self._settings()), self._group)

    def _prepare(self, resume: Recovered | None) -> None:
        """Create the run directory, and check the train state."""
        (self.run / segments.LOG).mkdir(parents=True, exist_ok=True)
        self._known: Collection[str] = () if resume is None else resume.sessions
        self._train_state.hyper()
        self._train_state.states_now()

    def _refuse_others(self, resume: Recovered | None) -> None:
        """Refuse a run with snapshots from which this log does not go on."""
        if resume is None and (found := snapshots.newest_first(self.run)):  # also those that cannot be read
            raise CheckpointExists(snapshots.exists(self.run, found[0][0]))
        snapshots.refuse_others(self.run, self._known)

    def _enter(self, resume: Recovered | None, start: ExitStack) -> None:
        """Keep other jobs from beginning a log in the run directory until `start` is left."""
        if self._comm.rank == 0:
            start.enter_context(starting(self.run, self._timeout))
        if self._comm.rank == 0 or resume is None:  # each rank says so itself
            self._refuse_others(resume)

    def _take_over(self, resume: Recovered | None) -> None:
        """Wait for processes that still write into the run directory, and clean it."""
        SurvivingReplica(self.run, self._comm).dismiss()  # the state was recovered or is not needed
        wait_for_writers(self.run, self._timeout)
        if self._comm.rank == 0:
            self._refuse_others(resume)  # what was waited for may have saved
            for path in segments.leftovers(self.run):
                path.unlink(missing_ok=True)
            snapshots.clear_interrupted(self.run)
        other_jobs.mark_shared(self.run)

    @hold_signals()
    def _begin_first(self, resume: Recovered | None) -> None:
        """Start, and wait until the first snapshot is on disk: from then on every step counts."""
        try:
            with ExitStack() as start:
                run_on_all_ranks(self._comm, lambda: self._enter(resume, start))
                run_on_all_ranks(self._comm, lambda: self._take_over(resume))
                run_on_all_ranks(self._comm, self._start)
                run_on_all_ranks(self._comm, lambda: self._running().wait("ready", _START))
                self._join()
                run_on_all_ranks(self._comm, self._send_snapshot)
                run_on_all_ranks(self._comm, self._saved)
        except BaseException:
            for hook in self._hooks:
                hook.remove()
            self._detach()
            if self._client is not None:
                self._client.close(None)
            raise
        self._state = "running"
        self._take(self._running())
        atexit.register(self._at_exit)

    def _saved(self) -> None:
        """Wait for the first snapshot."""
        client = self._running()
        client.wait("saved", self._timeout + _START)
        for report in client.reports:
            if report["kind"] == "unsaved":
                raise SaveFailed(report["text"])

    def _start(self) -> None:
        self._session = self._comm_session()
        self._share_out()
        config = snapshots.with_residuals(self._config) if self._held_back() else self._config
        self._client = WorkerClient({
            "run": str(self.run), "session": self._session, "known": [*self._known],
            "rank": self._comm.rank, "ranks": self._comm.size,
            "parameters": [list(entry) for entry in self._own], "keep": self._keep,
            "config": config.model_dump(mode="json"), "cores": self._cores,
            "threads": len(self._cores) or self._threads, "timeout": self._timeout, "loads": load_counts(),
            **self._begin(),
        }, self._queue, self._timeout)
        self._gap, self._needs_first_snapshot = False, True
        self._started()

    def _share_out(self) -> None:
        """Distribute the parameters over the ranks."""
        self._entries: list[ParameterEntry] = self._train_state.entries(self._comm.size)
        self._owner = {entry.name: entry.owner for entry in self._entries}
        self._own = [entry for entry in self._entries if entry.owner == self._comm.rank]

    def _comm_session(self) -> str:
        """Return the name of the next session, equal on all ranks without communication."""
        self._starts += 1
        return f"{self._seed:012x}{self._starts:04x}"

    def _join(self) -> None:
        """Exchange the address of the checkpointing processes; collective."""
        if self._group is None:
            return
        address: list[Any] = [None]
        if self._comm.rank == 0 and self._client is not None and self._client.ready is not None:
            address = [[self._client.ready["host"], self._client.ready["port"]]]
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
        assert self._client is not None
        return self._client

    def _suspend(self) -> None:
        """Stop logging on all ranks until rank 0 requests a restart; the processes finish their writes."""
        if self._pending is not None and self._pending.copied is not None:
            self._pending.copied.synchronize()
        if self._client is not None:
            self._client.close(None)
            self._note(self._client.reports)
            self._client = None
        self._pending = None
        self._state, self._broken = "waiting", False
        pause = _PAUSES[min(self._failures, len(_PAUSES) - 1)]
        self._failures += 1
        self._retry_at = time.monotonic() + pause

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do work whose failure must not stop training."""
        if self._broken:
            return
        try:
            work()
        except (ProcessGone, OSError) as error:
            self._broken = True
            self._dense_only = self._dense_only or isinstance(error, NotSparse)
            self._warn(f"{error}. Training goes on; the log goes on with a snapshot as soon as it can")

    def _post(self) -> None:
        """Post this rank's state to the other ranks."""
        if self._client is not None:
            self._guarded(lambda: self._take(self._running()))
        if self._state == "starting" and time.monotonic() - self._starting_since > _START:
            self._guarded(self._too_late)
        self._consensus.post({
            "broken": self._broken, "wanted": self._gap, "whole": self._dense_only,
            "saving": self._client is not None and self._client.saving,
            "starting": self._state == "starting" and (self._client is None or self._client.ready is None),
            "restart": self._comm.rank == 0 and self._state == "waiting" and time.monotonic() >= self._retry_at
            and bool(self._hooks),
            **(self._settings() if self._comm.rank == 0 else {}),
        })

    def _too_late(self) -> None:
        raise ProcessGone(f"the checkpointing process did not start within {_START:.0f} s")

    def _take(self, client: WorkerClient) -> None:
        client.poll()
        reports, client.reports = client.reports, []
        self._note(reports)
        for report in reports:
            if report["kind"] == "snapshot":
                self._observe(snapshot=(report["seconds"], report["bytes"]))
                self._failures = 0
                if self._required_snapshot is not None and report["step"] >= self._required_snapshot:
                    self._required_snapshot = None
            elif report["kind"] == "unsaved":
                self._warn(f"{report['text']}. Training goes on, and so does its replica; it is saved again later")
            elif report["kind"] == "written":
                count = report["last"] - report["first"] + 1
                self._observe(batch=(report["seconds"], report["bytes"], count), encoding=report["encoding"])

    def _note(self, reports: Iterable[Mapping[str, Any]]) -> None:
        for report in reports:
            self._on_disk.add(report)

    def _close(self, done: bool) -> None:
        """Write all sent steps, and stop; `done` says whether training ended without a failure."""
        if not self._hooks:
            return
        running, problem = self._state == "running", None
        if done and running and self._snapshot_wanted():
            try:
                self._last_snapshot()
            except (ProcessGone, OSError) as error:
                problem = str(error)
        self._unhook()
        if self._client is not None:
            problem = self._client.close(self._timeout, done) or problem
            self._note(self._client.reports)
            self._client = None
        self._state = "waiting"
        self._tell_missing("not" if running else "not all", problem)

    def _snapshot_wanted(self) -> bool:
        """Return whether all ranks are to end with a snapshot: gradients do not reproduce the last step on some rank.

        That was posted after the last step, so that no rank waits for one that does not close its log.
        """
        try:
            agreed = self._consensus.collect()
        except SaveFailed as error:
            if self._gap:
                self._warn(str(error))
            return False
        return bool(agreed["wanted"]) and not agreed["broken"] and not self._stepped

    def _last_snapshot(self) -> None:
        """Send the final state, which gradients do not reproduce, and wait until it is saved."""
        self._running().wait("saved", self._timeout)
        self._send_snapshot()
        self._running().wait("saved", self._timeout)

    def _unhook(self) -> None:
        """Let training go on without the log."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._detach()
        atexit.unregister(self._at_exit)

    def _tell_missing(self, how: str, problem: str | None = None) -> None:
        """Warn of a problem at the end of the log, and of the steps that are not in it.

        Args:
            how: "not", or "not all" if an earlier process may have written more than it has reported.
            problem: the problem, after which the process may still write; None without one.
        """
        first, last = self._on_disk.last + 1, self.steps_done
        which, are, all_ = (f"step {last}", "is", "") if first == last else (f"steps {first} to {last}", "are", " all")
        verb = f"{are} {how}" if problem is None else f"may not{all_} be"
        missing = f"{which} {verb} in the log, which has ended" if first <= last else None
        if told := "; ".join(filter(None, [problem, missing])):
            self._warn(told)

    def _warn(self, text: str, kind: str | None = None) -> None:
        """Warn once per text, or per kind."""
        if (kind or text) not in self._warned:
            self._warned.add(kind or text)
            warn(text if self._comm.size == 1 else f"rank {self._comm.rank}: {text}")

    def _at_exit(self) -> None:
        if self._hooks:  # Python sets `sys.last_value` when an exception ends the process
            self._close(done=not hasattr(sys, "last_value"))
