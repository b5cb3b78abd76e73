"""A checkpointing process that is a thread: the same code and the same channel, without three seconds to start; and a
process group of one.
"""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Any

import pytest
import torch.distributed as dist

from dsq_ckpt.lowdiff import process, worker_client


class _Thread:
    """What `subprocess.Popen` would be."""

    pid = -1

    def __init__(self, command: list[str], **options: Any) -> None:
        descriptor = os.dup(int(command[-1]))  # the socket that a process would inherit
        self._status: int | None = None
        self._thread = threading.Thread(target=self._serve, args=(descriptor,), daemon=True)
        self._thread.start()

    def _serve(self, descriptor: int) -> None:
        self._status = process.main(descriptor)

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._status is None:
            raise subprocess.TimeoutExpired("thread", timeout or 0)
        return self._status


@pytest.fixture(autouse=True)
def _forks(forked_logs):
    """Checkpointing processes are forks."""


@pytest.fixture
def in_thread(monkeypatch):
    """Logs of this test have checkpointing processes that are threads."""
    monkeypatch.setattr(worker_client.subprocess, "Popen", _Thread)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)  # which only the main thread may


@pytest.fixture
def alone_under_ddp():
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
