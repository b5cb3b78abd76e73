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
from dsq_ckpt.lowdiff.consensus import Consensus, create_cpu_group
from dsq_ckpt.lowdiff.locks import exclusive_start, wait_for_writers
from dsq_ckpt.lowdiff.plain_data import NotLoggable
from dsq_ckpt.lowdiff.recovered import Recovered
from dsq_ckpt.lowdiff.replica_transfer import SurvivingReplica
from dsq_ckpt.lowdiff.train_state import ParameterEntry, TrainState
from dsq_ckpt.lowdiff.worker_client import NotSparse, ProcessGone, WorkerClient
from dsq_ckpt.quantization.restored_values import load_counts

_CONSENSUS_NAMES = ("broken", "starting", "saving", "wanted", "whole", "restart")
_START_TIMEOUT = 120.0
_RESTART_DELAYS = (0.0, 5.0, 30.0, 120.0, 600.0)
"""Seconds before a restart, by the number of consecutive failures."""


class StepsOnDisk:
    """The steps that the checkpointing process of one rank has reported as written.

    Attributes:
        last: last step up to which the log has no gap.
    """

    def __init__(self) -> None:
        self.last = 0
        self._disjoint: list[tuple[int, int]] = []
        """First and last step of written batches after `last`."""

    def add(self, report: Mapping[str, Any]) -> None:
        """Add the steps of a report about a saved snapshot or written steps."""
        if report["kind"] == "snapshot":
            self.last = max(self.last, report["step"])
        elif report["kind"] == "written":
            self._disjoint.append((report["first"], report["last"]))
        for first, last in self._disjoint:
            if first <= self.last + 1:
                self.last = max(self.last, last)
        self._disjoint = [steps for steps in self._disjoint if steps[1] > self.last]


