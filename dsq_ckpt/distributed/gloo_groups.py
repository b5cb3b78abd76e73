"""Gloo process groups over the ranks of the training's groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist

from dsq_ckpt.distributed.comm import communicator


def new_gloo_group(like: dist.ProcessGroup | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """Create a gloo group over the ranks of another group; collective over these ranks.

    Args:
        like: the other group; None: the default group.
        timeout: timeout of its collectives; None: torch's default.
    """
    base = like if like is not None else dist.group.WORLD
    assert base is not None
    ranks, local = dist.get_process_group_ranks(base), like is not None
    with _equalize_group_counts(like) if local else nullcontext():
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=local, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def _equalize_group_counts(like: dist.ProcessGroup | None) -> Iterator[None]:
    """Register placeholder groups, so that all ranks of a group have the same number of groups.

    torch names a group that is created by its own ranks only (`use_local_synchronization`) by these ranks and the
    number of groups of a rank. If that number differs, as between overlapping groups, ranks would wait for each other
    under different names.
    """
    names = dist.distributed_c10d._world.pg_names
    counts = communicator(like).gather(len(names))
    fillers = [object() for _ in range(max(counts) - len(names))]
    names.update(dict.fromkeys(fillers, ""))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for filler in fillers:
            del names[filler]  # type: ignore[arg-type]
