"""Asynchronous agreement of ranks: an all-reduce of numbers that starts after one step and is read after the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dsq_ckpt.distributed.comm import Communicator, TorchCommunicator
from dsq_ckpt.distributed.gloo_groups import new_gloo_group
from dsq_ckpt.errors import SaveFailed


class Consensus:
    """An asynchronous maximum of named numbers over ranks.

    Args:
        names: names of the numbers; a number that a rank does not post counts as 0.
        group: process group for CPU tensors; None for a single process.
    """

    def __init__(self, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
        self._names = tuple(names)
        self._group = group
        self._posted: tuple[torch.Tensor, dist.Work | None] | None = None

    def post(self, values: Mapping[str, int]) -> None:
        """Post this rank's numbers without waiting."""
        assert self._posted is None
        tensor = torch.tensor([values.get(name, 0) for name in self._names], dtype=torch.int64)
        work = None
        if self._group is not None:
            try:
                work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
            except RuntimeError as error:
                raise _unreachable_error(error) from error
        self._posted = tensor, work

    def collect(self) -> dict[str, int]:
        """Return the maxima of the numbers of the last `post`, or zeros before the first one.

        Raises:
            SaveFailed: another rank ended.
        """
        if self._posted is None:
            return dict.fromkeys(self._names, 0)
        (tensor, work), self._posted = self._posted, None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise _unreachable_error(error) from error
        return dict(zip(self._names, tensor.tolist(), strict=True))


def create_cpu_group(comm: Communicator, timeout: float | None = None) -> dist.ProcessGroup | None:
    """Create a gloo group over the ranks of a torch.distributed communicator; collective. None for a single process.

    Args:
        comm: communicator of the ranks.
        timeout: seconds after which a collective fails; None for torch's default.
    """
    if not isinstance(comm, TorchCommunicator):
        return None
    return new_gloo_group(comm.group, None if timeout is None else timedelta(seconds=timeout))


def _unreachable_error(error: RuntimeError) -> SaveFailed:
    return SaveFailed(f"the ranks of the gradient log cannot reach each other; one of them is gone: {error}")