class WorkerGroup(ABC):
    """The checkpointing processes of all ranks, as seen by one rank.

    The group is *running*, *starting*, or *waiting* until rank 0 requests a restart. All ranks agree on transitions one
    step late (`Consensus`), so that transitions happen at the same step on all ranks.

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
        cpus = os.cpu_count() or 1
        if missing := [core for core in cores or () if core not in range(cpus)]:
            raise ConfigError(f"cores: there is no CPU {missing[0]!r}; this machine has 0 to {cpus - 1}")
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
        """True if gradients do not reproduce the current state, so that the next message must be a snapshot."""
        self._broken = False
        """True if the process of this rank failed and the other ranks do not know yet."""
        self._required_snapshot: int | None = None
        """Step of the snapshot on which recovery depends, until the snapshot is on disk."""
        self._needs_first_snapshot = False
        """True before the first snapshot was sent to the process."""
        self._failures, self._retry_at, self._starting_since = 0, 0.0, 0.0
        self._steps_on_disk = StepsOnDisk()
        self._stepped = False
        """True if the optimizer made its step in the current iteration."""
        self._warned: set[str] = set()
        self._hooks: list[Any] = []

    @abstractmethod
    def _detach(self) -> None:
        """Remove the hooks on gradients."""

    @abstractmethod
    def _process_options(self) -> dict[str, Any]:
        """Return the fields of the process's first message that depend on the kind of log."""

    @abstractmethod
    def _send_snapshot(self) -> None:
        """Send this rank's share of the state as a snapshot."""

    @abstractmethod
    def _observe(self, **measured: Any) -> None:
        """Record a measurement; see `tuning.Tuner.observe`."""

    def _on_process_started(self) -> None:  # noqa: B027
        """Handle the start of a checkpointing process, or a new assignment of parameters to ranks."""

    def _proposed_settings(self) -> dict[str, int]:
        """Return the settings that rank 0 proposes to all ranks."""
        return {}

    def _residuals(self) -> Mapping[str, torch.Tensor]:
        """Return the residuals of error feedback, by parameter."""
        return {}

    def _set_up_consensus(self) -> None:
        """Create the `Consensus` of the ranks; collective."""
        self._seed, self._starts = self._comm.broadcast(uuid.uuid4().int >> 80), 0
        self._group = create_cpu_group(self._comm, self._timeout)
        self._consensus = Consensus((*_CONSENSUS_NAMES, *self._proposed_settings()), self._group)

    def _prepare(self, resume: Recovered | None) -> None:
        """Create the run directory, and check that the train state can be logged."""
        (self.run / segments.LOG).mkdir(parents=True, exist_ok=True)
        self._known_sessions: Collection[str] = () if resume is None else resume.sessions
        self._train_state.hyper()
        self._train_state.states_to_plain()

    def _check_sessions(self, resume: Recovered | None) -> None:
        """Raise a `CheckpointExists` if the run has snapshots that this log does not continue."""
        if resume is None and (existing := snapshots.list_snapshots(self.run)):  # even if they cannot be read
            raise CheckpointExists(snapshots.existing_log_message(self.run, existing[0][0]))
        snapshots.check_sessions(self.run, self._known_sessions)

    def _lock_run(self, resume: Recovered | None, stack: ExitStack) -> None:
        """Prevent other jobs from beginning a log in the run directory until `stack` is closed."""
        if self._comm.rank == 0:
            stack.enter_context(exclusive_start(self.run, self._timeout))
        if self._comm.rank == 0 or resume is None:  # each rank raises its own error
            self._check_sessions(resume)

    def _clean_run(self, resume: Recovered | None) -> None:
        """Wait for processes that still write into the run directory, and remove interrupted files."""
        SurvivingReplica(self.run, self._comm).dismiss()  # the state was recovered or is not needed
        wait_for_writers(self.run, self._timeout)
        if self._comm.rank == 0:
            self._check_sessions(resume)  # these processes may have saved snapshots
            for path in segments.find_temporary_files(self.run):
                path.unlink(missing_ok=True)
            snapshots.remove_interrupted(self.run)
        other_jobs.mark_shared(self.run)

    @hold_signals()
    def _start_first_session(self, resume: Recovered | None) -> None:
        """Start a process, and wait until the first snapshot is on disk. Every later step can be recovered."""
        try:
            with ExitStack() as stack:
                run_on_all_ranks(self._comm, lambda: self._lock_run(resume, stack))
                run_on_all_ranks(self._comm, lambda: self._clean_run(resume))
                run_on_all_ranks(self._comm, self._start)
                run_on_all_ranks(self._comm, lambda: self._require_client().wait("ready", _START_TIMEOUT))
                self._exchange_address()
                run_on_all_ranks(self._comm, self._send_snapshot)
                run_on_all_ranks(self._comm, self._wait_for_first_snapshot)
        except BaseException:
            for hook in self._hooks:
                hook.remove()
            self._detach()
            if self._client is not None:
                self._client.close(None)
            raise
        self._state = "running"
        self._handle_reports(self._require_client())
        atexit.register(self._at_exit)

    def _wait_for_first_snapshot(self) -> None:
        """Wait for the first snapshot."""
        client = self._require_client()
        client.wait("saved", self._timeout + _START_TIMEOUT)
        for report in client.reports:
            if report["kind"] == "unsaved":
                raise SaveFailed(report["text"])

    def _start(self) -> None:
        """Start a checkpointing process for a new session."""
        self._session = self._next_session()
        self._assign_parameters()
        config = snapshots.add_residual_rule(self._config) if self._residuals() else self._config
        self._client = WorkerClient({
            "run": str(self.run), "session": self._session, "known": [*self._known_sessions],
            "rank": self._comm.rank, "ranks": self._comm.size,
            "parameters": [list(entry) for entry in self._own_entries], "keep": self._keep,
            "config": config.model_dump(mode="json"), "cores": self._cores,
            "threads": len(self._cores) or self._threads, "timeout": self._timeout, "loads": load_counts(),
            **self._process_options(),
        }, self._queue, self._timeout)
        self._gap, self._needs_first_snapshot = False, True
        self._on_process_started()

    def _assign_parameters(self) -> None:
        """Assign the parameters to the ranks that log them."""
        self._entries: list[ParameterEntry] = self._train_state.entries(self._comm.size)
        self._owners = {entry.name: entry.owner for entry in self._entries}
        self._own_entries = [entry for entry in self._entries if entry.owner == self._comm.rank]

    def _next_session(self) -> str:
        """Return the name of the next session, which is equal on all ranks without communication."""
        self._starts += 1
        return f"{self._seed:012x}{self._starts:04x}"

    def _exchange_address(self) -> None:
        """Send the address of rank 0's checkpointing process to the processes of all ranks; collective."""
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
        self._run_guarded(lambda: self._require_client().send({"kind": "join", "host": host, "port": port}))

    def _require_client(self) -> WorkerClient:
        assert self._client is not None
        return self._client

    def _suspend(self) -> None:
        """Stop logging on all ranks until rank 0 requests a restart; the processes finish their writes."""
        if self._pending is not None and self._pending.copy_event is not None:
            self._pending.copy_event.synchronize()
        if self._client is not None:
            self._client.close(None)
            self._record_reports(self._client.reports)
            self._client = None
        self._pending = None
        self._state, self._broken = "waiting", False
        pause = _RESTART_DELAYS[min(self._failures, len(_RESTART_DELAYS) - 1)]
        self._failures += 1
        self._retry_at = time.monotonic() + pause

    def _run_guarded(self, function: Callable[[], None]) -> None:
        """Call a function whose failure must not stop training. On a failure, warn and set `_broken`."""
        if self._broken:
            return
        try:
            function()
        except (ProcessGone, NotLoggable, OSError) as error:
            self._broken = True
            self._dense_only = self._dense_only or isinstance(error, NotSparse)
            self._warn(f"{error}. Training goes on without the log, which goes on with a snapshot as soon as it can")

    def _post_state(self) -> None:
        """Post this rank's state to the other ranks."""
        if self._client is not None:
            self._run_guarded(lambda: self._handle_reports(self._require_client()))
        if self._state == "starting" and time.monotonic() - self._starting_since > _START_TIMEOUT:
            self._run_guarded(self._raise_start_timeout)
        self._consensus.post({
            "broken": self._broken, "wanted": self._gap, "whole": self._dense_only,
            "saving": self._client is not None and self._client.saving,
            "starting": self._state == "starting" and (self._client is None or self._client.ready is None),
            "restart": self._comm.rank == 0 and self._state == "waiting" and time.monotonic() >= self._retry_at
            and bool(self._hooks),
            **(self._proposed_settings() if self._comm.rank == 0 else {}),
        })

    def _raise_start_timeout(self) -> None:
        raise ProcessGone(f"the checkpointing process did not start within {_START_TIMEOUT:.0f} s")

    def _handle_reports(self, client: WorkerClient) -> None:
        """Receive and handle the reports of the process.

        Raises:
            ProcessGone: the process ended, or reported a failure.
        """
        client.poll()
        reports, client.reports = client.reports, []
        self._record_reports(reports)
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

    def _record_reports(self, reports: Iterable[Mapping[str, Any]]) -> None:
        for report in reports:
            self._steps_on_disk.add(report)

    def _close(self, done: bool) -> None:
        """Wait until all sent steps are written, and stop.

        Args:
            done: True if training ended without a failure.
        """
        if not self._hooks:
            return
        running, problem = self._state == "running", None
        if done and running and self._needs_final_snapshot():
            try:
                self._save_final_snapshot()
            except (ProcessGone, NotLoggable, OSError) as error:
                problem = str(error)
        self._remove_hooks()
        if self._client is not None:
            problem = self._client.close(self._timeout, done) or problem
            self._record_reports(self._client.reports)
            self._client = None
        self._state = "waiting"
        self._warn_missing_steps("not" if running else "not all", problem)

    def _needs_final_snapshot(self) -> bool:
        """Return whether all ranks must save a final snapshot: on some rank, gradients do not reproduce the last step.

        Ranks posted this after the last step, so that no rank waits for a rank that does not close its log.
        """
        try:
            agreed = self._consensus.collect()
        except SaveFailed as error:
            if self._gap:
                self._warn(str(error))
            return False
        return bool(agreed["wanted"]) and not agreed["broken"] and not self._stepped

    def _save_final_snapshot(self) -> None:
        """Send the final state, which gradients do not reproduce, and wait until the snapshot is saved."""
        self._require_client().wait("saved", self._timeout)
        self._send_snapshot()
        self._require_client().wait("saved", self._timeout)

    def _remove_hooks(self) -> None:
        """Remove all hooks; training continues without the log."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._detach()
        atexit.unregister(self._at_exit)

    def _warn_missing_steps(self, reason: str, problem: str | None = None) -> None:
        """Warn of a problem at the end of the log, and of steps that are not in the log.

        Args:
            reason: "not", or "not all" if an earlier process may have written more steps than it has reported.
            problem: problem, after which the process may still write; None without a problem.
        """
        first, last = self._steps_on_disk.last + 1, self.steps_done
        steps, are, all_ = (f"step {last}", "is", "") if first == last else (f"steps {first} to {last}", "are", " all")
        verb = f"{are} {reason}" if problem is None else f"may not{all_} be"
        missing = f"{steps} {verb} in the log, which has ended" if first <= last else None
        if text := "; ".join(filter(None, [problem, missing])):
            self._warn(text)

    def _warn(self, text: str, kind: str | None = None) -> None:
        """Warn once per `kind`, which defaults to the text."""
        if (kind or text) not in self._warned:
            self._warned.add(kind or text)
            warn(text if self._comm.size == 1 else f"rank {self._comm.rank}: {text}")

    def _at_exit(self) -> None:
        if self._hooks:  # Python sets `sys.last_value` when an exception ends the process
            self._close(done=not hasattr(sys, "last_value"))
