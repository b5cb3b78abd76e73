"""A server in front of a server of S3, which fails requests as a test says."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Fault = Callable[[str, str, int], str | None]
"""Gives the fault of a request, by method, path with query, and how often the same was asked before; None: none.

`reset`: the connection breaks in the middle of the request; `lost`: it breaks when the request was carried out;
`dribble`: the answer comes in small pieces; otherwise status and code of an error, such as `503 SlowDown`.
"""


class FaultyS3(ThreadingHTTPServer):
    """The server; `fault` may be replaced at any time, `asked` has all requests and the bytes of their answers."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(behind).netloc
        self.fault: Fault = lambda *_: None
        self.asked: list[tuple[str, str, int]] = []
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of connections that a client gave up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms, until its headers are acknowledged
    server: FaultyS3

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        with self.server.lock:
            before = sum(asked[:2] == (self.command, self.path) for asked in self.server.asked)
            fault = self.server.fault(self.command, self.path, before)
            place = len(self.server.asked)
            self.server.asked.append((self.command, self.path, 0))
        length = int(self.headers.get("Content-Length") or 0)
        if fault == "reset":
            self.rfile.read(length // 2)
            self._break()
            return
        body = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else self.rfile.read(length)
        if fault is not None and fault[0].isdigit():
            status, code = fault.split()
            said = "the region 'us-east-1' is wrong" if code == "AuthorizationHeaderMalformed" else f"{code} of a test"
            text = f"<Error><Code>{code}</Code><Message>{said}</Message></Error>"
            self._answer(int(status), [("Content-Type", "application/xml")], text.encode(), False)
            return
        connection = http.client.HTTPConnection(self.server.behind, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        with self.server.lock:
            self.server.asked[place] = (self.command, self.path, len(data))
        if fault == "lost":
            self._break()
            return
        self._answer(answer.status, answer.getheaders(), data, fault == "dribble")
        connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, slow: bool) -> None:
        self.send_response_only(status)
        length = str(len(data))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in _OWN:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            step = max(len(data) // 50, 1) if slow else max(len(data), 1)
            for start in range(0, len(data), step):
                self.wfile.write(data[start : start + step])
                self.wfile.flush()

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _break(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


_OWN = ("host", "content-length", "transfer-encoding", "connection", "server", "date", "expect")


@contextmanager
def faulty_s3(behind: str) -> Iterator[FaultyS3]:
    """Start the server."""
    with FaultyS3(behind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
