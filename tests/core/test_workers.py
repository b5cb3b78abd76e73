"""Memory that threads use again, and work that is done once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dsq_ckpt.core.workers import Scratch, Workers


def test_threads_have_memory_of_their_own():
    scratch = Scratch()
    own = scratch.array("a", 10, np.float32)
    assert own.shape == (10,) and np.shares_memory(own, scratch.array("a", 3, np.uint8))
    assert not np.shares_memory(own, scratch.array("b", 10, np.float32))
    assert not np.shares_memory(scratch.array("a", 10**6, np.uint8), own), "a longer one is new"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: scratch.array("a", 10**6, np.uint8)).result()
    assert not np.shares_memory(other, scratch.array("a", 10**6, np.uint8))


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_items_are_done_once_where_there_can_be_no_more_threads(monkeypatch, allowed):
    """A pool that may not start a thread for an item has queued it already for those that it has."""
    start, started, done = threading.Thread.start, [], []

    def limited(thread):
        if len(started) == allowed:
            refused.set()
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def work(item):
        assert refused.wait(60)  # or a thread is idle when an item comes, and no other is started for it
        together.wait(0.01)
        done.append(item)
        return item

    refused = threading.Event()
    together = threading.Event()  # never set: long enough for another thread to take the same item
    with Workers(4, 1024) as workers:
        monkeypatch.setattr(threading.Thread, "start", limited)
        assert list(workers.map(work, range(20))) == list(range(20))
    assert sorted(done) == list(range(20)) and len(started) == allowed


def test_a_single_item_is_done_by_the_calling_thread():
    with Workers(2, 1024) as workers:
        assert list(workers.map(lambda _: threading.current_thread(), [0])) == [threading.current_thread()]
        assert threading.current_thread() not in list(workers.map(lambda _: threading.current_thread(), [0, 0, 0]))
        assert list(workers.map(str, [])) == []


@pytest.mark.parametrize(("threads", "sizes"), [(1, [1] * 5), (2, [3, 2])])
def test_small_items_are_passed_to_threads_together(threads, sizes):
    """Three items of 100,000 elements are more than a thread processes before another one has started."""
    passed = []
    with Workers(threads, 1024) as workers:
        take = workers.map
        workers.map = lambda work, items: take(work, (passed.append(len(item)) or item for item in items))
        assert list(workers.map_batches(str, range(5), lambda _: 100_000)) == list("01234")
    assert passed == sizes


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("items", [1, 3])
def test_work_that_raises_stop_iteration_does_not_end_the_results(threads, items):
    with Workers(threads, 1024) as workers:
        for results in (
            workers.map(lambda _: next(iter(())), range(items)),
            workers.map_batches(lambda _: next(iter(())), range(items), lambda _: 1),
        ):
            with pytest.raises(RuntimeError, match="StopIteration"):
                list(results)
