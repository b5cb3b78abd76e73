"""Transfer of a replica's state to a new training process on the same host (LowDiff+, section VI-C).

The replica's process listens on an abstract socket whose name is derived from the run and the rank. Only processes of
the same user may connect. Answers are plain data and shared memory.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.errors import CorruptCheckpoint, LoadFailed, SaveFailed
from dsq_ckpt.lowdiff.arena import Arena
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed
from dsq_ckpt.lowdiff.consensus import create_cpu_group
from dsq_ckpt.lowdiff.locks import wait_for_writers
from dsq_ckpt.lowdiff.snapshots import SnapshotTensor, list_snapshots, read_metadata
from dsq_ckpt.storage.record_fields import parse_dtype

_UCRED = struct.Struct("3i")
_ANSWER_TIMEOUT, _TRANSFER_TIMEOUT = 30.0, 300.0
"""Seconds to wait for an answer without and with the tensors of a state."""


class ReplicaShard(NamedTuple):
    """A rank's shard of a replica after a step.

    Attributes:
        step: steps done.
        tensors: path, dtype, shape and arena offset of each tensor.
        meta: metadata of a snapshot.
        arena: shared memory of the tensors.
    """

    step: int
    tensors: list[list[Any]]
    meta: dict[str, Any]
    arena: Arena

    def snapshot_tensors(self) -> list[SnapshotTensor]:
        """Return the tensors; they share the arena's memory."""
        return [
            SnapshotTensor(tuple(path), self.arena.view(offset, tuple(shape), parse_dtype(dtype)))
            for path, dtype, shape, offset in self.tensors
        ]


class ReplicaHolder(Protocol):
    """An object that holds a rank's shard of a replica.

    Attributes:
        session: session of the log.
        ranks: number of ranks that share the replica.
        newest_step: last step that the object received.
    """

    session: str
    ranks: int

    @property
    def newest_step(self) -> int: ...

    def shard_after(self, step: int) -> ReplicaShard | None: ...


