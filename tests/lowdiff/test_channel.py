"""Messages arrive whole and in order, shared memory with them, and the end of the other process is told."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch

from dsq_ckpt.lowdiff.arena import Arena, align
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed


@pytest.fixture
def ends():
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_in_order(ends):
    ours, other = ends
    large = {"kind": "large", "text": "ä" * 3_000_000}
    received = []

    def read():
        received.extend(other.receive() for _ in range(3))

    thread = threading.Thread(target=read)
    thread.start()
    for message in ({"n": 1}, large, {"n": 2}):
        ours.send(message)
    thread.join(10)
    assert received == [({"n": 1}, None), (large, None), ({"n": 2}, None)]


def test_poll_without_a_message(ends):
    ours, other = ends
    assert other.receive(0.0) is None
    started = time.monotonic()
    assert other.receive(0.05) is None
    assert time.monotonic() - started > 0.04
    ours.send({})
    assert other.receive(0.0) == ({}, None)


def test_shared_memory(ends):
    ours, other = ends
    arena = Arena.create(1000)
    ours.send({"slot": 3}, arena)
    ours.send({"slot": 4})
    message, theirs = other.receive()
    assert message == {"slot": 3} and theirs.size == 1000 and other.receive() == ({"slot": 4}, None)
    view = arena.view(64, (3, 5), torch.bfloat16)
    view.fill_(1.5)
    assert torch.equal(theirs.view(64, (3, 5), torch.bfloat16), view)
    arena.close()
    arena.close()
    assert view.sum() == 22.5, "tensors outlive the descriptor"
    theirs.close()


def test_descriptors_are_given_back(ends):
    ours, other = ends
    before = descriptors()
    for _ in range(20):
        arena = Arena.create(64)
        ours.send({}, arena)
        _, theirs = other.receive()
        arena.close()
        theirs.close()
        del arena, theirs
    assert descriptors() == before


def test_a_closed_channel_raises(ends):
    ours, other = ends
    ours.send({"last": 1})
    ours.close()
    assert other.receive() == ({"last": 1}, None), "what was sent is received"
    with pytest.raises(ChannelClosed, match="is gone"):
        other.receive()
    with pytest.raises(ChannelClosed):
        for _ in range(2):
            other.send({})


@pytest.mark.parametrize("torn", [b"\x05", b"\x05\0\0\0\0\0\0", b"\x05\0\0\0\0\0\0\0{}", b"\xff\xff\xff\xff\0\0\0\0"])
def test_torn_message(torn):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.sendall(torn)
    ours.close()
    other = Channel(theirs)
    with pytest.raises(ChannelClosed, match=r"in the middle|claims"):
        other.receive()
    other.close()


def test_nobody_reads(ends):
    """A process that hangs: a sender with a time limit does not."""
    ours, _ = ends
    with pytest.raises(ChannelClosed, match="timed out"):
        ours.send({"text": "x" * 10_000_000}, timeout=0.1)


def test_alignment():
    assert [align(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert Arena.create(0).view(0, (0, 3), torch.float32).shape == (0, 3)
