"""Rollback of local work on all ranks if any rank failed, if the error itself is propagated by another collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.distributed.comm import Communicator, FailedElsewhere, RankUnreachable, gather_status, work_depth


@contextmanager
def roll_back_together(comm: Communicator, undo: Callable[[], None]) -> Iterator[None]:
    """Run the block on each rank, and call `undo` on all if any failed, once all blocks have ended; collective.

    A failed rank raises its own error, the others none. If a rank cannot be reached nothing is undone, since it may
    still be working.

    Args:
        comm: communicator of the ranks.
        undo: called on each rank.

    Raises:
        FailedElsewhere: another rank failed in a work around this one, and will not reach the following collectives.
        RankUnreachable: another rank is gone.
    """

    def conclude(failure: BaseException | None) -> None:
        failed = [
            (rank, status) for rank, status in enumerate(gather_status(comm, failure)) if status.error is not None
        ]
        if failed:
            undo()
        if failure is None and any(status.depth < before for _, status in failed):  # it skips the following collectives
            raise FailedElsewhere("; ".join(f"rank {rank} failed: {status.error}" for rank, status in failed[:3]))

    before = work_depth.depth
    try:
        work_depth.depth = before + 1
        yield
        run_pending_handlers()  # a later exception of a handler does not fail the block
    except RankUnreachable:
        raise
    except BaseException as error:
        work_depth.depth = before
        conclude(error)
        raise
    finally:
        work_depth.depth = before
    conclude(None)
