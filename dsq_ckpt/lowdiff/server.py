"""The common part of checkpointing processes: the message loop, and saving of snapshots."""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.distributed.comm import Communicator, SingleProcess, TorchCommunicator
from dsq_ckpt.errors import SaveFailed
from dsq_ckpt.lowdiff import snapshots
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed
from dsq_ckpt.lowdiff.locks import Lock, wait_for_writers
from dsq_ckpt.lowdiff.snapshots import SnapshotTensor
from dsq_ckpt.lowdiff.train_state import ParameterEntry, entries_from
from dsq_ckpt.storage.record_fields import parse_dtype


class IncompleteGradient(Exception):
    """Raised when a received sparse gradient lacks non-zero elements."""


class Server(ABC):
    """A message loop of a checkpointing process.

    Args:
        channel: channel to the training process.
        begin: first message, with run, session, known, rank, ranks, parameters, config, keep and timeout.
        lock: lock of the run, held while the process may write.
    """

    def __init__(self, channel: Channel, begin: Mapping[str, Any], lock: Lock) -> None:
        self._channel = channel
        self._lock = lock
        self._send_lock = threading.Lock()
        self.run = Path(begin["run"])
        self.session: str = begin["session"]
        self._known_sessions: list[str] = begin["known"]
        self.rank, self.ranks = int(begin["rank"]), int(begin["ranks"])
        self.entries = entries_from(begin["parameters"])
        self.config = DSQConfig.create(begin["config"])
        self._keep = int(begin["keep"])
        self._timeout = timedelta(seconds=float(begin["timeout"]))
        self._is_exclusive = False
        self.closed = False
        """True if training ended without a failure."""
        self._slots: dict[int, Arena] = {}
        self._staging: Arena | None = None
        self._save_thread: threading.Thread | None = None
        self._model: dict[str, Any] = {}
        """Properties of the model at the last snapshot; see `snapshots.describe_model`."""
        self._store: dist.TCPStore | None = None
        self._comm: Communicator | None = SingleProcess() if self.ranks == 1 else None
        self._address: tuple[str, int] | None = None

    def serve(self) -> None:
        """Handle messages until the training process ends or closes the log."""
        ready: dict[str, Any] = {"kind": "ready"}
        if self.rank == 0 and self.ranks > 1:
            # All ranks can resolve MASTER_ADDR, the address of the job's first rank.
            first = os.environ.get("RANK", "0") == "0"
            host = (os.environ.get("MASTER_ADDR") if first else None) or socket.gethostname()
            self._store = dist.TCPStore(host, 0, self.ranks, is_master=True, wait_for_workers=False)
            ready |= {"host": host, "port": self._store.port}
        self._report(ready)
        closing = False
        try:
            while not closing:
                received = self._channel.receive()
                assert received is not None
                message, arena = received
                if message["kind"] == "join":
                    self._address = message["host"], int(message["port"])
                    continue
                if arena is not None and message["kind"] == "snapshot":
                    self._staging = arena
                elif arena is not None:
                    self._slots[message["slot"]] = arena
                self._model = message.get("model", self._model)
                closing = message["kind"] == "close"
                if closing:
                    self.closed = bool(message["done"])
                else:
                    self._handle(message)
        except ChannelClosed:
            pass  # the training process ended; steps that it sent are still written
        except IncompleteGradient as error:
            self._report({"kind": "unfaithful", "name": str(error)})
        self._finish(closing)

    def wait(self) -> None:
        """Wait for the snapshot under way."""
        if self._save_thread is not None:
            self._save_thread.join()

    @abstractmethod
    def _handle(self, message: Mapping[str, Any]) -> None:
        """Handle a message: a step, a snapshot, or a setting."""

    @abstractmethod
    def _finish(self, closing: bool) -> None:
        """Finish after the last message; `closing` is True if training closed the log."""

    def _logged_entries(self, message: Mapping[str, Any]) -> list[ParameterEntry]:
        """Return the parameters that this rank logs after a snapshot."""
        return [entry for entry in entries_from(message["meta"]["entries"]) if entry.owner == self.rank]

    def _staged_tensors(self, descriptions: Iterable[tuple[list[str], str, list[int], int]]) -> list[SnapshotTensor]:
        """Return the tensors in the staging memory, by descriptions of path, dtype, shape and offset."""
        tensors = []
        for path, dtype, shape, offset in descriptions:
            assert self._staging is not None
            tensors.append(SnapshotTensor(tuple(path), self._staging.view(offset, tuple(shape), parse_dtype(dtype))))
        return tensors

    def _save_in_background(
        self, step: int, snapshot_tensors: list[SnapshotTensor], meta: Mapping[str, Any] | None
    ) -> None:
        """Save a snapshot in a thread. Until it is complete, steps are replayed from the previous snapshot."""
        self.wait()
        self._save_thread = threading.Thread(target=self._save, args=(step, snapshot_tensors, meta), name="snapshot")
        self._save_thread.start()

    def _save(self, step: int, snapshot_tensors: list[SnapshotTensor], meta: Mapping[str, Any] | None) -> None:
        started = time.perf_counter()
        try:
            if not self._is_exclusive:
                # While this log did not run, another job may have continued the run, and may still write.
                # The sessions of one log differ in the last four digits.
                snapshots.check_sessions(self.run, self._known_sessions, self.session[:12])
                # After a restart, processes of the previous session may still be saving older snapshots.
                wait_for_writers(self.run, self._timeout.total_seconds(), self.session)
                snapshots.check_sessions(self.run, self._known_sessions, self.session[:12])
                self._is_exclusive = True
            comm = self._communicator()
            if any(other != step for other in comm.gather(step)):
                raise SaveFailed("another rank ended, or saves the state after another step")
            manifest = snapshots.save_snapshot(self.run, step, snapshot_tensors, meta, self.config, comm, self._model)
            if self.rank == 0:
                snapshots.remove_old_snapshots(self.run, self._keep, step)
            size = manifest.sum_bytes("own", "refinement", "index")
            self._report({"kind": "snapshot", "step": step, "bytes": size, "seconds": time.perf_counter() - started})
        except BaseException as error:  # an error that leaves the thread would be lost
            self._report_save_failure(step, error)

    def _report_save_failure(self, step: int, error: BaseException) -> None:
        self._report({"kind": "failed", "text": f"the snapshot after step {step} was not saved: {format_error(error)}"})

    def _communicator(self) -> Communicator:
        """Return the communicator of the checkpointing processes, created for the first snapshot."""
        if self._comm is None:
            assert self._address is not None
            host, port = self._address
            store = self._store or dist.TCPStore(host, port, self.ranks, is_master=False, timeout=self._timeout)
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=self._timeout
            )
            self._comm = TorchCommunicator()
        return self._comm

    def _report(self, message: dict[str, Any]) -> None:
        """Send a report to the training process, if it is still alive."""
        with self._send_lock, suppress(ChannelClosed):
            self._channel.send(message)


def format_error(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {error}"
