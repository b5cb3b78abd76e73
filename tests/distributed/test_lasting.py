"""What is kept of ended groups goes before the interpreter does."""

from __future__ import annotations

import os
import threading
import time

from dsq_ckpt.distributed import lasting


def test_the_exit_waits_for_a_backend_that_is_going(monkeypatch) -> None:
    """A thread that still waits for gloo's when the interpreter exits aborts the process."""
    began, ended = threading.Event(), threading.Event()

    class Backend:
        def __del__(self) -> None:
            began.set()
            time.sleep(0.3)  # as gloo's threads take, which need the interpreter's lock
            ended.set()

    monkeypatch.setattr(lasting, "_SECONDS", 0.0)
    monkeypatch.setattr(lasting, "_ended", [])
    lasting._end(Backend(), os.getpid())
    assert began.wait(60)
    lasting._let_all_go()
    assert ended.is_set() and not lasting._ended
