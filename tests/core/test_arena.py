"""Memory that threads use again, and arrays that share pieces of memory."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dsq_ckpt.core import arena
from dsq_ckpt.core.arena import Arena
from dsq_ckpt.core.workers import Scratch


@pytest.mark.parametrize("piece", [256, 4096])
def test_arrays_are_apart(monkeypatch, piece):
    monkeypatch.setattr(arena, "_PIECE", piece)
    memory, taken = Arena(), []
    for number, size in enumerate([0, 1, 63, 64, 65, 130, 5000, 7, 128, 129]):
        taken.append(memory.take(size))
        assert taken[-1].shape == (size,) and taken[-1].dtype == np.uint8
        taken[-1][:] = number
    assert all((array == number).all() for number, array in enumerate(taken))


def test_threads_have_memory_of_their_own():
    scratch = Scratch()
    own = scratch.array("a", 10, np.float32)
    assert own.shape == (10,) and np.shares_memory(own, scratch.array("a", 3, np.uint8))
    assert not np.shares_memory(own, scratch.array("b", 10, np.float32))
    assert not np.shares_memory(scratch.array("a", 10**6, np.uint8), own), "a longer one is new"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: scratch.array("a", 10**6, np.uint8)).result()
    assert not np.shares_memory(other, scratch.array("a", 10**6, np.uint8))
