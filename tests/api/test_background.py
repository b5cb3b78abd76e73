"""Saves of two threads, such as torchft's and the training's, that wait for the one before."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from dsq_ckpt.api import background


def test_another_thread_begins_a_save_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one still waits for that."""
    meanwhile: Future[Any] = Future()

    class Ending(Future):
        def exception(self, timeout: float | None = None) -> None:
            background._future = meanwhile

    monkeypatch.setattr(background, "_future", Ending())
    background.wait()
    assert background._future is meanwhile
