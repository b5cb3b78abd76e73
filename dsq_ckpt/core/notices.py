"""Warnings that point at the line of the caller that caused them.

A fixed `stacklevel` would point into torch or into this package: the same code runs below `dcp.save`, `dsq_ckpt.save`
and DeepSpeed's engine, and in threads and processes of DCP whose stacks contain no line of the caller.
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
    "dsq_ckpt", "triton_kernels", "torch", "deepspeed", "pydantic",  # libraries between the caller and this package
    "concurrent", "multiprocessing", "threading", "contextlib", "importlib", "runpy",  # entry points of threads etc.
})


class Line(NamedTuple):
    """A line of source code.

    Attributes:
        filename: path of the source file.
        lineno: line number, from 1.
        module: name of the module.
    """

    filename: str
    lineno: int
    module: str


_NUMBER = re.compile(r"0x[0-9a-f]+|\b(?:inf|nan)\b|[-+]?\d[\d.]*(?:e[-+]?\d+)?")
_foreign_globals: dict[str, Any] = {}
"""Globals in place of those of a module that this process does not have, for its warning registry."""
_background: ContextVar[Line | None] = ContextVar("line that started the work of this thread", default=None)


def calling_line() -> Line | None:
    """Return the innermost line outside of this package and the libraries that call it; None without one."""
    frame = _calling_frame()
    return _background.get() if frame is None else _to_line(frame)


def set_background_line(line: Line | None) -> None:
    """Set the line for warnings of this thread whose stack contains no line of the caller."""
    _background.set(line)


def warn(text: str, *, rank: int = 0) -> None:
    """Warn at the calling line.

    Args:
        text: the warning.
        rank: this process's rank, if all ranks call this with the same text: only rank 0 warns. If warnings are errors,
            all ranks raise it, since otherwise the others would wait for rank 0.
    """
    if rank and not _warnings_are_errors():
        return
    frame = _calling_frame()
    line = _background.get() if frame is None else _to_line(frame)
    if line is None:
        warnings.warn(text, stacklevel=2)
    else:  # the registry of the module, so that a text appears once per line, from whatever thread
        module = sys.modules.get(line.module)
        namespace = frame.f_globals if frame is not None else _foreign_globals if module is None else vars(module)
        registry = namespace.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, UserWarning, line.filename, line.lineno, line.module, registry)


def is_new_warning(text: str, texts: set[str]) -> bool:
    """Return whether no text in `texts` is equal apart from numbers, and add this one to it.

    It is for warnings of a lasting condition whose numbers change from save to save: Python filters equal texts only,
    so they would appear at every save.
    """
    pattern = _NUMBER.sub("#", text)
    is_new = pattern not in texts
    texts.add(pattern)
    return is_new


def format_error_line(error: BaseException) -> str:
    """Return the innermost line of the caller in the traceback of an error, in brackets; empty without one."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not _is_skipped(frame):
            return f" ({os.path.basename(frame.f_code.co_filename)}, line {line})"
    return ""


def _warnings_are_errors() -> bool:
    return any(action == "error" and issubclass(UserWarning, category) for action, _, category, *_ in warnings.filters)


def warn_safely(text: str) -> None:
    """Warn where no error is allowed, as after a commit: if warnings are errors, log the text."""
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
    # The outermost frame of a process that multiprocessing spawned is a string.
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in _SKIPPED_PACKAGES or frame.f_code.co_filename == "<string>"


def _to_line(frame: Any) -> Line:
    return Line(frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__")))
