"""The shim `calls.c`: system calls below a directory fail, or are recorded."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

KINDS = ("open to read", "open to write", "read", "write", "fsync", "rename", "link", "unlink", "mkdir")
_HEAD = struct.Struct("<QqqIIc")
_LOADED = "CAMPAIGN_CALLS"


def loaded() -> bool:
    """Return whether this process runs under the shim."""
    return _LOADED in os.environ


def run_under_shim(arguments: list[str], directory: Path) -> int:
    """Compile the shim and run this program again with it; its exit status."""
    library = directory / "calls.so"
    source = Path(__file__).with_name("calls.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl", "-pthread"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), _LOADED: "1"}
    return subprocess.run([sys.executable, *arguments], env=environment).returncode


@contextmanager
def failing(
    directory: Path, kind: str | None, number: int = 0, error: int = 0, again: bool = False, space: int = -1
) -> Iterator[None]:
    """Let a call below a directory fail.

    Args:
        kind: of `KINDS`; None: none fails for its number.
        number: of the call, from 0.
        error: its errno, also where there is no space left.
        again: all later ones of the kind fail too.
        space: bytes that may be written; -1: any number.
    """
    library = ctypes.CDLL(None)
    library.calls_arm(
        os.fsencode(f"{directory}/"), -1 if kind is None else KINDS.index(kind), ctypes.c_long(number), error,
        int(again), ctypes.c_long(space),
    )
    try:
        yield
    finally:
        library.calls_arm(b"", -1, ctypes.c_long(0), 0, 0, ctypes.c_long(-1))


def counted(kind: str) -> int:
    """Return the number of calls of a kind since `failing` began, for use inside of it."""
    count = ctypes.CDLL(None).calls_count
    count.restype = ctypes.c_long
    return int(count(KINDS.index(kind)))


class Operation(NamedTuple):
    """A call that changed files.

    Attributes:
        what: C created, T truncated, W written, F flushed, R renamed, X exchanged, L linked, U unlinked, M made and
            D removed a directory.
        inode: of the file, of C, T, W and F, or of the new directory.
    """

    what: str
    inode: int
    offset: int
    one: str
    two: str
    data: bytes


@contextmanager
def recording(directory: Path, log: Path) -> Iterator[None]:
    """Record what changes below a directory to a file outside of it."""
    library = ctypes.CDLL(None)
    with open(log, "wb") as file:
        library.calls_record(os.fsencode(f"{directory}/"), file.fileno())
        try:
            yield
        finally:
            library.calls_record(b"", -1)


def recorded(log: Path) -> list[Operation]:
    """Return the recorded calls, in order."""
    data, place, operations = log.read_bytes(), 0, []
    while place < len(data):
        inode, offset, size, one, two, what = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        first = os.fsdecode(data[place : place + one])
        second = os.fsdecode(data[place + one : place + one + two])
        place += one + two
        operations.append(Operation(what.decode(), inode, offset, first, second, data[place : place + size]))
        place += size
    return operations
