"""What is kept of ended groups goes before the interpreter does."""

from __future__ import annotations

import os
import threading
import time

from dsq_ckpt.distributed import gloo_lifetime


def test_the_exit_waits_for_a_backend_that_is_going(monkeypatch) -> None:
    """A thread that still waits for gloo's when the interpreter exits aborts the process."""
    began, ended = threading.Event(), threading.Event()

    class Backend:
        def __del__(self) -> None:
            began.set()
            time.sleep(0.3)  # as gloo's threads take, which need the interpreter's lock
            ended.set()

    monkeypatch.setattr(gloo_lifetime, "_EXTRA_SECONDS", 0.0)
    monkeypatch.setattr(gloo_lifetime, "_ended_backends", [])
    gloo_lifetime._hold_backend(Backend(), os.getpid())
    assert began.wait(60)
    gloo_lifetime._release_all()
    assert ended.is_set() and not gloo_lifetime._ended_backends
