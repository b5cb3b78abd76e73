"""Signals during a save or a load: their handlers run where the other ranks can be notified, not between any two steps.

A handler that raises (Python's own of SIGINT, one that calls `sys.exit` on SIGTERM) could take a rank out of a save
between two collectives, where the others then wait for it, or leave trial weights in a model.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Others, such as the alarm of a watchdog, are let through at once.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
            if hasattr(signal, name)]


class _Held:
    """The handlers of the main thread while they are held, and the signals that came."""

    def __init__(self) -> None:
        found = {number: signal.getsignal(number) for number in _SIGNALS}
        self.handlers: dict[int, Any] = {number: handler for number, handler in found.items() if callable(handler)}
        self.waiting: list[int] = []

    def hold(self, number: int, frame: FrameType | None) -> None:
        """Keep the first signal of a kind waiting; whoever sends another one does not want to wait."""
        if number in self.waiting:
            self.waiting.remove(number)
            self.handlers[number](number, frame)
        else:
            self.waiting.append(number)


_held: _Held | None = None  # the main thread's alone


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold the handlers of signals until `let_signals_through`, at the latest until the end; in the main thread.

    Signals without a handler in Python are not held: what kills the process does so at once.
    """
    global _held
    if _held is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _held = _Held()
    try:
        for number in held.handlers:
            signal.signal(number, held.hold)
        yield
    finally:
        _give_back(held)
        for number in held.waiting:
            signal.raise_signal(number)


def _give_back(held: _Held) -> None:
    global _held
    _held = None
    for number, handler in held.handlers.items():
        if signal.getsignal(number) == held.hold:
            signal.signal(number, handler)


def _forked() -> None:
    """Reset a child, such as a worker of the data loader that `evaluate` iterates: the save is its parent's."""
    if _held is not None:
        _give_back(_held)


os.register_at_fork(after_in_child=_forked)


def let_signals_through() -> None:
    """Run the handlers of signals that came meanwhile; what they raise must reach the other ranks from here."""
    held = _held
    if held is None or threading.current_thread() is not threading.main_thread():
        return
    while held.waiting:
        number = held.waiting.pop(0)
        held.handlers[number](number, sys._getframe())
