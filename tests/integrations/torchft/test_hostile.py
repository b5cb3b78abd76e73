"""Senders that die, alter bytes or send something else: one error each, and nothing is unpickled."""

from __future__ import annotations

import os
import signal
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dsq_ckpt.errors import CorruptCheckpoint, DSQError, LoadFailed
from dsq_ckpt.integrations.torchft import DSQTransport
from tests.helpers import forks
from tests.helpers.processes import ROOT, kill, make_environment
from tests.integrations.torchft.between import between
from tests.integrations.torchft.common import PATIENCE, same, small

SENDER = """
import sys, time
from datetime import timedelta
from dsq_ckpt.integrations.torchft import DSQTransport
from tests.integrations.torchft.common import PATIENCE, large

transport = DSQTransport(PATIENCE, directory=sys.argv[1])
transport.send_checkpoint([1], 4, large(), PATIENCE)
print(transport.metadata(), flush=True)
time.sleep(PATIENCE.total_seconds())
"""


@pytest.mark.slow
def test_a_sender_that_is_killed_midway(transport: DSQTransport[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """In a process of its own, killed when a megabyte has passed; its address is then an error too."""
    told, tell = os.pipe()
    command = ["-c", SENDER, str(tmp_path_factory.mktemp("sender"))]
    sender = forks.start(command, make_environment({}), ROOT, tell, errors=2)
    os.close(tell)

    def killing(passed: int, block: bytes) -> bytes:
        if passed > 1 << 20 and sender.poll() is None:
            kill(sender)
        return block

    try:
        with open(told) as stream:
            metadata = stream.readline().strip()
        with (
            between(metadata, killing) as address,
            pytest.raises(LoadFailed, match=r"the state of step 4 .*the sender has ended, or cannot be reached"),
        ):
            transport.recv_checkpoint(0, address, 4, PATIENCE)
        assert sender.returncode == -signal.SIGKILL
        with pytest.raises(LoadFailed, match="the sender has ended, or cannot be reached"):
            transport.recv_checkpoint(0, metadata, 4, PATIENCE)
    finally:
        kill(sender)


def test_altered_bytes_are_one_error(transport: DSQTransport[Any]) -> None:
    """Wherever one is altered: an error of this package, or it was padding and the state is right."""
    state = small()
    transport.send_checkpoint([1], 2, state, PATIENCE)
    length = 0

    def count(passed: int, block: bytes) -> bytes:
        nonlocal length
        length = passed + len(block)
        return block

    with between(transport.metadata(), count) as address:
        same(transport.recv_checkpoint(0, address, 2, PATIENCE), state)
    errors = []
    for place in range(200, length, length // 40):

        def flip(passed: int, block: bytes, place: int = place) -> bytes:
            if not passed <= place < passed + len(block):
                return block
            altered = bytearray(block)
            altered[place - passed] ^= 4
            return bytes(altered)

        with between(transport.metadata(), flip) as address:
            try:
                same(transport.recv_checkpoint(0, address, 2, PATIENCE), state)
            except DSQError as error:
                assert "the state of step 2 from" in str(error)
                errors.append(error)
    assert len(errors) > 5 and any(isinstance(error, CorruptCheckpoint) for error in errors)


class Trap:
    """Makes a directory where it is unpickled."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.where),)


def test_nothing_is_unpickled(transport: DSQTransport[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    where = tmp_path_factory.mktemp("trap") / "sprung"
    transport.send_checkpoint([1], 1, {**small(), "trap": Trap(where)}, PATIENCE)
    with pytest.raises(LoadFailed, match=r"step 1 from .*'state\.trap' is more than plain data: let the state"):
        transport.recv_checkpoint(0, transport.metadata(), 1, PATIENCE)
    assert not where.exists()


def archive(*members: tuple[str, bytes], size: int = 0) -> bytes:
    """A tar file whose members are of a name and a type, and have no data whatever their size."""
    headers = b""
    for name, kind in members:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, "/etc/passwd", size
        headers += member.tobuf(tarfile.GNU_FORMAT)
    return headers + bytes(2 * tarfile.BLOCKSIZE)


@pytest.mark.parametrize(("sent", "text"), [
    (archive(("../evil", tarfile.REGTYPE)), r"sends '\.\./evil', which is no file"),
    (archive(("manifest.json", tarfile.SYMTYPE)), r"sends 'manifest\.json', which is no file"),
    (archive(("below", tarfile.DIRTYPE)), "sends 'below', which is no file"),
    (archive(("sparse", tarfile.GNUTYPE_SPARSE)), "sends 'sparse', which is no file"),
    (archive(("long", tarfile.GNUTYPE_LONGNAME)), "sends 'long', which is no file"),
    (archive(("header", tarfile.XHDTYPE)), "sends 'header', which is no file"),
    (archive(("negative", tarfile.REGTYPE), size=-512), "sends 'negative', which is no file"),
    (archive(("huge", tarfile.REGTYPE), size=1 << 80), "IncompleteRead"),
    (archive(("twice", tarfile.REGTYPE), ("twice", tarfile.REGTYPE)), "FileExistsError"),
    (archive(), "its manifest, which comes last, is missing"),
    (b"no archive at all" * 99, "HeaderError"),
    (b"", "IncompleteRead"),
])
def test_messages_of_others_are_refused(transport: DSQTransport[Any], sent: bytes, text: str, tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(LoadFailed, match=text):
            transport.recv_checkpoint(0, f"http://127.0.0.1:{server.server_port}/0/", 1, PATIENCE)
        server.shutdown()
    assert not (tmp_path.parent / "evil").exists() and not (tmp_path / "evil").exists()


def test_addresses(transport: DSQTransport[Any], tmp_path: Path) -> None:
    """Addresses of another transport that had the port before, or of another kind, are refused."""
    transport.send_checkpoint([1], 1, small(), PATIENCE)
    port = transport.metadata().split(":")[2].split("/")[0]
    with pytest.raises(LoadFailed, match="no address of a DSQTransport, or of one that has ended"):
        transport.recv_checkpoint(0, f"http://localhost:{port}/{'0' * 32}/", 1, PATIENCE)
    with pytest.raises(LoadFailed, match="label too long"):
        transport.recv_checkpoint(0, f"http://{'a' * 70}:{port}/0/", 1, PATIENCE)
    host = "http://localhost"
    for metadata in (
        "<n/a>", f"file://{tmp_path}/", "", "http://[::1", f"{host}:99999/0/", f"{host}:port/0/", f"{host}/0/",
        f"{host}:{port}/checkpoint/", f"{host}:{port}/\u00e4/",
    ):
        with pytest.raises(LoadFailed, match="all replicas need the same checkpoint_transport"):
            transport.recv_checkpoint(0, metadata, 1, PATIENCE)
