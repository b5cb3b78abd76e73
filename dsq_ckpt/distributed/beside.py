"""Process groups on the CPU beside those of the training, over the same ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist

from dsq_ckpt.distributed.comm import communicator


def group_beside(like: dist.ProcessGroup | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """Create a gloo group over the ranks of another one; collective over these.

    Args:
        like: the other group; None: the default group.
        timeout: after which a collective gives up; None: torch's default.
    """
    base = like if like is not None else dist.group.WORLD
    assert base is not None
    ranks, local = dist.get_process_group_ranks(base), like is not None
    with _counted_alike(like) if local else nullcontext():
        found = dist.new_group(ranks, backend="gloo", use_local_synchronization=local, timeout=timeout)
    assert isinstance(found, dist.ProcessGroup)
    return found


@contextmanager
def _counted_alike(like: dist.ProcessGroup | None) -> Iterator[None]:
    """Make all ranks of a group count as many groups as the one that is in most.

    torch names a group that only its own ranks make by these ranks and by how many groups a rank is in. Where that
    differs, as between overlapping groups, ranks would wait for each other under different names.
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
