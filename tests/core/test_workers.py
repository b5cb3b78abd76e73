"""Memory that threads use again."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dsq_ckpt.core.workers import Scratch


def test_threads_have_memory_of_their_own():
    scratch = Scratch()
    own = scratch.array("a", 10, np.float32)
    assert own.shape == (10,) and np.shares_memory(own, scratch.array("a", 3, np.uint8))
    assert not np.shares_memory(own, scratch.array("b", 10, np.float32))
    assert not np.shares_memory(scratch.array("a", 10**6, np.uint8), own), "a longer one is new"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: scratch.array("a", 10**6, np.uint8)).result()
    assert not np.shares_memory(other, scratch.array("a", 10**6, np.uint8))
