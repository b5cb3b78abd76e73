"""A connection between a receiver and a sender, which alters, delays or breaks what passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

Change = Callable[[int, bytes], bytes]
"""Gets a block of the answer and the number of bytes before it; returns what passes."""


@contextmanager
def between(metadata: str, change: Change) -> Iterator[str]:
    """Yield the address of a transport, by way of which the one of `metadata` is reached."""
    behind = urlsplit(metadata)
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        with (
            suppress(OSError), listener.accept()[0] as receiver,
            socket.create_connection(("127.0.0.1", behind.port or 0)) as sender,
        ):
            sender.sendall(receiver.recv(65536))
            passed = 0
            while block := sender.recv(65536):
                receiver.sendall(change(passed, block))
                passed += len(block)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{behind.path}"
    finally:
        listener.close()
        thread.join(60)
