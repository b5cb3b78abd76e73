"""Messages arrive whole and in order, shared memory with them, and the end of the other process is told."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from dsq_ckpt.lowdiff.arena import Arena, align
from dsq_ckpt.lowdiff.channel import Channel, ChannelClosed
from tests.helpers.open_files import count_descriptors, identity


@pytest.fixture
def ends():
    channel, child_socket = Channel.pair()
    other = Channel(child_socket)
    yield channel, other
    channel.close()
    other.close()


def test_messages_in_order(ends):
    channel, other = ends
    large = {"kind": "large", "text": "ä" * 3_000_000}
    received = []

    def read():
        received.extend(other.receive() for _ in range(3))

    thread = threading.Thread(target=read)
    thread.start()
    for message in ({"n": 1}, large, {"n": 2}):
        channel.send(message)
    thread.join(120)
    assert received == [({"n": 1}, None), (large, None), ({"n": 2}, None)]


def test_poll_without_a_message(ends):
    channel, other = ends
    assert other.receive(0.0) is None
    started = time.monotonic()
    assert other.receive(0.05) is None
    assert time.monotonic() - started > 0.04
    channel.send({})
    assert other.receive(0.0) == ({}, None)


def test_shared_memory(ends):
    channel, other = ends
    arena = Arena.create(1000)
    channel.send({"slot": 3}, arena)
    channel.send({"slot": 4})
    message, shared = other.receive()
    assert message == {"slot": 3} and shared.size == 1000 and other.receive() == ({"slot": 4}, None)
    view = arena.view(64, (3, 5), torch.bfloat16)
    view.fill_(1.5)
    assert torch.equal(shared.view(64, (3, 5), torch.bfloat16), view)
    arena.close()
    arena.close()
    assert view.sum() == 22.5, "tensors outlive the descriptor"
    shared.close()


def test_descriptors_are_given_back(ends):
    channel, other = ends
    files, most = set(), 0
    for _ in range(20):
        arena = Arena.create(64)
        files.add(identity(arena.descriptor))
        channel.send({}, arena)
        _, shared = other.receive()
        most = max(most, count_descriptors(files))
        arena.close()
        shared.close()
        del arena, shared
    assert len(files) == 20 and most >= 2 and count_descriptors(files) == 0


def test_a_closed_channel_raises(ends):
    channel, other = ends
    channel.send({"last": 1})
    channel.close()
    assert other.receive() == ({"last": 1}, None), "what was sent is received"
    with pytest.raises(ChannelClosed, match="is gone"):
        other.receive()
    with pytest.raises(ChannelClosed):
        for _ in range(2):
            other.send({})


@pytest.mark.parametrize("torn", [b"\x05", b"\x05\0\0\0\0\0\0", b"\x05\0\0\0\0\0\0\0{}", b"\xff\xff\xff\xff\0\0\0\0"])
def test_torn_message(torn):
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender.sendall(torn)
    sender.close()
    other = Channel(receiver)
    with pytest.raises(ChannelClosed, match=r"in the middle|claims"):
        other.receive()
    other.close()


def test_nobody_reads(ends):
    """A process that hangs: a sender with a time limit does not."""
    channel, _ = ends
    with pytest.raises(ChannelClosed, match="timed out"):
        channel.send({"text": "x" * 10_000_000}, timeout=0.1)


def test_alignment():
    assert [align(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert Arena.create(0).view(0, (0, 3), torch.float32).shape == (0, 3)
