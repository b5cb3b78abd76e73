"""Warnings, each at the line of the caller that led to it, wherever in the package it is raised.

A fixed `stacklevel` points into torch, or into this package, since the same code runs below `dcp.save`, `dsq_ckpt.save`
and DeepSpeed's engine, and in threads and processes of DCP that no line of the caller is below.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
import warnings
from contextvars import ContextVar
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_SKIPPED_PACKAGES = frozenset({
    "dsq_ckpt", "triton_kernels", "torch", "deepspeed", "pydantic",  # libraries between the caller and here
    "concurrent", "multiprocessing", "threading", "contextlib", "importlib", "runpy",  # where threads and such begin
})


class Line(NamedTuple):
    """A line of source code.

    Attributes:
        filename: path of the source file.
        lineno: line number, from 1.
        module: name of its module.
    """

    filename: str
    lineno: int
    module: str


_NUMBER = re.compile(r"0x[0-9a-f]+|\b(?:inf|nan)\b|[-+]?\d[\d.]*(?:e[-+]?\d+)?")
_foreign_globals: dict[str, Any] = {}
"""The globals of modules that this process does not have, whose lines began what it does."""
_background: ContextVar[Line | None] = ContextVar("line that began the work of this thread", default=None)


def calling_line() -> Line | None:
    """Return the innermost line outside of this package and the libraries that call it; None where there is none."""
    frame = _calling_frame()
    return _background.get() if frame is None else _to_line(frame)


def set_background_line(line: Line | None) -> None:
    """Let warnings of this thread, as far as no line of the caller is below them, point at `line`."""
    _background.set(line)


def warn(text: str, *, rank: int = 0) -> None:
    """Warn at the calling line.

    Args:
        text: the warning.
        rank: of this process; where all ranks find the same, only rank 0 says it. Where warnings are errors, all ranks
            raise it, since others would wait for one that raised it alone.
    """
    if rank and not _warnings_are_errors():
        return
    frame = _calling_frame()
    line = _background.get() if frame is None else _to_line(frame)
    if line is None:
        warnings.warn(text, stacklevel=2)
    else:  # with the module's own registry, so that a text is said once for a line, from whatever thread
        module = sys.modules.get(line.module)
        known = frame.f_globals if frame is not None else _foreign_globals if module is None else vars(module)
        registry = known.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, UserWarning, line.filename, line.lineno, line.module, registry)


def is_new_warning(text: str, told: set[str]) -> bool:
    """Return whether `told` has no text that differs from this one in numbers alone, and note it there.

    For warnings of what stays as it is from save to save, while the numbers in them change: Python says equal texts
    once, and these would come at every save.
    """
    kind = _NUMBER.sub("#", text)
    new = kind not in told
    told.add(kind)
    return new


def format_error_line(error: BaseException) -> str:
    """Return the caller's innermost line that an error was raised below, in brackets; empty where there is none."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not _is_skipped(frame):
            return f" ({os.path.basename(frame.f_code.co_filename)}, line {line})"
    return ""


def _warnings_are_errors() -> bool:
    return any(action == "error" and issubclass(UserWarning, category) for action, _, category, *_ in warnings.filters)


def warn_safely(text: str) -> None:
    """Warn where nothing may fail any more, as after a commit; where warnings are errors, the text is logged."""
    try:
        warn(text)
    except UserWarning:
        logger.warning(text)


def _calling_frame() -> Any:
    frame: Any = sys._getframe(1)
    while frame is not None and _is_skipped(frame):
        frame = frame.f_back
    return frame


def _is_skipped(frame: Any) -> bool:
    # A process that multiprocessing spawned begins in a string.
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in _SKIPPED_PACKAGES or frame.f_code.co_filename == "<string>"


def _to_line(frame: Any) -> Line:
    return Line(frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__")))
