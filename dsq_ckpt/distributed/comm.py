"""Communicators with the three collectives of a save, and error propagation: if one rank fails, all ranks raise.

The communicator for MPI is in `dsq_ckpt.distributed.mpi`.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from dsq_ckpt.core.arguments import format_value
from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.core.interrupts import propagate_handler_errors
from dsq_ckpt.distributed.gloo_lifetime import extend_lifetime
from dsq_ckpt.errors import ConfigError, DSQError, LoadFailed, SaveFailed, described

_T = TypeVar("_T")
_LENGTH_BYTES, _FIRST_ROUND_BYTES = 8, 4088
"""Bytes of a length, and of a pickle in the first round of a gather or broadcast; a longer one takes a second round."""
_RELEASE_TIMEOUT = 0.2  # seconds; other backends may keep tensors for longer


class RemoteFailure(DSQError):
    """Another rank failed; the error on that rank has the details."""


class FailedElsewhere(RemoteFailure, SaveFailed):
    """A save failed on another rank."""


class LoadFailedElsewhere(RemoteFailure, LoadFailed):
    """A load failed on another rank."""


class RankUnreachable(SaveFailed, LoadFailed):
    """A collective of a save or a load failed: another rank or its host is gone or did not respond in time, or no rank
    can be reached from this process.
    """


class Communicator(Protocol):
    """The collectives of a save. All ranks must call the same ones in the same order."""

    rank: int
    size: int

    def sum(self, counts: Counts) -> None:
        """Sum a contiguous int64 array of the same shape over all ranks, in place."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank; values must be picklable."""

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank; the arguments of other ranks are ignored."""


class SingleProcess:
    """The communicator of a single process."""

    rank = 0
    size = 1

    def sum(self, counts: Counts) -> None:
        return None

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class TorchCommunicator:
    """A communicator over a process group (None: the default group), on the device that its backend requires."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, counts: Counts) -> None:
        device = self._device()
        tensor = torch.from_numpy(counts)
        with self._raise_unreachable():
            if device.type == "cpu":
                with _wait_until_released(tensor):
                    dist.all_reduce(tensor, group=self.group)
            else:
                on_device = tensor.to(device)
                dist.all_reduce(on_device, group=self.group)
                tensor.copy_(on_device)

    def gather(self, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        with self._raise_unreachable():
            parts = self._all_gather(_make_first_round(data), _LENGTH_BYTES + _FIRST_ROUND_BYTES)
            sizes = [int.from_bytes(one[:_LENGTH_BYTES], "little") for one in parts]
            if (longest := max(sizes)) > _FIRST_ROUND_BYTES:  # equal on all ranks
                tails = self._all_gather(data[_FIRST_ROUND_BYTES:], longest - _FIRST_ROUND_BYTES)
                parts = [one + tail for one, tail in zip(parts, tails, strict=True)]
        return [pickle.loads(one[_LENGTH_BYTES : _LENGTH_BYTES + size]) for one, size in zip(parts, sizes, strict=True)]

    def _all_gather(self, data: bytes, size: int) -> list[bytes]:
        """Return the data of all ranks, padded to `size` bytes, in rank order; collective."""
        device = self._device()
        buffer = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
        outputs = [torch.empty_like(buffer) for _ in range(self.size)]
        with _wait_until_released(buffer, *outputs) if device.type == "cpu" else nullcontext():
            dist.all_gather(outputs, buffer, group=self.group)
        return [output.cpu().numpy().tobytes() for output in outputs]

    def _device(self) -> torch.device:
        kinds = [device.type for device in self._get_group()._device_types]
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    def broadcast(self, value: Any) -> Any:
        data = pickle.dumps(value) if self.rank == 0 else b""
        with self._raise_unreachable():
            message = self._broadcast(_make_first_round(data), _LENGTH_BYTES + _FIRST_ROUND_BYTES)
            size = int.from_bytes(message[:_LENGTH_BYTES], "little")
            if size > _FIRST_ROUND_BYTES:
                message += self._broadcast(data[_FIRST_ROUND_BYTES:], size - _FIRST_ROUND_BYTES)
        return value if self.rank == 0 else pickle.loads(message[_LENGTH_BYTES : _LENGTH_BYTES + size])

    def _broadcast(self, data: bytes, size: int) -> bytes:
        """Return the data of rank 0, padded to `size` bytes; collective."""
        device = self._device()
        tensor = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
        with _wait_until_released(tensor) if device.type == "cpu" else nullcontext():
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor.cpu().numpy().tobytes()

    def _get_group(self) -> dist.ProcessGroup:
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        return group

    @contextmanager
    def _raise_unreachable(self) -> Iterator[None]:
        extend_lifetime(self._get_group())
        try:
            yield
        except RuntimeError as error:
            raise RankUnreachable(
                f"rank {self.rank}: {error}; if it could not reach another rank, that one or its host is gone, or took "
                "longer than the timeout of the process group"
            ) from error


def _make_first_round(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_FIRST_ROUND_BYTES]


@contextmanager
def _wait_until_released(*tensors: torch.Tensor) -> Iterator[None]:
    """Wait, after a collective, until the gloo thread that ran it has released its tensors.

    The thread signals completion before it releases them, for which it needs the interpreter. A process that exits
    meanwhile, as after a last save, aborts (pytorch/pytorch#190489).
    """
    before = [sys.getrefcount(tensor) for tensor in tensors]
    try:
        yield
    finally:
        deadline = time.monotonic() + _RELEASE_TIMEOUT
        while [sys.getrefcount(tensor) for tensor in tensors] > before and time.monotonic() < deadline:
            time.sleep(0)


_parent_group: dist.ProcessGroup | None = None  # default group of the process from which this one was forked


def _reset_after_fork() -> None:
    global _parent_group
    work_depth.depth = 0
    if dist.is_available() and dist.is_initialized():
        _parent_group = dist.group.WORLD


os.register_at_fork(after_in_child=_reset_after_fork)


def communicator(group: dist.ProcessGroup | None, ranks: int | None = None) -> Communicator:
    """Return the communicator of a save of `ranks` ranks (None: the size of the group).

    DCP does not pass the process group of a save to the writer. Only the number of gathered plans is known. It is
    compared with the size of the group, since a collective on the wrong group would hang.

    Raises:
        ConfigError: this process is not in the group, or `group` is none.
        SaveFailed: the group of the writer has another size than the save.
        RankUnreachable: this process was forked from a rank.
    """
    _check_group(group)
    if not (dist.is_available() and dist.is_initialized()):
        return SingleProcess()
    if ranks == 1:
        return _make_single_process()
    if dist.group.WORLD is _parent_group:
        raise RankUnreachable(
            f"this process was forked from rank {dist.get_rank()} of torch.distributed, and process groups do not work "
            "in a fork: pass no_dist=True, so that it saves or loads alone, or start it with the method 'spawn'"
        )
    size = dist.get_world_size(group)
    if ranks is not None and size != ranks:
        raise SaveFailed(
            f"DCP saves with {ranks} rank(s), but the process group given to the storage writer has {size}: "
            "pass the same process_group to DSQStorageWriter and to dcp.save"
        )
    return _make_single_process() if size == 1 else TorchCommunicator(group)


def _check_group(group: Any) -> None:
    """Raise an error if an argument is neither None nor a process group that this process is in.

    Raises:
        ConfigError: it is not.
    """
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    if dist.is_available() and dist.is_initialized() and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in process_group: save and load with that group on its own ranks alone, "
            "those for which torch.distributed.get_rank(process_group) is not -1"
        )
    raise ConfigError(
        f"process_group is {format_value(group)}, expected a group of torch.distributed, such as new_group returns"
    )


