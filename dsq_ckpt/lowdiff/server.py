"""What checkpointing processes do alike: listen to their training process, and save snapshots beside that."""

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
from dsq_ckpt.lowdiff import snapshots
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed
from dsq_ckpt.lowdiff.locks import Lock, wait_for_writers
from dsq_ckpt.lowdiff.snapshots import Piece
from dsq_ckpt.lowdiff.train_state import entries_from
from dsq_ckpt.storage.checkpoint import dtype_of


class Unfaithful(Exception):
    """What was handed over is not all of a gradient."""


class Server(ABC):
    """What a checkpointing process does with what it is told.

    Args:
        channel: to the training process.
        begin: the first message: run, session, rank, ranks, parameters, config, keep, timeout.
        lock: held for as long as anything is written.
    """

    def __init__(self, channel: Channel, begin: Mapping[str, Any], lock: Lock) -> None:
        self._channel = channel
        self._lock = lock
        self._sending = threading.Lock()
        self.run = Path(begin["run"])
        self.session: str = begin["session"]
        self.rank, self.ranks = int(begin["rank"]), int(begin["ranks"])
        self.entries = entries_from(begin["parameters"])
        self.config = DSQConfig.create(begin["config"])
        self._keep = int(begin["keep"])
        self._timeout = timedelta(seconds=float(begin["timeout"]))
        self._alone = False
        self.closed = False
        """Training said that it is done."""
        self._slots: dict[int, Arena] = {}
        self._staging: Arena | None = None
        self._saving: threading.Thread | None = None
        self._store: dist.TCPStore | None = None
        self._comm: Communicator | None = SingleProcess() if self.ranks == 1 else None
        self._address: tuple[str, int] | None = None

    def serve(self) -> None:
        """Do what messages say until the training process is gone, or wants this one to end."""
        ready: dict[str, Any] = {"kind": "ready"}
        if self.rank == 0 and self.ranks > 1:
            # Where the job's first rank is, it is known by that name to all others.
            first = os.environ.get("RANK", "0") == "0"
            host = (os.environ.get("MASTER_ADDR") if first else None) or socket.gethostname()
            self._store = dist.TCPStore(host, 0, self.ranks, is_master=True, wait_for_workers=False)
            ready |= {"host": host, "port": self._store.port}
        self._tell(ready)
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
                closing = message["kind"] == "close"
                if closing:
                    self.closed = bool(message["done"])
                else:
                    self._take(message)
        except ChannelClosed:
            pass  # the training process is gone; what it had handed over is kept all the same
        except Unfaithful as error:
            self._tell({"kind": "unfaithful", "name": str(error)})
        self._end(closing)

    def wait(self) -> None:
        """Wait for the snapshot that is being written."""
        if self._saving is not None:
            self._saving.join()

    @abstractmethod
    def _take(self, message: Mapping[str, Any]) -> None:
        """Do what a message says: a step, a snapshot, or a setting."""

    @abstractmethod
    def _end(self, closing: bool) -> None:
        """There are no more messages; `closing`: because training is done."""

    def _pieces(self, told: Iterable[tuple[list[str], str, list[int], int]]) -> list[Piece]:
        """Tensors in the staging memory."""
        found = []
        for path, dtype, shape, offset in told:
            assert self._staging is not None
            found.append(Piece(tuple(path), self._staging.view(offset, tuple(shape), dtype_of(dtype))))
        return found

    def _save_later(self, step: int, pieces: list[Piece], meta: Mapping[str, Any] | None) -> None:
        """Save a snapshot in a thread; what is written meanwhile follows the one before it until this one is there."""
        self.wait()
        self._saving = threading.Thread(target=self._save, args=(step, pieces, meta), name="snapshot")
        self._saving.start()

    def _save(self, step: int, pieces: list[Piece], meta: Mapping[str, Any] | None) -> None:
        started = time.perf_counter()
        try:
            if not self._alone:
                # Where processes were started again, those before them may still be saving what is older.
                wait_for_writers(self.run, self._timeout.total_seconds(), self.session)
                self._alone = True
            manifest = snapshots.save(self.run, step, pieces, meta, self.config, self._communicator())
            if self.rank == 0:
                snapshots.retire(self.run, self._keep, step)
            size = manifest.bytes_in("own", "refinement", "index")
            self._tell({"kind": "snapshot", "step": step, "bytes": size, "seconds": time.perf_counter() - started})
        except BaseException as error:  # of a thread, which nobody else would tell
            self._failed(step, error)

    def _failed(self, step: int, error: BaseException) -> None:
        self._tell({"kind": "failed", "text": f"the snapshot after step {step} was not saved: {describe(error)}"})

    def _communicator(self) -> Communicator:
        """Of the checkpointing processes; made when the first snapshot is saved, which all of them do."""
        if self._comm is None:
            assert self._address is not None
            host, port = self._address
            store = self._store or dist.TCPStore(host, port, self.ranks, is_master=False, timeout=self._timeout)
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=self._timeout
            )
            self._comm = TorchCommunicator()
        return self._comm

    def _tell(self, message: dict[str, Any]) -> None:
        """Tell the training process; if that is gone, what it sent before is still worth doing."""
        with self._sending, suppress(ChannelClosed):
            self._channel.send(message)


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"
