"""How ranks merge their sketches: a sum of int64 arrays, with a status in it, so that one failure fails all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dsq_ckpt.errors import DSQError, SaveFailed

Counts = npt.NDArray[np.int64]
_T = TypeVar("_T")


class FailedElsewhere(SaveFailed):
    """Another rank failed; where both are at hand, its error says more."""


class Communicator(Protocol):
    """The collectives a save needs."""

    rank: int
    size: int

    def sum(self, counts: Counts) -> None:
        """Sum an int64 array of the same length over all ranks, in place."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank."""


class SingleProcess:
    """The communicator of a process alone."""

    rank = 0
    size = 1

    def sum(self, counts: Counts) -> None:
        return None

    def gather(self, value: Any) -> list[Any]:
        return [value]


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
        if device.type == "cpu":
            dist.all_reduce(tensor, group=self.group)
        else:
            on_device = tensor.to(device)
            dist.all_reduce(on_device, group=self.group)
            tensor.copy_(on_device)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


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
    """
    message = np.zeros(counts.size + 1, np.int64)
    if failure is None:
        message[1:] = counts.reshape(-1)
    else:
        message[0] = 1 + (comm.rank << 32)
    comm.sum(message)
    failed = int(message[0] & 0xFFFFFFFF)
    if isinstance(failure, DSQError):
        raise failure
    if failure is not None:
        raise SaveFailed(f"before the sketches were merged: {type(failure).__name__}: {failure}") from failure
    if failed:
        culprit = f"rank {int(message[0] >> 32)}" if failed == 1 else f"{failed} ranks"
        raise FailedElsewhere(f"{culprit} failed before the sketches were merged; see the error raised there")
    return message[1:]


def together(comm: Communicator, work: Callable[[], _T]) -> _T:
    """The result of local work that must succeed on all ranks or fail on all; collective.

    Raises:
        DSQError: on every rank as soon as one failed: its own error there, `FailedElsewhere` on the others.
    """
    failure = None
    try:
        result = work()
    except Exception as error:
        failure = error
    texts = comm.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if isinstance(failure, DSQError):
        raise failure
    if failure is not None:
        raise SaveFailed(f"{type(failure).__name__}: {failure}") from failure
    failed = [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise FailedElsewhere("; ".join(failed[:3]))
    return result
