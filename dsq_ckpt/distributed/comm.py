"""Communication of ranks: the three collectives of a save, and a status in them, so that one failure fails all.

`dsq_ckpt.distributed.mpi` has the communicator for MPI.
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

from dsq_ckpt.core.arrays import Counts
from dsq_ckpt.core.interrupts import propagate_handler_errors
from dsq_ckpt.distributed.lasting import keep
from dsq_ckpt.errors import DSQError, LoadFailed, SaveFailed, described

_T = TypeVar("_T")
_HEAD, _SHORT = 8, 4088
"""Bytes of a length, and of a pickle that is gathered or broadcast in one round; a longer one takes a second."""
_FREED_WITHIN = 0.2  # seconds; other backends may keep tensors for longer


class Elsewhere(DSQError):
    """Another rank failed; the error of that rank, where it is known, says more."""


class FailedElsewhere(Elsewhere, SaveFailed):
    """A save failed on another rank."""


class LoadFailedElsewhere(Elsewhere, LoadFailed):
    """A load failed on another rank."""


class RankUnreachable(SaveFailed, LoadFailed):
    """A collective, which may be one of a save or of a load, failed: another rank, or its host, is gone or did not come
    in time; or none can be reached from this process.
    """


class Communicator(Protocol):
    """The collectives a save needs. All ranks call the same ones in the same order; each waits for all of them."""

    rank: int
    size: int

    def sum(self, counts: Counts) -> None:
        """Sum a contiguous int64 array of the same shape over all ranks, in place."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank; a value is anything that can be pickled."""

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank; the arguments of other ranks are ignored."""


class SingleProcess:
    """The communicator of a process alone."""

    rank = 0
    size = 1

    def sum(self, counts: Counts) -> None:
        return None

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class TorchCommunicator:
    """torch.distributed, over `group` (None: the default group), on the device its backend wants."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, counts: Counts) -> None:
        device = self._device()
        tensor = torch.from_numpy(counts)
        with self._reaching():
            if device.type == "cpu":
                with _lent(tensor):
                    dist.all_reduce(tensor, group=self.group)
            else:
                on_device = tensor.to(device)
                dist.all_reduce(on_device, group=self.group)
                tensor.copy_(on_device)

    def gather(self, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        with self._reaching():
            found = self._all_gather(len(data).to_bytes(_HEAD, "little") + data[:_SHORT], _HEAD + _SHORT)
            sizes = [int.from_bytes(one[:_HEAD], "little") for one in found]
            if (longest := max(sizes)) > _SHORT:  # all ranks see that alike
                rest = self._all_gather(data[_SHORT:], longest - _SHORT)
                found = [one + more for one, more in zip(found, rest, strict=True)]
        return [pickle.loads(one[_HEAD : _HEAD + size]) for one, size in zip(found, sizes, strict=True)]

    def _all_gather(self, data: bytes, size: int) -> list[bytes]:
        """Return what each rank gives, padded to `size` bytes, in rank order; collective."""
        device = self._device()
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
        everything = [torch.empty_like(own) for _ in range(self.size)]
        with _lent(own, *everything) if device.type == "cpu" else nullcontext():
            dist.all_gather(everything, own, group=self.group)
        return [one.cpu().numpy().tobytes() for one in everything]

    def _device(self) -> torch.device:
        kinds = [device.type for device in self._used()._device_types]
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    def broadcast(self, value: Any) -> Any:
        data = pickle.dumps(value) if self.rank == 0 else b""
        with self._reaching():
            found = self._broadcast(len(data).to_bytes(_HEAD, "little") + data[:_SHORT], _HEAD + _SHORT)
            size = int.from_bytes(found[:_HEAD], "little")
            if size > _SHORT:
                found += self._broadcast(data[_SHORT:], size - _SHORT)
        return value if self.rank == 0 else pickle.loads(found[_HEAD : _HEAD + size])

    def _broadcast(self, data: bytes, size: int) -> bytes:
        """Return what rank 0 gives, padded to `size` bytes; collective."""
        device = self._device()
        tensor = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
        with _lent(tensor) if device.type == "cpu" else nullcontext():
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor.cpu().numpy().tobytes()

    def _used(self) -> dist.ProcessGroup:
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        return group

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        keep(self._used())
        try:
            yield
        except RuntimeError as error:
            raise RankUnreachable(
                f"rank {self.rank}: {error}; if it could not reach another rank, that one or its host is gone, or took "
                "longer than the timeout of the process group"
            ) from error


@contextmanager
def _lent(*tensors: torch.Tensor) -> Iterator[None]:
    """Wait, after a collective, until the thread of gloo that ran it has let go of its tensors too.

    It signals the end before it frees them, and needs the interpreter for that. A process that exits meanwhile, as
    after a last save, aborts (pytorch/pytorch#190489).
    """
    before = [sys.getrefcount(tensor) for tensor in tensors]
    try:
        yield
    finally:
        deadline = time.monotonic() + _FREED_WITHIN
        while [sys.getrefcount(tensor) for tensor in tensors] > before and time.monotonic() < deadline:
            time.sleep(0)


_inherited: dist.ProcessGroup | None = None  # the default group of the process that this one was forked from


def _forked() -> None:
    global _inherited
    here.depth = 0
    if dist.is_available() and dist.is_initialized():
        _inherited = dist.group.WORLD


os.register_at_fork(after_in_child=_forked)


def communicator(group: dist.ProcessGroup | None, ranks: int | None = None) -> Communicator:
    """Return the communicator of a save of `ranks` ranks (None: as many as the group has).

    DCP never tells a writer which group it plans on; the number of plans it gathered is the only evidence, and it is
    compared with the group here, since a collective on the wrong group would hang.

    Raises:
        SaveFailed: the group given to the writer has another size than the save.
        RankUnreachable: this process is a fork of one that is a rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return SingleProcess()
    if ranks == 1:
        return _alone()
    if dist.group.WORLD is _inherited:
        raise RankUnreachable(
            f"this process was forked from rank {dist.get_rank()} of torch.distributed, and process groups do not work "
            "in a fork: pass no_dist=True, so that it saves or loads alone, or start it with the method 'spawn'"
        )
    found = dist.get_world_size(group)
    if ranks is not None and found != ranks:
        raise SaveFailed(
            f"DCP saves with {ranks} rank(s), but the process group given to the storage writer has {found}: "
            "pass the same process_group to DSQStorageWriter and to dcp.save"
        )
    return _alone() if found == 1 else TorchCommunicator(group)


def _alone() -> SingleProcess:
    """Return the communicator of a rank alone, which needs no group; but DCP does collectives on it all the same."""
    keep_groups()
    return SingleProcess()


def keep_groups() -> None:
    """Keep gloo's side of all groups for a moment longer than the groups: DCP does not tell on which it works."""
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not _inherited:
        for group in list(dist.distributed_c10d._world.pg_map):
            keep(group)


def sum_with_status(comm: Communicator, counts: Counts, failure: BaseException | None) -> Counts:
    """Return the sum of `counts` over all ranks; a rank that failed takes part too, and then every rank raises.

    Raises:
        DSQError: on every rank as soon as one failed: its own error there, `FailedElsewhere` on the others.
        BaseException: what is no `Exception`, such as KeyboardInterrupt, as it is, on the rank where it was raised.
    """

    def status() -> Counts:
        if failure is not None:
            raise failure
        return counts.flatten()

    total = run_on_all_ranks(comm, status)  # first: a rank that failed may not know what the others sum up
    comm.sum(total)
    return total


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return how long collectives of a group wait; None: not known."""
    if group is None:
        return None
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return None


def run_on_all_ranks(comm: Communicator, work: Callable[[], _T], otherwise: type[DSQError] = SaveFailed) -> _T:
    """Return the result of local work that must succeed on all ranks or fail on all; collective.

    Args:
        comm: communicator of the ranks.
        work: called on each rank.
        otherwise: what an error that is none of ours becomes; `LoadFailed` for the work of a load.

    Raises:
        DSQError: on every rank as soon as one failed: its own error there, on the others `FailedElsewhere`, or
            `LoadFailedElsewhere` for a load.
        BaseException: what is no `Exception`, such as KeyboardInterrupt, as it is, on the rank where it was raised.
    """
    results: list[_T] = []
    gather_from_all_ranks(comm, lambda: results.append(work()), otherwise)
    return results[0]


@propagate_handler_errors()
def gather_from_all_ranks(
    comm: Communicator, work: Callable[[], _T], otherwise: type[DSQError] = SaveFailed
) -> list[_T]:
    """Do work that must succeed on all ranks or fail on all, and return the results of all, in rank order; collective.

    As `together`, which it saves a collective after it. Results can be pickled.
    """
    failure: BaseException | None = None
    result: _T | None = None
    before = here.depth
    try:
        here.depth = before + 1
        result = work()
    except RankUnreachable:
        raise  # no rank can be notified
    except BaseException as error:
        failure = error
    finally:
        here.depth = before
    heard, everywhere = isinstance(failure, Elsewhere), told(comm, failure, result)
    if failure is not None and not heard:
        if isinstance(failure, DSQError) or not isinstance(failure, Exception):
            raise failure
        raise otherwise((f"rank {comm.rank}: " if comm.size > 1 else "") + described(failure)) from failure
    failed = [(rank, status.heard, status.text) for rank, status in enumerate(everywhere) if status.text is not None]
    culprits = [one for one in failed if not one[1]] or failed
    if culprits:
        elsewhere = LoadFailedElsewhere if issubclass(otherwise, LoadFailed) else FailedElsewhere
        raise elsewhere("; ".join(f"rank {rank} failed: {text}" for rank, _, text in culprits[:3])) from failure
    return [status.result for status in everywhere]


class _Depth(threading.local):
    """How many works that must succeed on all ranks this thread is in, one in the other.

    Whoever changes it puts back what it was, in a `finally` of its own: an interrupt can come between a context
    manager's entry and the block, and a depth that stays behind has all later works of this process mismatch.
    """

    depth = 0


here = _Depth()


class Status(NamedTuple):
    """How the work of a rank ended.

    Attributes:
        depth: of the work.
        heard: whether the rank was only notified of a failure, in a collective within the work; it receives its text
            once more.
        text: text of a failure; None: there was none.
        result: result of the work.
    """

    depth: int
    heard: bool
    text: str | None
    result: Any


def told(comm: Communicator, failure: BaseException | None, result: Any = None) -> list[Status]:
    """Tell all ranks how the work of this one ended, and return how that of each did, in rank order; collective.

    A rank that failed between two collectives within its work comes here while the others are still in such a one, and
    fails that; so it tells them again, until they come here too. So no work calls `gather` or `broadcast` of a
    communicator but in a work of its own, and `sum` after one.
    """
    cause = None if failure is None else failure.__cause__
    if cause is not None and str(failure) == f"rank {comm.rank}: {described(cause)}":  # made of it by a work within
        failure = cause
    own = Status(here.depth, isinstance(failure, Elsewhere), None if failure is None else described(failure), result)
    everywhere = comm.gather(own)
    while any(status.depth > own.depth for status in everywhere):
        everywhere = comm.gather(own)
    return everywhere
