"""What every communicator promises, checked on all its ranks at once."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from dsq_ckpt import ConfigError, LoadFailed, SaveFailed
from dsq_ckpt.distributed.comm import (
    Communicator,
    FailedElsewhere,
    RankUnreachable,
    run_on_all_ranks,
)
from dsq_ckpt.distributed.counts import sum_counts
from dsq_ckpt.distributed.rollback import roll_back_together


def check_communicator(comm: Communicator) -> None:
    """Collective."""
    assert comm.gather(comm.rank) == list(range(comm.size))
    _check_sums(comm)
    _check_values(comm)
    for culprit in {0, comm.size - 1}:
        _check_failures(comm, culprit)
        _check_rollback(comm, culprit)
        _check_between_collectives(comm, culprit)
        _check_nested_rollback(comm, culprit)
    assert comm.gather("still there") == ["still there"] * comm.size


def _check_sums(comm: Communicator) -> None:
    total = comm.size * (comm.size + 1) // 2
    for shape in ((1,), (0,), (7,), (3, 1, 50), (1000,)):
        before = np.arange(np.prod(shape, dtype=int), dtype=np.int64).reshape(shape) + 2**53 + 1  # no float has these
        counts = before * (comm.rank + 1)
        assert comm.sum(counts) is None
        assert np.array_equal(counts, before * total) and counts.shape == shape
    negative = np.full(3, -comm.rank)
    comm.sum(negative)
    assert negative.tolist() == [comm.size - total] * 3


def _check_values(comm: Communicator) -> None:
    """Of different types and sizes, none included."""
    for value in (None, b"x" * (1000 * comm.rank), {"rank": comm.rank, "array": np.arange(comm.rank * 7)}, (1, "ü")):
        everywhere = comm.gather(value)
        assert len(everywhere) == comm.size and repr(everywhere[comm.rank]) == repr(value)
    assert [len(text) for text in comm.gather("y" * (100 - comm.rank))] == [100 - rank for rank in range(comm.size)]
    for value in (None, "z" * 3000, "z" * 4071, "z" * 9000, {"a": [1, 2]}):
        given = value if comm.rank == 0 else lambda: "this is not even looked at"
        assert comm.broadcast(given) == value


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _check_failures(comm: Communicator, culprit: int) -> None:
    """All ranks fail with one, and go on together."""
    counts = np.ones(5, np.int64)
    sum_counts(comm, [counts], None)
    assert counts.tolist() == [comm.size] * 5

    def sums() -> object:
        return sum_counts(comm, [counts], ConfigError("wrong") if comm.rank == culprit else None)

    def bug() -> int:
        if comm.rank == culprit:
            raise ValueError("a bug")
        return comm.rank

    mine = comm.rank == culprit
    with pytest.raises(ConfigError if mine else FailedElsewhere, match="wrong" if mine else f"rank {culprit} failed"):
        sums()
    with pytest.raises(SaveFailed, match="ValueError: a bug" if mine else f"^rank {culprit} failed: ValueError: a bug"):
        run_on_all_ranks(comm, bug)
    # It is an error of the one thing that was done.
    for kind, other in ((SaveFailed, LoadFailed), (LoadFailed, SaveFailed)):
        with pytest.raises(kind) as failure:
            run_on_all_ranks(comm, bug, kind)
        assert not isinstance(failure.value, other)
    # What the status cannot carry, the consensus around it does.
    says = "^wrong$" if mine else f"^rank {culprit} failed: ConfigError: wrong$"
    with pytest.raises(ConfigError if mine else FailedElsewhere, match=says):
        run_on_all_ranks(comm, sums)
    # What is no Exception stays what it is where it was raised.
    for error in (KeyboardInterrupt(), SystemExit(3), GeneratorExit()):
        own = error if mine else None
        for work in (partial(_raise, own), partial(sum_counts, comm, [counts], own)):
            with pytest.raises(type(error) if mine else FailedElsewhere) as caught:
                run_on_all_ranks(comm, work)
            says = f"rank {culprit} failed: {type(error).__name__}"
            assert caught.value is error if mine else says in str(caught.value)
    if comm.size > 1:
        failed = "^" + "; ".join(f"rank {rank} failed: ValueError: a bug" for rank in range(1, comm.size)) + "$"
        with pytest.raises(SaveFailed, match="a bug" if comm.rank else failed):
            sum_counts(comm, [counts], ValueError("a bug") if comm.rank else None)
    assert run_on_all_ranks(comm, lambda: comm.rank) == comm.rank


def _check_rollback(comm: Communicator, culprit: int) -> None:
    """Work is undone on all ranks with one that failed, after all have ended it; nothing is if none did."""
    undone: list[int] = []

    def work(error: BaseException | None) -> int:
        with roll_back_together(comm, lambda: undone.append(comm.rank)):
            _raise(error)
            return comm.rank

    for error in (OSError(28, "full"), KeyboardInterrupt()):
        if comm.rank == culprit:
            with pytest.raises(type(error)) as caught:
                work(error)
            assert caught.value is error
        else:
            assert work(None) == comm.rank
        assert undone.pop() == comm.rank
    assert work(None) == comm.rank and not undone
    with pytest.raises(RankUnreachable):  # no rank is asked, since one is gone
        work(RankUnreachable("gone"))
    assert not undone


def _check_nested_rollback(comm: Communicator, culprit: int) -> None:
    """Check that the others undo a work that is undone together, and go no further, if a rank failed around it."""
    undone, passed = list[int](), list[int]()

    def work() -> None:
        if comm.rank == culprit:
            raise MemoryError("no room")
        with roll_back_together(comm, lambda: undone.append(1)):
            pass
        passed.append(1)

    with pytest.raises(SaveFailed, match="MemoryError: no room"):
        run_on_all_ranks(comm, work)
    assert undone == [1] * (comm.rank != culprit) and not passed


def _check_between_collectives(comm: Communicator, culprit: int) -> None:
    """A rank that fails between two collectives of its work fails the one that others are in, however deep."""
    mine, undone = comm.rank == culprit, list[int]()

    def work(depth: int, place: int, sums: bool) -> int:
        for number in range(3):
            if mine and (depth, number) == (1, place):
                raise MemoryError("no room")
            if sums:
                sum_counts(comm, [np.ones(number + 1, np.int64)], None)
            else:
                run_on_all_ranks(comm, lambda: work(depth + 1, place, True) if depth < 2 else None)
        return 1

    def undoing(place: int, sums: bool) -> None:
        with roll_back_together(comm, lambda: undone.append(place)):
            work(1, place, sums)

    for place in range(3):
        for sums in (False, True):
            says = "MemoryError: no room" if mine else f"^rank {culprit} failed: MemoryError: no room$"
            with pytest.raises(SaveFailed, match=says):
                run_on_all_ranks(comm, lambda: work(1, place, sums))  # noqa: B023
            with pytest.raises(MemoryError if mine else FailedElsewhere, match="no room"):
                undoing(place, sums)
            assert undone.pop() == place and not undone
