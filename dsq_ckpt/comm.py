"""How ranks agree: the three collectives of a save, and a status in them, so that one failure fails all.

`dsq_ckpt.mpi` has the communicator for MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dsq_ckpt.errors import DSQError, LoadFailed, SaveFailed, described

Counts = npt.NDArray[np.int64]
_T = TypeVar("_T")


class Elsewhere(DSQError):
    """Another rank failed; where both are at hand, its error says more."""


class FailedElsewhere(Elsewhere, SaveFailed):
    """A save failed on another rank."""


class LoadFailedElsewhere(Elsewhere, LoadFailed):
    """A load failed on another rank."""


class RankUnreachable(SaveFailed, LoadFailed):
    """A collective, which may be one of a save or of a load, failed: another rank, or its host, is gone or did not come
    in time.
    """


class Communicator(Protocol):
    """The collectives a save needs. All ranks call the same ones in the same order; each waits for all of them."""

    rank: int
    size: int

    def sum(self, counts: Counts) -> None:
        """Sum a contiguous int64 array of the same shape over all ranks, in place."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank; any that can be pickled."""

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on every rank; what the others give is ignored."""


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
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        kinds = [device.type for device in group._device_types]
        device = torch.device("cpu" if "cpu" in kinds else kinds[0])
        tensor = torch.from_numpy(counts)
        with _reaching(self.rank):
            if device.type == "cpu":
                dist.all_reduce(tensor, group=self.group)
            else:
                on_device = tensor.to(device)
                dist.all_reduce(on_device, group=self.group)
                tensor.copy_(on_device)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with _reaching(self.rank):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        values = [value]
        with _reaching(self.rank):
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]


@contextmanager
def _reaching(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankUnreachable(
            f"rank {rank}: {error}; if it could not reach another rank, that one or its host is gone, or took longer "
            "than the timeout of the process group"
        ) from error


def communicator(group: dist.ProcessGroup | None, ranks: int | None = None) -> Communicator:
    """The communicator of a save of `ranks` ranks (None: as many as the group has).

    DCP never tells a writer which group it plans on; the number of plans it gathered is the only witness, and it is
    compared with the group here, since a collective on the wrong group would hang.

    Raises:
        SaveFailed: the group given to the writer has another size than the save.
    """
    available = dist.is_available() and dist.is_initialized()
    if ranks == 1 or not available:
        return SingleProcess()
    found = dist.get_world_size(group)
    if ranks is not None and found != ranks:
        raise SaveFailed(
            f"DCP saves with {ranks} rank(s), but the process group given to the storage writer has {found}: "
            "pass the same process_group to DSQStorageWriter and to dcp.save"
        )
    return SingleProcess() if found == 1 else TorchCommunicator(group)


def sum_with_status(comm: Communicator, counts: Counts, failure: BaseException | None) -> Counts:
    """All-reduce `counts`; a rank that failed takes part all the same, and then every rank raises.

    Raises:
        DSQError: on every rank as soon as one failed: its own error there, `FailedElsewhere` on the others.
        BaseException: what is no `Exception`, such as KeyboardInterrupt, as it is, on the rank where it was raised.
    """
    message = np.zeros(counts.size + 1, np.int64)
    if failure is None:
        message[1:] = counts.reshape(-1)
    else:
        message[0] = 1 + (comm.rank << 32)
    comm.sum(message)
    failed = int(message[0] & 0xFFFFFFFF)
    if isinstance(failure, DSQError) or not isinstance(failure, Exception | None):
        raise failure
    if failure is not None:
        where = f"rank {comm.rank}, " if comm.size > 1 else ""
        raise SaveFailed(f"{where}before the sketches were merged: {described(failure)}") from failure
    if failed:
        culprit = f"rank {int(message[0] >> 32)}" if failed == 1 else f"{failed} ranks"
        raise FailedElsewhere(f"{culprit} failed before the sketches were merged; see the error raised there")
    return message[1:]


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return how long collectives of a group wait; None: not known."""
    if group is None:
        return None
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return None


def together(comm: Communicator, work: Callable[[], _T], otherwise: type[DSQError] = SaveFailed) -> _T:
    """The result of local work that must succeed on all ranks or fail on all; collective.

    Args:
        comm: of the ranks.
        work: what each of them does.
        otherwise: what an error that is none of ours becomes; `LoadFailed` for the work of a load.

    Raises:
        DSQError: on every rank as soon as one failed: its own error there, on the others `FailedElsewhere`, or
            `LoadFailedElsewhere` for a load.
        BaseException: what is no `Exception`, such as KeyboardInterrupt, as it is, on the rank where it was raised.
    """
    failure: BaseException | None = None
    try:
        result = work()
    except RankUnreachable:
        raise  # there is nobody to tell
    except BaseException as error:
        failure = error
    # A rank that only heard of a failure, in a collective within the work, hears here what it was.
    heard = isinstance(failure, Elsewhere)
    everywhere = comm.gather((heard, None if failure is None else described(failure)))
    if failure is not None and not heard:
        if isinstance(failure, DSQError) or not isinstance(failure, Exception):
            raise failure
        raise otherwise((f"rank {comm.rank}: " if comm.size > 1 else "") + described(failure)) from failure
    failed = [(rank, *told) for rank, told in enumerate(everywhere) if told[1] is not None]
    culprits = [one for one in failed if not one[1]] or failed
    if culprits:
        elsewhere = LoadFailedElsewhere if issubclass(otherwise, LoadFailed) else FailedElsewhere
        raise elsewhere("; ".join(f"rank {rank} failed: {text}" for rank, _, text in culprits[:3])) from failure
    return result
