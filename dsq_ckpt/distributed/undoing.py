"""Local work that is undone on all ranks if any failed, where another collective tells them of its error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dsq_ckpt.core.interrupts import let_signals_through
from dsq_ckpt.distributed.comm import Communicator, RankUnreachable, inside, told


@contextmanager
def undone_together(comm: Communicator, undo: Callable[[], None]) -> Iterator[None]:
    """Do the work of the block on each rank, and undo it on all if any failed, once none works any more; collective.

    A rank that failed raises its own error, the others none. Where a rank cannot be reached nothing is undone: it may
    still be working.

    Args:
        comm: communicator of the ranks.
        undo: called on each rank.

    Raises:
        RankUnreachable: another rank is gone.
    """

    def conclude(failure: BaseException | None) -> None:
        if any(status.text is not None for status in told(comm, failure)):
            undo()

    try:
        with inside():
            yield
            let_signals_through()  # what a handler raises later is not counted
    except RankUnreachable:
        raise
    except BaseException as error:
        conclude(error)
        raise
    conclude(None)
