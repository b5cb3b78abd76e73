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
    "WIDE_COLUMNS", "Meter", "console", "escape_controls", "fail", "field_table", "meter", "number", "parse_age",
    "percent", "print_json", "quotient", "ratio", "seconds", "settings", "size", "table",
]

WIDE_COLUMNS = 100  # columns of a terminal from which tables have wide padding and optional columns
_PIPE_WIDTH = 240  # a file or a pipe has no edge to wrap at; rich would assume 80 columns
_ARGUMENTS = re.compile(r"\b(overwrite|allow_pickle)=True\b")
_PROGRESS_DELAY = 2.0  # seconds of work before a progress bar appears


class _Console(Console):
    """A console that removes control characters from text."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(escape_controls(item, "\n") if isinstance(item, str) else item for item in objects), **options)


class _Table(Table):
    """A table that removes control characters from cells."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(escape_controls(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def console(stderr: bool = False) -> Console:
    """Return a console without markup and highlighting, since tensor names may contain brackets."""
    created = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not created.is_terminal and "COLUMNS" not in os.environ:
        created.width = _PIPE_WIDTH
    return created


def fail(message: str) -> typer.Exit:
    """Print an error as one line, and return the exception that ends the program with status 1.

    Arguments in messages of the library are replaced by the options of the same name.
    """
    text = _ARGUMENTS.sub(lambda match: f"--{match[1].replace('_', '-')}", " ".join(message.split()))
    typer.echo(escape_controls(f"error: {text}"), err=True)
    return typer.Exit(1)


def print_json(document: Any) -> None:
    """Print exactly one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=1))


def table(*columns: str) -> Table:
    """Return a table without lines. A column `<name` has text and folds on narrow terminals; others have numbers."""
    created = _Table(box=None, pad_edge=False, padding=(0, 2 if console().width >= WIDE_COLUMNS else 1, 0, 0))
    for name in columns:
        if name.startswith("<"):
            created.add_column(name[1:], overflow="fold", min_width=min(len(name) - 1, 10))
        else:
            created.add_column(name, justify="right", no_wrap=True)
    return created


def field_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values, one per line."""
    created = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    created.add_column(style="bold", no_wrap=True)
    created.add_column(overflow="fold")
    for name, value in pairs:
        created.add_row(name, value)
    return created


_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_age(text: str) -> float:
    """Convert 90, 90s, 15m, 2h or 3d to seconds.

    Raises:
        typer.BadParameter: the text has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(text))
    if match is None:
        raise typer.BadParameter(f"{text!r} is no age: give seconds, or 15m, 2h, 3d")
    return float(match[1]) * _UNIT_SECONDS[match[2]]


class Meter:
    """A progress bar on stderr, counted in bytes. `advance` may be passed to library functions."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress = progress
        self._task = task

    def advance(self, count: int) -> None:
        """Add to the number of bytes done."""
        self._progress.advance(self._task, count)


@contextmanager
def meter(what: str, total: int | None = None, *, hidden: bool = False) -> Iterator[Meter]:
    """Show a progress bar on stderr if that is a terminal and the block takes longer than two seconds.

    Args:
        what: description of the work.
        total: number of bytes; None if unknown, and only the time is shown.
        hidden: show nothing, as for `--json`.
    """
    screen = console(stderr=True)
    counted = [DownloadColumn(binary_units=True)] if total is not None else []
    progress = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), *counted, TimeElapsedColumn(), console=screen,
        transient=True, redirect_stdout=False,
    )
    task = progress.add_task(escape_controls(what), total=None if total is None else max(total, 1))
    timer = threading.Timer(_PROGRESS_DELAY, progress.start)
    timer.daemon = True
    if screen.is_terminal and not hidden:
        timer.start()
    try:
        yield Meter(progress, task)
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if progress.live.is_started:  # else stop() would print an empty line
            progress.stop()