def listen(run: Path, rank: int) -> socket.socket | None:
    """Return a socket that listens for a new training process, or None if another process of the run listens."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(run, rank))
        listener.listen(2)
    except OSError:
        listener.close()
        return None
    return listener


def serve_state(listener: socket.socket, holder: ReplicaHolder, seconds: float) -> None:
    """Answer requests until a process ends the service after it received the state, at most for `seconds` seconds."""
    deadline = time.monotonic() + seconds
    done, done_signal = socket.socketpair()
    with listener, done, done_signal:
        while (remaining := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([listener, done], [], [], remaining)
            if done in ready:
                return
            if ready:
                connection, _ = listener.accept()
                # One thread for each connection: a silent connection must not block others.
                threading.Thread(target=_serve_connection, args=(connection, done_signal, holder), daemon=True).start()


def _serve_connection(connection: socket.socket, done_signal: socket.socket, holder: ReplicaHolder) -> None:
    """Answer one process, and shut `done_signal` down when the process ends the service."""
    channel = Channel(connection)
    with suppress(Exception):  # the process ended, or is not a training process
        while _is_same_user(connection) and (received := channel.receive(_TRANSFER_TIMEOUT)) is not None:
            message, _ = received
            if message["kind"] == "status":
                channel.send({"newest": holder.newest_step, "session": holder.session, "ranks": holder.ranks})
            elif message["kind"] == "state":
                shard = holder.shard_after(int(message["step"]))
                if shard is None:
                    channel.send({})
                    continue
                channel.send({"tensors": shard.tensors, "meta": shard.meta}, shard.arena)
            elif message["kind"] == "end":
                done_signal.shutdown(socket.SHUT_RDWR)
                break
    channel.close()


class MemorySnapshot:
    """The state of a run in the memory of surviving processes, with the interface of `Snapshot`.

    Attributes:
        meta: see `Snapshot`.
        path: directory of the run.
    """

    lossy = False

    def __init__(self, run: Path, meta: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.path = run
        self.meta = meta
        self._tensors = tensors

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor."""
        return tuple(self._tensors[name].shape), self._tensors[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, which shares memory with other tensors.

        Raises:
            CorruptCheckpoint: the replica has no such tensor.
        """
        if name not in self._tensors:
            raise CorruptCheckpoint(f"the replica of '{self.path}' has no '{name}'")
        return self._tensors[name]


class SurvivingReplica:
    """One rank's connection to the surviving processes that hold the replica of a run; its methods are collective.

    Args:
        run: directory of the run.
        comm: communicator of the ranks that recover.
        timeout: seconds to wait for the process that holds this rank's shard to listen, while it writes.
    """

    def __init__(self, run: Path, comm: Communicator, timeout: float = _ANSWER_TIMEOUT) -> None:
        self._run = run
        self._comm = comm
        self._channel = _connect(run, comm.rank, min(timeout, _ANSWER_TIMEOUT))

    def fetch_state(self) -> MemorySnapshot | None:
        """Return the state after the last step that all processes have, or None if any of them has ended."""
        statuses = self._comm.gather(self._request({"kind": "status"}, {"newest", "session", "ranks"}))
        if any(status is None or status[0]["ranks"] != self._comm.size for status in statuses):
            return None
        if len({status[0]["session"] for status in statuses}) > 1:
            return None
        step = min(int(status[0]["newest"]) for status in statuses)
        session = statuses[0][0]["session"]
        outdated = gather_from_all_ranks(
            self._comm, lambda: self._comm.rank == 0 and self._is_outdated(session, step), LoadFailed
        )
        if outdated[0]:
            return None
        response = self._request({"kind": "state", "step": step}, {"tensors", "meta"}, _TRANSFER_TIMEOUT)
        if not all(self._comm.gather(response is not None)):
            return None
        assert response is not None
        answer, arena = response
        group = create_cpu_group(self._comm)
        shares = self._comm.gather((answer["tensors"], 0 if arena is None else arena.size, answer["meta"]["plain"]))
        tensors: dict[str, torch.Tensor] = {}
        for rank, (listed, size, _) in enumerate(shares):
            shard = torch.empty(0, dtype=torch.uint8)
            if rank == self._comm.rank and arena is not None:
                shard = arena.tensor
            elif size:
                shard = torch.empty(size, dtype=torch.uint8)
            if group is not None and size:
                dist.broadcast(shard, group=group, group_src=rank)
            for path, dtype, shape, offset in listed:
                nbytes = torch.Size(shape).numel() * parse_dtype(dtype).itemsize
                tensors[".".join(path)] = shard[offset : offset + nbytes].view(parse_dtype(dtype)).view(shape)
        if group is not None:
            dist.destroy_process_group(group)
        plain = {name: values for share in shares for name, values in share[2].items()}
        meta = {**self._comm.broadcast(answer["meta"]), "plain": plain}
        return MemorySnapshot(self._run, meta, tensors)

    def dismiss(self) -> None:
        """Request that the process of this rank finishes its writes and ends."""
        if self._channel is not None:
            with suppress(ChannelClosed):
                self._channel.send({"kind": "end"})
            self._channel.close()
            self._channel = None

    def _is_outdated(self, session: str, step: int) -> bool:
        """Return whether another session has a newer snapshot on disk."""
        snapshots = list_snapshots(self._run) if self._run.is_dir() else []
        meta = read_metadata(snapshots[0][0]) if snapshots else None
        return meta is not None and meta["session"] != session and int(meta["step"]) >= step

    def _request(
        self, request: dict[str, Any], keys: Set[str], timeout: float = _ANSWER_TIMEOUT
    ) -> tuple[dict[str, Any], Arena | None] | None:
        """Return the answer to a request and its arena, or None if no answer with all `keys` arrives."""
        if self._channel is None:
            return None
        try:
            self._channel.send(request)
            received = self._channel.receive(timeout)
        except (ChannelClosed, ValueError, IndexError, OSError):
            return None
        if received is None or not isinstance(received[0], dict) or not keys <= received[0].keys():
            return None
        return received


def _connect(run: Path, rank: int, timeout: float) -> Channel | None:
    """Connect to the process that holds this rank's shard; retry while a process of the run still writes."""
    deadline = time.monotonic() + timeout
    while (channel := _try_connect(run, rank)) is None and _is_being_written(run) and time.monotonic() < deadline:
        time.sleep(0.01)
    return channel


def _is_being_written(run: Path) -> bool:
    try:
        wait_for_writers(run, 0.0)
    except SaveFailed:
        return True
    return False


def _try_connect(run: Path, rank: int) -> Channel | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address(run, rank))
    except OSError:
        connection.close()
        return None
    if not _is_same_user(connection):
        connection.close()
        return None
    return Channel(connection)


def _address(run: Path, rank: int) -> str:
    """Return a socket name in Linux's abstract namespace, which disappears with the process."""
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:32]
    return f"\0dsq_ckpt-{os.getuid()}-{digest}-{rank}"


def _is_same_user(connection: socket.socket) -> bool:
    _, user, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(user == os.getuid())
