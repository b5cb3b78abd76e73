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
from dsq_ckpt.lowdiff.consensus import cpu_group
from dsq_ckpt.lowdiff.locks import wait_for_writers
from dsq_ckpt.lowdiff.snapshots import SnapshotTensor, newest_first, read_metadata
from dsq_ckpt.storage.record_fields import parse_dtype

_PEER = struct.Struct("3i")
_PATIENCE, _TRANSFER = 30.0, 300.0
"""Seconds to wait for an answer, and for an answer with a whole state."""


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
            SnapshotTensor(tuple(path), self.arena.view(at, tuple(shape), parse_dtype(dtype)))
            for path, dtype, shape, at in self.tensors
        ]


class ReplicaHolder(Protocol):
    """An object that holds a rank's shard of a replica.

    Attributes:
        session: session of the log.
        ranks: number of ranks that share the replica.
        newest: last step that it received.
    """

    session: str
    ranks: int

    @property
    def newest(self) -> int: ...

    def after(self, step: int) -> ReplicaShard | None: ...


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


def serve(listener: socket.socket, holder: ReplicaHolder, seconds: float) -> None:
    """Answer requests until a process has taken the state, at most for `seconds` seconds."""
    deadline = time.monotonic() + seconds
    taken, take = socket.socketpair()
    with listener, taken, take:
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([listener, taken], [], [], left)
            if taken in ready:
                return
            if ready:
                connection, _ = listener.accept()
                # A thread each: a silent connection must not block others.
                threading.Thread(target=_answer, args=(connection, take, holder), daemon=True).start()


def _answer(connection: socket.socket, take: socket.socket, holder: ReplicaHolder) -> None:
    """Answer one process, and shut `take` down when it has taken the state."""
    channel = Channel(connection)
    with suppress(Exception):  # it is gone, or is no training process
        while _same_user(connection) and (received := channel.receive(_TRANSFER)) is not None:
            message, _ = received
            if message["kind"] == "status":
                channel.send({"newest": holder.newest, "session": holder.session, "ranks": holder.ranks})
            elif message["kind"] == "state":
                found = holder.after(int(message["step"]))
                if found is None:
                    channel.send({})
                    continue
                channel.send({"tensors": found.tensors, "meta": found.meta}, found.arena)
            elif message["kind"] == "end":
                take.shutdown(socket.SHUT_RDWR)
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
        """Return a tensor; it shares memory with the others.

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
        timeout: seconds in which the process that holds this rank's shard may begin to listen, while it writes.
    """

    def __init__(self, run: Path, comm: Communicator, timeout: float = _PATIENCE) -> None:
        self._run = run
        self._comm = comm
        self._channel = _connect(run, comm.rank, min(timeout, _PATIENCE))

    def state(self) -> MemorySnapshot | None:
        """Return the state at the last step that all processes have, or None if any of them has ended."""
        statuses = self._comm.gather(self._ask({"kind": "status"}, {"newest", "session", "ranks"}))
        if any(status is None or status[0]["ranks"] != self._comm.size for status in statuses):
            return None
        if len({status[0]["session"] for status in statuses}) > 1:
            return None
        step = min(int(status[0]["newest"]) for status in statuses)
        session = statuses[0][0]["session"]
        behind = gather_from_all_ranks(
            self._comm, lambda: self._comm.rank == 0 and self._left_behind(session, step), LoadFailed
        )
        if behind[0]:
            return None
        own = self._ask({"kind": "state", "step": step}, {"tensors", "meta"}, _TRANSFER)
        if not all(self._comm.gather(own is not None)):
            return None
        assert own is not None
        answer, arena = own
        group = cpu_group(self._comm)
        shares = self._comm.gather((answer["tensors"], 0 if arena is None else arena.size, answer["meta"]["plain"]))
        tensors: dict[str, torch.Tensor] = {}
        for rank, (listed, size, _) in enumerate(shares):
            whole = torch.empty(0, dtype=torch.uint8)
            if rank == self._comm.rank and arena is not None:
                whole = arena.tensor
            elif size:
                whole = torch.empty(size, dtype=torch.uint8)
            if group is not None and size:
                dist.broadcast(whole, group=group, group_src=rank)
            for path, dtype, shape, at in listed:
                nbytes = torch.Size(shape).numel() * parse_dtype(dtype).itemsize
                tensors[".".join(path)] = whole[at : at + nbytes].view(parse_dtype(dtype)).view(shape)
        if group is not None:
            dist.destroy_process_group(group)
        plain = {name: values for share in shares for name, values in share[2].items()}
        meta = {**self._comm.broadcast(answer["meta"]), "plain": plain}
        return MemorySnapshot(self._run, meta, tensors)

    def dismiss(self) -> None:
        """Let this rank's process finish its writes and end."""
        if self._channel is not None:
            with suppress(ChannelClosed):
                self._channel.send({"kind": "end"})
            self._channel.close()
            self._channel = None

    def _left_behind(self, session: str, step: int) -> bool:
        """Return whether a later session has a newer snapshot on disk."""
        newest = newest_first(self._run) if self._run.is_dir() else []
        found = read_metadata(newest[0][0]) if newest else None
        return found is not None and found["session"] != session and int(found["step"]) >= step

    def _ask(
        self, question: dict[str, Any], keys: Set[str], patience: float = _PATIENCE
    ) -> tuple[dict[str, Any], Arena | None] | None:
        """Return the answer to a question, or None if there is none or it lacks one of `keys`."""
        if self._channel is None:
            return None
        try:
            self._channel.send(question)
            found = self._channel.receive(patience)
        except (ChannelClosed, ValueError, IndexError, OSError):
            return None
        return found if found is not None and isinstance(found[0], dict) and keys <= found[0].keys() else None


def _connect(run: Path, rank: int, timeout: float) -> Channel | None:
    """Connect to the process that holds this rank's shard; retry while a process of the run still writes."""
    deadline = time.monotonic() + timeout
    while (channel := _connected(run, rank)) is None and _written(run) and time.monotonic() < deadline:
        time.sleep(0.01)
    return channel


def _written(run: Path) -> bool:
    try:
        wait_for_writers(run, 0.0)
    except SaveFailed:
        return True
    return False


def _connected(run: Path, rank: int) -> Channel | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address(run, rank))
    except OSError:
        connection.close()
        return None
    if not _same_user(connection):
        connection.close()
        return None
    return Channel(connection)


def _address(run: Path, rank: int) -> str:
    """Return a name in Linux's abstract namespace, which disappears with the process."""
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:32]
    return f"\0dsq_ckpt-{os.getuid()}-{digest}-{rank}"


def _same_user(connection: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.getuid())