def _make_single_process() -> SingleProcess:
    """Return the communicator of a single rank. It needs no group, but DCP still calls collectives on one."""
    extend_group_lifetimes()
    return SingleProcess()


def extend_group_lifetimes() -> None:
    """Extend the lifetime of the gloo backends of all groups, since the group that DCP uses is unknown."""
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not _parent_group:
        for group in list(dist.distributed_c10d._world.pg_map):
            extend_lifetime(group)


def get_group_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the timeout of the collectives of a group; None: unknown."""
    if group is None:
        return None
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(timeout := getattr(options, "_timeout", None), timedelta):
            return timeout
    return None


def run_on_all_ranks(comm: Communicator, work: Callable[[], _T], error_type: type[DSQError] = SaveFailed) -> _T:
    """Return the result of local work that must succeed on all ranks or fail on all; collective.

    Args:
        comm: communicator of the ranks.
        work: called on each rank.
        error_type: type that replaces an exception that is no `DSQError`; `LoadFailed` for a load.

    Raises:
        DSQError: on every rank if one failed: its own error there, on the others `FailedElsewhere`, or
            `LoadFailedElsewhere` for a load.
        BaseException: an exception that is no `Exception`, such as KeyboardInterrupt, unchanged on its rank.
    """
    results: list[_T] = []
    gather_from_all_ranks(comm, lambda: results.append(work()), error_type)
    return results[0]


@propagate_handler_errors()
def gather_from_all_ranks(
    comm: Communicator, work: Callable[[], _T], error_type: type[DSQError] = SaveFailed
) -> list[_T]:
    """Run work that must succeed on all ranks or fail on all, and return all results, in rank order; collective.

    As `run_on_all_ranks`, but without a further collective to gather the results. Results must be picklable.
    """
    failure: BaseException | None = None
    result: _T | None = None
    before = work_depth.depth
    try:
        work_depth.depth = before + 1
        result = work()
    except RankUnreachable:
        raise  # no rank can be notified
    except BaseException as error:
        failure = error
    finally:
        work_depth.depth = before
    is_secondary, statuses = isinstance(failure, RemoteFailure), gather_status(comm, failure, result)
    if failure is not None and not is_secondary:
        if isinstance(failure, DSQError) or not isinstance(failure, Exception):
            raise failure
        raise error_type((f"rank {comm.rank}: " if comm.size > 1 else "") + described(failure)) from failure
    failed = [(rank, status) for rank, status in enumerate(statuses) if status.error is not None]
    culprits = [(rank, status) for rank, status in failed if not status.is_secondary] or failed
    if culprits:
        elsewhere_type = LoadFailedElsewhere if issubclass(error_type, LoadFailed) else FailedElsewhere
        raise elsewhere_type(
            "; ".join(f"rank {rank} failed: {status.error}" for rank, status in culprits[:3])
        ) from failure
    return [status.result for status in statuses]


class _WorkDepth(threading.local):
    """The nesting depth of works that must succeed on all ranks, in this thread.

    Restore it in an explicit `finally`, not in a context manager: an interrupt can come between the entry of a context
    manager and its block, and with a wrong depth all later works of this process would mismatch those of other ranks.
    """

    depth = 0


work_depth = _WorkDepth()


class Status(NamedTuple):
    """The outcome of the work of a rank.

    Attributes:
        depth: nesting depth of the work.
        is_secondary: whether the rank failed only because it was notified of another failure, in a collective within
            the work.
        error: text of the failure; None: the work succeeded.
        result: result of the work.
    """

    depth: int
    is_secondary: bool
    error: str | None
    result: Any


def gather_status(comm: Communicator, failure: BaseException | None, result: Any = None) -> list[Status]:
    """Gather the outcome of the work of all ranks, in rank order; collective.

    A rank that fails between two collectives of its work gets here while the others are still in an inner collective,
    which then fails for them. It gathers again until they get here too. So within a work, `gather` and `broadcast` of a
    communicator must be called in a nested work, and `sum` only after one.
    """
    cause = None if failure is None else failure.__cause__
    if cause is not None and str(failure) == f"rank {comm.rank}: {described(cause)}":  # wrapped by a nested work
        failure = cause
    error = None if failure is None else described(failure)
    own_status = Status(work_depth.depth, isinstance(failure, RemoteFailure), error, result)
    statuses = comm.gather(own_status)
    while any(status.depth > own_status.depth for status in statuses):
        statuses = comm.gather(own_status)
    return statuses
