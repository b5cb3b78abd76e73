"""Output of the commands: tables for people, one JSON document for machines, progress on stderr."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsq_ckpt.core.figures import number, percent, quotient, ratio, seconds, settings, size
from dsq_ckpt.core.plain_text import escape_controls

__all__ = [
    "WIDE", "Meter", "age", "console", "escape_controls", "fail", "fields", "meter", "number", "percent", "print_json",
    "quotient", "ratio", "seconds", "settings", "size", "table",
]

WIDE = 100  # columns of a terminal from which tables have wide padding and optional columns
_PIPE_WIDTH = 240  # a file or a pipe has no edge to wrap at; rich would assume 80 columns
_ARGUMENTS = re.compile(r"\b(overwrite|allow_pickle)=True\b")
_PATIENCE = 2.0  # seconds of work before a progress bar appears


class _Console(Console):
    """A console that prints nothing which steers the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(escape_controls(one, "\n") if isinstance(one, str) else one for one in objects), **options)


class _Table(Table):
    """A table in which nothing steers the terminal."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(escape_controls(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def console(stderr: bool = False) -> Console:
    """Return a console that prints text as it is: tensor names hold brackets, and colour means nothing here."""
    found = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _PIPE_WIDTH
    return found


def fail(message: str) -> typer.Exit:
    """Print the one line that says what is wrong; the exception to raise ends the program with status 1.

    Errors of the library name arguments of its functions, and are told with the options of the same name.
    """
    said = _ARGUMENTS.sub(lambda found: f"--{found[1].replace('_', '-')}", " ".join(message.split()))
    typer.echo(escape_controls(f"error: {said}"), err=True)
    return typer.Exit(1)


def print_json(document: Any) -> None:
    """Print exactly one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=1))


def table(*columns: str) -> Table:
    """Return a table without lines. A column `<name` is text and folds on narrow terminals; others are numbers."""
    made = _Table(box=None, pad_edge=False, padding=(0, 2 if console().width >= WIDE else 1, 0, 0))
    for name in columns:
        if name.startswith("<"):
            made.add_column(name[1:], overflow="fold", min_width=min(len(name) - 1, 10))
        else:
            made.add_column(name, justify="right", no_wrap=True)
    return made


def fields(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values, one per line."""
    made = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, value)
    return made


_AGES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def age(text: str) -> float:
    """Return seconds: 90, 90s, 15m, 2h or 3d.

    Raises:
        typer.BadParameter: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(text))
    if match is None:
        raise typer.BadParameter(f"{text!r} is no age: give seconds, or 15m, 2h, 3d")
    return float(match[1]) * _AGES[match[2]]


class Meter:
    """A progress bar on stderr, counted in bytes; `advance` may be handed to library functions."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress = progress
        self._task = task

    def advance(self, count: int) -> None:
        """Add to the number of bytes done."""
        self._progress.advance(self._task, count)


@contextmanager
def meter(what: str, total: int | None = None, *, hidden: bool = False) -> Iterator[Meter]:
    """Show a progress bar on stderr while the block takes longer than two seconds, and only if that is a terminal.

    Args:
        what: the work, in a few words.
        total: bytes to come; None: unknown, and only the time is shown.
        hidden: show nothing, as for `--json`.
    """
    screen = console(stderr=True)
    counted = [DownloadColumn(binary_units=True)] if total is not None else []
    progress = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), *counted, TimeElapsedColumn(), console=screen,
        transient=True, redirect_stdout=False,
    )
    task = progress.add_task(escape_controls(what), total=None if total is None else max(total, 1))
    late = threading.Timer(_PATIENCE, progress.start)
    late.daemon = True
    if screen.is_terminal and not hidden:
        late.start()
    try:
        yield Meter(progress, task)
    finally:
        late.cancel()
        if late.ident is not None:
            late.join()
        if progress.live.is_started:  # else it would print an empty line
            progress.stop()
