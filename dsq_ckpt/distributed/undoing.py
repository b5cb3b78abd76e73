"""Local work that is undone on all ranks if any failed, where another collective tells them of its error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.distributed.comm import Communicator, FailedElsewhere, RankUnreachable, here, told


@contextmanager
def undone_together(comm: Communicator, undo: Callable[[], None]) -> Iterator[None]:
    """Do the work of the block on each rank, and undo it on all if any failed, once none works any more; collective.

    A rank that failed raises its own error, the others none. Where a rank cannot be reached nothing is undone: it may
    still be working.

    Args:
        comm: communicator of the ranks.
        undo: called on each rank.

    Raises:
        FailedElsewhere: another rank failed in a work around this one, and does not come to what follows.
        RankUnreachable: another rank is gone.
    """

    def conclude(failure: BaseException | None) -> None:
        failed = [(rank, one) for rank, one in enumerate(told(comm, failure)) if one.text is not None]
        if failed:
            undo()
        if failure is None and any(one.depth < before for _, one in failed):  # and never comes to what follows
            raise FailedElsewhere("; ".join(f"rank {rank} failed: {one.text}" for rank, one in failed[:3]))

    before = here.depth
    try:
        here.depth = before + 1
        yield
        run_pending_handlers()  # what a handler raises later is not counted
    except RankUnreachable:
        raise
    except BaseException as error:
        here.depth = before
        conclude(error)
        raise
    finally:
        here.depth = before
    conclude(None)
