"""An ordered message channel between a training process and its checkpointing process: JSON and shared memory."""

from __future__ import annotations

import json
import os
import socket
import struct
import weakref
from typing import Any

from dsq_ckpt.errors import DSQError
from dsq_ckpt.lowdiff.arena import Arena

_LENGTH = struct.Struct("<II")
_MAX_MESSAGE_BYTES = 1 << 30


class ChannelClosed(DSQError):
    """Raised when the other process has ended or cannot be reached."""


_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close all channels in a forked child, such as a data loader's worker, so that the peer sees this process die."""
    for channel in list(_open_channels):
        channel.close()


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """One end of a connection between two processes. A message is JSON, optionally with an arena.

    Nothing is pickled, so a message cannot run code. Not thread-safe.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        _open_channels.add(self)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Create a connection; return this process's end, and a socket for the other process."""
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(first), second

    def send(self, message: dict[str, Any], arena: Arena | None = None, timeout: float | None = None) -> None:
        """Send a message, and let the other process map the arena.

        Raises:
            ChannelClosed: the other process ended, or did not accept the message within `timeout` seconds.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        head = _LENGTH.pack(len(data), 0 if arena is None else 1)
        self._socket.settimeout(timeout)
        try:
            if arena is None:
                self._socket.sendall(head + data)
            else:
                socket.send_fds(self._socket, [head], [arena.descriptor])
                self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosed(f"the other process cannot be reached: {error}") from error

    def receive(self, timeout: float | None = None) -> tuple[dict[str, Any], Arena | None] | None:
        """Return the next message, or None if none arrives within `timeout` seconds (None: wait forever).

        Raises:
            ChannelClosed: the other process ended, and all of its messages were received.
        """
        self._socket.settimeout(timeout)
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            raise ChannelClosed(f"the other process cannot be reached: {error}") from error
        self._socket.settimeout(None)
        try:
            head += self._receive_exactly(_LENGTH.size - len(head), begun=bool(head))
            length, with_arena = _LENGTH.unpack(head)
            if length > _MAX_MESSAGE_BYTES:
                raise ChannelClosed(f"a message claims {length} bytes")
            message = json.loads(self._receive_exactly(length, begun=True))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        arena = None
        if with_arena:
            arena = Arena(descriptors[0], os.fstat(descriptors[0]).st_size)
            arena.close()  # the memory is mapped; an open descriptor would keep it beyond its last tensor
        return message, arena

    def close(self) -> None:
        """Close this end; the peer receives all pending messages, and then the end of the connection."""
        self._socket.close()

    def _receive_exactly(self, size: int, begun: bool) -> bytes:
        """Receive `size` bytes; `begun` is True if a part of the message was received before."""
        pieces = []
        while size:
            try:
                piece = self._socket.recv(min(size, 1 << 20))
            except OSError as error:
                raise ChannelClosed(f"the other process cannot be reached: {error}") from error
            if not piece:
                raise ChannelClosed("the other process is gone" + (", in the middle of a message" if begun else ""))
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)
