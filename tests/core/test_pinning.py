"""Memory for copies from a GPU; whether it is pinned shows on one, in tests/api/test_cuda.py."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from dsq_ckpt.core import pinning

GPU = torch.device("cuda", 0)


@pytest.fixture
def pinned(monkeypatch):
    """Addresses that are pinned, as far as a machine without CUDA is told."""
    addresses: set[int] = set()
    monkeypatch.setattr(pinning, "pin", lambda tensor, device: addresses.add(tensor.data_ptr()) is None)
    monkeypatch.setattr(pinning, "unpin", addresses.remove)
    return addresses


def test_it_is_unpinned_before_it_is_freed(pinned):
    memory = pinning.allocate_pinned(1000, GPU)
    assert pinned == {memory.data_ptr()} and memory.shape == (1000,)
    del memory
    gc.collect()
    assert not pinned


def test_where_it_cannot_be_pinned_it_is_memory_like_any(monkeypatch):
    monkeypatch.setattr(pinning, "pin", lambda tensor, device: False)
    pinning.allocate_pinned(10, GPU).fill_(3)
    gc.collect()


def test_pages_are_not_copied_by_a_fork(pinned):
    """A page that the parent writes to after a fork is the one that it had before, which a GPU goes on to write to."""
    memory = pinning.allocate_pinned(1 << 16, GPU)
    memory.fill_(1)
    (ready, go), (told, tell) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(ready, 1)
        del pinned
        os.write(tell, bytes(memory[::4096].tolist()))
        os._exit(0)
    memory.fill_(2)
    os.write(go, b".")
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(told, 100) == bytes([2] * 16)
