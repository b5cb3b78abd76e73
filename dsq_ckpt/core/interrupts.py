"""Signals during a save or a load: their handlers run where the other ranks can be notified, not between any two steps.

A handler that raises (Python's own of SIGINT, one that calls `sys.exit` on SIGTERM) could take a rank out of a save
between two collectives, where the others then wait for it, or leave trial weights in a model.

What a handler raises is the user's wish to stop, whatever its class: it reaches the caller as it is, and is no failure
of a save or a load. On its way it may be taken for one of the package's own errors (a TimeoutError is an OSError), be
sent to other ranks and come back as a copy, or be lost in a destructor or a `suppress`. So handlers are called through
functions of this module, which see what they raise, and the outermost call raises that in the end. A traceback would
not tell: handlers may be objects, partial functions or written in C, and users call them by themselves too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

# Others, such as the alarm of a watchdog, are let through at once.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
            if hasattr(signal, name)]
_VALID = signal.valid_signals()  # asks the C library for each


class _Held:
    """The handlers of the main thread during a call, the signals that came, and what handlers raised.

    Attributes:
        holding: whether handlers wait for `let_signals_through`.
        shielded: whether what the others raise waits, too.
        raised: what a handler raised last, for the caller.
        pending: whether it is still to be raised where other ranks can be notified.
    """

    def __init__(self) -> None:
        found = {number: signal.getsignal(number) for number in _VALID}
        self.handlers: dict[int, Any] = {number: handler for number, handler in found.items() if callable(handler)}
        self.waiting: list[int] = []
        self.holding = self.shielded = self.pending = False
        self.raised: BaseException | None = None

    def hold(self, number: int, frame: FrameType | None) -> None:
        """Keep the first signal of a kind waiting; whoever sends another one does not want to wait.

        The handlers of other kinds run at once. What they raise waits in their place among several ranks, or while a
        model is not the user's, however often they run, as those of interval timers do; whoever waits for a lock or a
        disk in one process is not to wait for longer.
        """
        if number in self.waiting:
            self.waiting.remove(number)
            self.run(number, frame)
        elif self.holding and number in _SIGNALS:
            self.waiting.append(number)
        elif self.holding and self.shielded:
            with suppress(BaseException):
                self.run(number, frame)
        else:
            self.run(number, frame)

    def run(self, number: int, frame: FrameType | None) -> None:
        """Run a handler, and keep what it raises for the caller; after the call, too, where others call this one."""
        try:
            self.handlers[number](number, frame)
        except BaseException as error:
            if _held is self:
                self.raised, self.pending = error, True
            raise


_held: _Held | None = None  # the main thread's alone


@contextmanager
def heard_handlers() -> Iterator[None]:
    """Raise what a handler of a signal raised meanwhile as it is, whatever became of it; in the main thread."""
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
        raised, held.raised = held.raised, None
        if raised is not None and sys.exc_info()[1] is not raised:
            _raise(raised)


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold the handlers of signals until `let_signals_through`, at the latest until the end; in the main thread.

    Signals without a handler in Python are not held: what kills the process does so at once. What handlers raise
    reaches the caller as by `heard_handlers`.
    """
    with heard_handlers():
        held = _held
        if held is None or held.holding or threading.current_thread() is not threading.main_thread():
            yield
            return
        held.holding, held.shielded = True, dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        try:
            yield
        finally:
            held.holding = held.shielded = False
            while held.waiting:
                held.run(held.waiting.pop(0), sys._getframe())


def _raise(error: BaseException) -> NoReturn:
    """Raise what a handler raised; its context stays that of the handler, not what became of it."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context


def _give_back(held: _Held) -> None:
    global _held
    _held, held.holding = None, False
    for number, handler in held.handlers.items():
        if signal.getsignal(number) == held.hold:
            signal.signal(number, handler)


def _forked() -> None:
    """Reset a child, such as a worker of the data loader that `evaluate` iterates: the save is its parent's."""
    if _held is not None:
        _give_back(_held)


os.register_at_fork(after_in_child=_forked)


def let_signals_through() -> None:
    """Run the handlers of signals that came meanwhile; what they raise must reach the other ranks from here.

    What the handler of another signal raised, or something caught since, is raised here, too.
    """
    held = _held
    if held is None or threading.current_thread() is not threading.main_thread():
        return
    while held.waiting:
        held.run(held.waiting.pop(0), sys._getframe())
    if held.pending and held.raised is not None:
        held.pending = False
        _raise(held.raised)


def raised_by_handler() -> BaseException | None:
    """Return what a handler raised during this call, which its caller will be given."""
    return None if _held is None or threading.current_thread() is not threading.main_thread() else _held.raised


@contextmanager
def shielded(shield: bool = True) -> Iterator[None]:
    """Let what handlers of signals that are not held raise wait, while a model has trial weights; or not wait."""
    held = _held
    if held is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, held.shielded = held.shielded, shield
    try:
        yield
    finally:
        held.shielded = before


@contextmanager
def in_users_function(loads_module: bool = False) -> Iterator[None]:
    """Raise what handlers of signals that are not held raise at once in a function of the user.

    It may expect that, as of an alarm that ends a long evaluation; what it caught, or made another error of, is not for
    the caller. To be entered around each call of such a function, with no `except` of the package in between.

    Args:
        loads_module: whether it is torch's `load_state_dict` of a module. That makes an error of its own of whatever
            interrupts a copy, which is still for the caller; hooks of the user raise theirs while they handle one.
    """
    held = _held
    if held is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = held.raised, held.pending
    try:
        with shielded(False):
            yield
    except BaseException as error:
        if error is not held.raised and not (loads_module and held.raised not in _contexts(error)):
            held.raised, held.pending = before
        raise
    held.raised, held.pending = before


def _contexts(error: BaseException) -> list[BaseException]:
    """Return the exceptions that were being handled when this one was raised."""
    found = list[BaseException]()
    while (context := error.__context__) is not None and context not in found:
        found.append(error := context)
    return found
