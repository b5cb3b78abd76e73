"""Sums of counts over ranks: what is empty on all of them is not sent, and every sum is exact."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dsq_ckpt.distributed.comm import FailedElsewhere
from dsq_ckpt.distributed.counts import sum_counts
from dsq_ckpt.errors import SaveFailed
from tests.helpers.thread_ranks import make_thread_ranks

RANKS = 3


def summed(by_rank, failures=(None,) * RANKS):
    """Return the bytes that each rank sent; the arrays are summed in place."""
    comms = make_thread_ranks(RANKS, timeout=60)
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(sum_counts, comms, by_rank, failures))
    (sent,) = {tuple(comm.sent) for comm in comms}
    assert 0 not in sent, "a sum without counts is no collective"
    return sum(sent)


def check(by_rank):
    """Every rank has the sums; return the bytes that it sent."""
    expected = [np.sum(arrays, axis=0) for arrays in zip(*by_rank, strict=True)]
    sent = summed(by_rank)
    for arrays in by_rank:
        for array, sums in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, sums)
            assert array.dtype == np.int64
    return sent


def sparse(rank, *shape, most=1000):
    """Counts of which few columns are occupied, others on each rank."""
    generator, counts = np.random.default_rng(rank), np.zeros(shape, np.int64)
    if counts.size:
        columns = generator.integers(0, shape[-1], 3)
        counts[..., columns] = generator.integers(0, most, (*shape[:-1], 3), endpoint=True)
    return counts


@pytest.mark.parametrize("most", [1, 1000, (1 << 31) // RANKS, 1 << 31, 1 << 33, 1 << 52])
def test_sums_are_exact(most):
    shapes = ((5, 256), (5,), (4,), (0, 256), (0,), (7, 1001), (3, 5, 77), (1, 32518), (1, 1))
    check([[sparse(rank, *shape, most=most) for shape in shapes] for rank in range(RANKS)])


@pytest.mark.parametrize("below, size", [(1, 4), (0, 8)])
def test_counts_take_8_bytes_only_if_a_sum_might_need_them(below, size):
    most = -(-(1 << 31) // RANKS)
    by_rank = [[np.full((4, 32), most - (below and 1 + rank), np.int64)] for rank in range(RANKS)]
    assert check(by_rank) == 4 * 32 * size + 8  # and whether a rank failed


def test_nothing():
    assert check([[] for _ in range(RANKS)]) == 0
    assert check([[np.zeros((9, 900), np.int64)] for _ in range(RANKS)]) == 0


def test_empty_columns_are_not_sent():
    """Each rank occupies one block of two tables of 20,000 columns, and two ranks the same one."""
    by_rank = [[np.zeros((50, 20000), np.int64), np.zeros((1, 20000), np.int64)] for _ in range(RANKS)]
    for arrays, column in zip(by_rank, (640, 671, 19999), strict=True):
        arrays[0][3, column] = 7
        arrays[1][0, 5] = 1
    assert check(by_rank) == (50 * 2 * 32 + 32) * 4 + 8


def test_a_failure_is_everywhere():
    by_rank = [[np.ones((2, 40), np.int64)] for _ in range(RANKS)]
    by_rank[1] = []  # a rank that failed may not know the shapes
    with pytest.raises((FailedElsewhere, MemoryError)):
        summed(by_rank, [None, MemoryError("no room"), None])
    assert all((array == 1).all() for arrays in by_rank for array in arrays)


@pytest.mark.parametrize("others", [
    [(4, 64)],  # a block more
    [(4, 32), (4, 32)],
    [(5, 32)],
    [(4, 32 * 100)],  # more than a byte of blocks
    [],
])
def test_ranks_that_count_differently_fail_together(others):
    """No rank waits in a sum for counts that others do not have, or adds those of other tensors to its own."""
    by_rank = [[np.ones((4, 32), np.int64)] for _ in range(RANKS)]
    by_rank[2] = [np.ones(shape, np.int64) for shape in others]
    comms = make_thread_ranks(RANKS, timeout=60)
    with ThreadPoolExecutor(RANKS) as pool:
        pending = [pool.submit(sum_counts, comm, arrays, None) for comm, arrays in zip(comms, by_rank, strict=True)]
        errors = [future.exception() for future in pending]
    assert {type(error) for error in errors} == {SaveFailed}
    assert {str(error) for error in errors} == {"rank(s) 2 counted values in tables of other sizes than rank 0"}
    assert all((array == 1).all() for arrays in by_rank for array in arrays) and not any(comm.sent for comm in comms)


class Unreadable(np.ndarray):
    """Counts whose columns cannot be copied."""

    error: BaseException

    def __getitem__(self, key):
        if isinstance(key, tuple):
            raise self.error
        return super().__getitem__(key)


@pytest.mark.parametrize("most", [1, 1 << 40])
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
def test_a_rank_that_fails_before_the_sum_keeps_no_other_waiting(most, error):
    """Its columns are chosen after the gather, so that it takes part in the sum, which tells the others."""
    by_rank = [[np.full((4, 32), most, np.int64)] for _ in range(RANKS)]
    by_rank[1] = [by_rank[1][0].view(Unreadable)]
    by_rank[1][0].error = error
    comms = make_thread_ranks(RANKS, timeout=20)
    with ThreadPoolExecutor(RANKS) as pool:
        pending = [pool.submit(sum_counts, comm, arrays, None) for comm, arrays in zip(comms, by_rank, strict=True)]
        first, second, third = [future.exception() for future in pending]
    assert type(first) is type(third) is FailedElsewhere and "rank 1" in str(first) == str(third)
    if isinstance(error, KeyboardInterrupt):
        assert second is error
    else:
        assert type(second) is SaveFailed and "no room" in str(first) and "no room" in str(second)
    assert all((np.asarray(array) == most).all() for arrays in by_rank for array in arrays)
