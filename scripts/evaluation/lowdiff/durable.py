"""Files that survive a power failure, and a process that writes them from memory it holds for another one.

The process is a host's memory and disk: it owns buffers without a name in shared memory, hands them to whoever connects
to its socket, and writes one of them to a file when it is told to. CheckFreq persists its snapshots with it; for Gemini
it is the peer, which outlives the training process. This file imports nothing but the standard library and is run by
its path, so that the process is there at once and takes a few megabytes.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

HEADER = struct.Struct("<8sqq")
"""Of a file of raw state: magic, steps that the state has behind it, bytes that follow."""
MAGIC = b"rawstate"
SUFFIX = ".raw"
START_TIMEOUT = 30.0
"""Seconds that a host may take to come up."""
_PIECE = 1 << 20


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Write a file that is there as a whole or not at all, whatever dies when; returns its bytes.

    Raises:
        OSError: the disk is full, or fails.
    """
    with replacing(path) as temporary, temporary.open("wb") as stream:
        size = sum(stream.write(piece) for piece in pieces)
        stream.flush()
        os.fsync(stream.fileno())
    return size


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name to write to and flush; the file then replaces `path`, durably also after a power failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bytes_below(directory: Path) -> int:
    """Return bytes of all files below a directory; one with several links counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the run that writes there removes files, too
            if path.is_file():
                stat = path.stat()
                sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def evict(directory: Path) -> None:
    """Drop all files below a directory from the page cache, so that the next reads come from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # pages that are yet to be written cannot be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def steps_in(directory: Path) -> dict[int, Path]:
    """Return the complete files of raw state in a directory by step, ascending."""
    return dict(sorted((int(path.stem), path) for path in directory.glob(f"*{SUFFIX}")))


def read_raw(path: Path, into: memoryview) -> int:
    """Read a file of raw state into memory of its size; returns the steps that it has behind it.

    Raises:
        ValueError: It is not such a file, or of another size.
    """
    with path.open("rb") as stream:
        magic, step, size = HEADER.unpack(stream.read(HEADER.size))
        if magic != MAGIC or size != len(into) or stream.readinto(into) != size:
            raise ValueError(f"{path} is no state of {len(into)} bytes")
    return int(step)


class Host:
    """The process's other end: its buffers, and what it is told.

    Args:
        name: Of its socket.

    Attributes:
        descriptor: Of the memory of all buffers; the caller's to close.
        size: Bytes of that memory.

    Raises:
        OSError: nothing answers there.
    """

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(f"\0{name}")
        except OSError:
            self._socket.close()
            raise
        message, descriptors, _, _ = socket.recv_fds(self._socket, 64, 1)
        self.size = int(message)
        self.descriptor = descriptors[0]
        self._pending = 0

    @classmethod
    def start(cls, name: str, size: int, core: int | None, owner: int | None = None) -> Host:
        """Start a process that holds `size` bytes, and connect to it.

        Args:
            name: Of the socket that it is to listen on, in Linux's abstract namespace: nothing is left behind.
            size: Bytes of memory, all zeros.
            core: CPU that it keeps to; None for any.
            owner: Process that it ends with; None: it ends with this connection.

        Raises:
            OSError: it does not come up.
        """
        command = [sys.executable, __file__, name, str(size)]
        command += [] if core is None else ["--core", str(core)]
        command += [] if owner is None else ["--owner", str(owner)]
        # A session of its own: what ends the training process, Ctrl-C included, does not end it.
        process = subprocess.Popen(command, start_new_session=True)
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                return cls(name)
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise
                time.sleep(0.01)

    def persist(self, offset: int, size: int, path: Path, step: int) -> None:
        """Start to write a part of the memory to a file of raw state; return at once."""
        self._socket.sendall(f"persist {offset} {size} {step} {path}\n".encode())
        self._pending += 1

    def wait(self) -> list[int]:
        """Wait until all that it was told to write is there; bytes of each file, 0 where that failed."""
        answers = b""
        while answers.count(b"\n") < self._pending:
            more = self._socket.recv(4096)
            if not more:
                raise ConnectionError("the process that writes checkpoints is gone")
            answers += more
        self._pending = 0
        return [int(line) for line in answers.splitlines()]

    def stop(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._socket.sendall(b"stop\n")
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(4096):
                pass
        self.close()

    def close(self) -> None:
        """Close the connection; the process continues."""
        self._socket.close()


def serve(name: str, size: int, owner: int | None) -> None:
    """Hold memory and answer one connection after another, until told to stop or the owner is gone."""
    descriptor = os.memfd_create("host")
    os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, size) as memory, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen(4)
        listener.settimeout(1.0)
        deadline = time.monotonic() + START_TIMEOUT
        while _alive(owner) if owner is not None else time.monotonic() < deadline:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                connection.setblocking(True)
                socket.send_fds(connection, [str(size).encode()], [descriptor])
                if _answer(connection, memory) or owner is None:
                    return


def _answer(connection: socket.socket, memory: mmap.mmap) -> bool:
    """Do what a connection asks for, until it ends; whether it asked to stop."""
    with connection.makefile("rb") as lines, contextlib.suppress(ConnectionError):
        for line in lines:
            what, *arguments = line.decode().split(maxsplit=4)
            if what == "stop":
                return True
            offset, count, step = (int(argument) for argument in arguments[:3])
            written = 0
            with contextlib.suppress(OSError), memoryview(memory) as whole:  # a full disk: training goes on
                path = Path(arguments[3].strip())
                pieces = (whole[at : min(at + _PIECE, offset + count)] for at in range(offset, offset + count, _PIECE))
                written = write_durably(path, _with_header(step, count, pieces))
                for old in list(steps_in(path.parent).values())[:-2]:
                    old.unlink()
            connection.sendall(f"{written}\n".encode())
    return False


def _with_header(step: int, size: int, pieces: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    yield HEADER.pack(MAGIC, step, size)
    yield from pieces


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Run the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("size", type=int)
    parser.add_argument("--core", type=int)
    parser.add_argument("--owner", type=int)
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    serve(arguments.name, arguments.size, arguments.owner)


if __name__ == "__main__":
    main()
