"""Signals during a save or a load: handlers run only at points where the other ranks can be notified.

A handler that raises (Python's own for SIGINT, or one that calls `sys.exit` on SIGTERM) could take a rank out of a save
between two collectives, so that the others wait for it, or leave trial weights in a model.

An exception of a handler is the user's wish to stop, whatever its class. It reaches the caller unchanged, and is not a
failure of the save or load. Until then it could be mistaken for an error of the package (a TimeoutError is an OSError),
be sent to other ranks and return as a copy, or be lost in a destructor or a `suppress`. Therefore this module calls
the handlers and records their exceptions, and the outermost call raises the recorded one in the end. Tracebacks would
not suffice: handlers may be objects, partial functions or written in C, and users may call them too.
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

from dsq_ckpt.core.collector import garbage_collection_of_program

# Handlers of other signals, such as the alarm of a watchdog, run at once.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
            if hasattr(signal, name)]
_VALID = signal.valid_signals()  # once, since it queries the C library for each signal


class _HandlerState:
    """Signal handlers of the main thread during a call, pending signals, and exceptions of handlers.

    Attributes:
        handlers: the user's handlers, by signal number.
        pending_signals: signals whose handlers have not run yet.
        holds_signals: handlers of `_SIGNALS` wait for `run_pending_handlers`.
        shielded: exceptions of other handlers are deferred, too.
        error: last exception of a handler, for the caller.
        error_is_pending: `error` must still be raised where other ranks can be notified.
    """

    def __init__(self) -> None:
        handlers = {number: signal.getsignal(number) for number in _VALID}
        self.handlers: dict[int, Any] = {number: handler for number, handler in handlers.items() if callable(handler)}
        self.pending_signals: list[int] = []
        self.holds_signals = self.shielded = self.error_is_pending = False
        self.error: BaseException | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: hold the first one of a kind; run its handler at once for a second one.

        Handlers of signals that are not held run at once, as often as an interval timer fires. Their exceptions are
        deferred if there are several ranks, or while a model has trial weights. In a single process they are raised at
        once, so that an alarm can end a wait for a lock or a disk.
        """
        if number in self.pending_signals:
            self.pending_signals.remove(number)
            self.run_handler(number, frame)
        elif self.holds_signals and number in _SIGNALS:
            self.pending_signals.append(number)
        elif self.holds_signals and self.shielded:
            with suppress(BaseException):
                self.run_handler(number, frame)
        else:
            self.run_handler(number, frame)

    def run_handler(self, number: int, frame: FrameType | None) -> None:
        """Run a handler and record its exception; other code may still call this method after the save or load."""
        try:
            self.handlers[number](number, frame)
        except BaseException as error:
            if _state is self:
                self.error, self.error_is_pending = error, True
            raise


_state: _HandlerState | None = None  # used by the main thread only


@contextmanager
def propagate_handler_errors() -> Iterator[None]:
    """Raise the exception of a signal handler unchanged at the end of the block; in the main thread."""
    global _state
    if _state is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    state = _state = _HandlerState()
    try:
        for number in state.handlers:
            signal.signal(number, state.handle)
        yield
    finally:
        _restore_handlers(state)
        error, state.error = state.error, None
        if error is not None and sys.exc_info()[1] is not error:
            _raise(error)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Hold signals until `run_pending_handlers`, at the latest until the end of the block; in the main thread.

    Signals without a Python handler are not held, so one that kills the process does so at once. Exceptions of handlers
    reach the caller as with `propagate_handler_errors`.
    """
    with propagate_handler_errors():
        state = _state
        if state is None or state.holds_signals or threading.current_thread() is not threading.main_thread():
            yield
            return
        state.holds_signals = True
        state.shielded = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        try:
            yield
        finally:
            state.holds_signals = state.shielded = False
            while state.pending_signals:
                state.run_handler(state.pending_signals.pop(0), sys._getframe())


def _raise(error: BaseException) -> NoReturn:
    """Raise the exception of a handler with its original context, not that of errors it was converted to."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context


def _restore_handlers(state: _HandlerState) -> None:
    global _state
    _state, state.holds_signals = None, False
    for number, handler in state.handlers.items():
        if signal.getsignal(number) == state.handle:
            signal.signal(number, handler)


def _reset_after_fork() -> None:
    """Reset a forked child, such as a worker of a data loader in `evaluate`: the save runs in its parent."""
    if _state is not None:
        _restore_handlers(_state)


os.register_at_fork(after_in_child=_reset_after_fork)


def run_pending_handlers() -> None:
    """Run the handlers of held signals; call it where an exception of theirs reaches the other ranks.

    A deferred exception of the handler of another signal is raised here, too.
    """
    state = _state
    if state is None or threading.current_thread() is not threading.main_thread():
        return
    while state.pending_signals:
        state.run_handler(state.pending_signals.pop(0), sys._getframe())
    if state.error_is_pending and state.error is not None:
        state.error_is_pending = False
        _raise(state.error)


def get_handler_error() -> BaseException | None:
    """Return the exception of a handler during this call, which the caller will get; None if there is none."""
    return None if _state is None or threading.current_thread() is not threading.main_thread() else _state.error


@contextmanager
def defer_handler_errors(shield: bool = True) -> Iterator[None]:
    """Defer exceptions of handlers of signals that are not held, as while a model has trial weights.

    Args:
        shield: False: raise them at once.
    """
    state = _state
    if state is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, state.shielded = state.shielded, shield
    try:
        yield
    finally:
        state.shielded = before


@contextmanager
def in_user_code(loads_module: bool = False) -> Iterator[None]:
    """Raise exceptions of handlers of signals that are not held at once, in a function of the user.

    The function may expect one, such as that of an alarm that ends a long evaluation. It has the garbage collector as
    the program has it, too. The caller does not get an exception that the function has caught or converted. Enter it
    around each call of a function of the user, with no `except` of the package in between.

    Args:
        loads_module: whether the function is torch's `load_state_dict` of a module. It converts an exception that
            interrupts a copy into its own error, and the caller gets the original one. A hook of the user that converts
            an exception has it as the context of its own.
    """
    state = _state
    if state is None or threading.current_thread() is not threading.main_thread():
        with garbage_collection_of_program():
            yield
        return
    before = state.error, state.error_is_pending
    try:
        with defer_handler_errors(False), garbage_collection_of_program():
            yield
    except BaseException as error:
        if error is not state.error and not (loads_module and state.error not in _collect_contexts(error)):
            state.error, state.error_is_pending = before
        raise
    state.error, state.error_is_pending = before


def _collect_contexts(error: BaseException) -> list[BaseException]:
    """Return the chain of exceptions that were being handled when this one was raised."""
    contexts = list[BaseException]()
    while (context := error.__context__) is not None and context not in contexts:
        contexts.append(error := context)
    return contexts
