"""Checkpointing processes by fork instead of exec: real ones, without the three seconds that imports take."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # the first optimizer of a process imports it

from dsq_ckpt.lowdiff import process, worker_client

_exec = subprocess.Popen


class Nursery:
    """A fork of a process that has imported everything and started no thread; it forks whenever it is asked to.

    Made before anything is computed. Logs of this process, and of its forks, start their processes here from then on.
    """

    def __init__(self) -> None:
        self._ours, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._ours.close()
            with suppress(KeyboardInterrupt):
                self._serve(child_socket)
            os._exit(0)
        child_socket.close()
        worker_client.subprocess.Popen = self.popen  # type: ignore[misc, assignment]

    def popen(self, command: list[str], **options: Any) -> Any:
        """What `subprocess.Popen` is to a training process."""
        if command[1:3] != ["-m", process.__name__]:
            return _exec(command, **options)
        reader, writer = os.pipe()
        socket.send_fds(self._ours, [b"x"], [int(command[-1]), writer])
        os.close(writer)
        return Grown(reader)

    def _serve(self, asked: socket.socket) -> None:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
        while True:
            _, descriptors, _, _ = socket.recv_fds(asked, 1, 2)
            if not descriptors:
                return
            connection, reply = descriptors
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                asked.close()
                _answer(reply, os.getpid())
                _answer(reply, process.main(connection))
                os._exit(0)
            os.close(connection)
            os.close(reply)


def _answer(reply: int, number: int) -> None:
    with suppress(BrokenPipeError):  # who asked may have been killed
        os.write(reply, b"%d\n" % number)


class Grown:
    """A process that is nobody's child: its pid and, unless it is killed, its status come through a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = os.fdopen(pipe, "rb", buffering=0)
        self.pid = int(self._pipe.readline())
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its status; None while it lives."""
        if self._status is None and not alive(self.pid):
            status = self._pipe.readline()
            self._status = int(status) if status else -signal.SIGKILL
        return self._status

    def wait(self, timeout: float) -> int:
        """Its status, once it ended."""
        if not until(lambda: not alive(self.pid), timeout):
            raise subprocess.TimeoutExpired("process", timeout)
        status = self.poll()
        assert status is not None
        return status


def alive(pid: int) -> bool:
    """Whether a process is there, and more than an entry in a table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for something; whether it came."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def listen(
    pipes: dict[int, int], rest: dict[int, bytes], take: Callable[[int, bytes], None], seconds: float,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Take lines that forks say, for some time, or until something is true or all are gone.

    Args:
        pipes: the rank that speaks through each; those that end are closed and left out.
        rest: by rank, what was said of the next line.
        take: called with the rank and each line.
        seconds: how long at most.
        until: what ends it.
    """
    deadline = time.monotonic() + seconds
    while pipes and not until() and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(pipes), [], [], min(left, 0.05))[0]:
            data = os.read(pipe, 1 << 16)
            rank = pipes[pipe]
            if not data:
                os.close(pipe)
                del pipes[pipe]
            *lines, rest[rank] = (rest[rank] + data).split(b"\n")
            for line in lines:
                take(rank, line)
