"""The page of `dsq report`: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined
from markupsafe import Markup

from dsq_ckpt.core import figures
from dsq_ckpt.core.plain_text import escape_controls
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.report import sections
from dsq_ckpt.report.charts import WIDTH, Chart
from dsq_ckpt.report.history import History, RunCheckpoint
from dsq_ckpt.report.searches import Search
from dsq_ckpt.storage.atomic_io import create_file
from dsq_ckpt.storage.description import compute_restored_error
from dsq_ckpt.version import __version__

_BEGINS = b"<!doctype html>\n<!-- dsq report -->"
_LISTED = 50
"""Entries of a list that may be long: problems, groups of a checkpoint."""


def write(history: History, target: Path) -> int:
    """Write the page of a run; the file appears complete or not at all.

    Args:
        history: the run.
        target: the file, replaced if it is such a page.

    Returns:
        Its bytes.

    Raises:
        ConfigError: the target is a directory, another file, or on an object store.
        OSError: it cannot be written.
    """
    if is_remote(target):
        raise ConfigError(f"'{target}' is a URL: write the page to a local file, and copy it there")
    if target.is_dir():
        raise ConfigError(f"'{target}' is a directory: name a file, such as '{target / 'report.html'}'")
    if target.exists() and not target.is_file():
        raise ConfigError(f"'{target}' is no ordinary file: name another one")  # such as a pipe, whose open would wait
    if target.exists():
        with open(target, "rb") as old:
            if old.read(len(_BEGINS)) != _BEGINS:
                raise ConfigError(f"'{target}' is there and is no page of dsq report: name another file, or remove it")
    page = render(history).encode()
    with create_file(target) as stream:
        stream.write(page)
    return len(page)


def render(history: History) -> str:
    """Return the page of a run."""
    restores = _restores(history.entries)
    charts = {
        "Bytes": sections.sizes(history), "Quality": sections.quality(history), "Chain and time":
        sections.chain(history), "Groups": sections.groups(history),
    }
    script, style = _text("script.js"), _text("style.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    count = len(history.entries)
    return _TEMPLATE.render(
        name=history.run.absolute().name or str(history.run), path=str(history.run), version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"), tiles=_tiles(history), problems=_problems(history),
        sections=[(name, found) for name, found in charts.items() if found],
        restores=[(WIDTH * place / count, text) for place, text in restores.items()],
        axis=_axis([entry.path.name for entry in history.entries]), rows=_rows(history, restores),
        newest=history.entries[-1].path.name, groups=_groups(history.entries[-1]),
        data=_data(history, [chart for found in charts.values() for chart in found], restores),
        script=Markup(script), style=Markup(style), digest=digest, total=_total(history),
    )


def _text(name: str) -> str:
    return files("dsq_ckpt.report").joinpath("templates", name).read_text(encoding="utf-8")


_ENVIRONMENT = Environment(  # names of files and tensors are anybody's: everything is escaped, whatever it is
    loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    finalize=lambda value: escape_controls(value, "\n") if type(value) is str else value,
)
_TEMPLATE = _ENVIRONMENT.from_string(_text("page.html"))


@dataclass
class Tile:
    """A figure at the top of the page."""

    value: str
    label: str
    note: str


def _tiles(history: History) -> list[Tile]:
    everything, newest = history.total["everything"], history.entries[-1]
    keyframes = sum(entry.manifest.depth == 0 for entry in history.entries)
    count, size = len(history.entries), figures.size
    own = newest.classes["everything"]
    return [
        Tile(figures.ratio(everything.logical, everything.kept), "smaller on disk",
             f"{size(everything.kept)} of {size(everything.logical)}"),
        Tile(figures.ratio(everything.logical, everything.written), "less written",
             f"{size(everything.written)} in {figures.seconds(sum(e.manifest.seconds for e in history.entries))}"),
        Tile(str(count), "checkpoint" if count == 1 else "checkpoints",
             f"{keyframes} keyframe{'' if keyframes == 1 else 's'}, {count - keyframes} "
             f"delta{'' if count - keyframes == 1 else 's'}"),
        Tile(newest.path.name, "newest", f"{newest.created[:16]}, {size(own.kept)}, "
             f"{figures.ratio(own.logical, own.kept)}, refinement {newest.manifest.refinement}"),
    ]


def _restores(entries: Sequence[RunCheckpoint]) -> dict[int, str]:
    """Return the places of checkpoints that were saved after a restore from lossy state, and what is known of it.

    A manifest counts such restores of its run. A restore from a checkpoint that is stored exactly is not recorded.
    """
    known = {entry.manifest.save_id: entry for entry in entries}
    found: dict[int, str] = {}
    for place, entry in enumerate(entries):
        manifest = entry.manifest
        before = known.get(manifest.previous or "")
        older = before if before is not None else entries[place - 1] if place else None
        more = manifest.lossy_resumes - (0 if older is None else older.manifest.lossy_resumes)
        if more > 0:
            source = before.path.name if before is not None else manifest.previous_name
            times = "" if more == 1 else f"{more} times, last "
            found[place] = f"restored {times}from {source}" if source else f"restored {more} time(s) before"
    return found


def _problems(history: History) -> list[tuple[str, str, str]]:
    """Return kind, name and text of what is wrong, or not there."""
    found = [("damaged", path.name, text) for path, text in history.leftovers.damaged]
    found += [("damaged", e.path.name, "; ".join(_first(e.problems, 3))) for e in history.entries if e.problems]
    found += [("incomplete", path.name, "no manifest: a save under way, or one that failed (dsq gc)")
              for path in history.leftovers.incomplete]
    found += [("removed", path.name, f"{count} file(s) stay, which other checkpoints need")
              for path, count in history.leftovers.removed]
    here = {entry.manifest.save_id for entry in history.entries} | {entry.path.name for entry in history.entries}
    here |= {path.name for path, _ in [*history.leftovers.damaged, *history.leftovers.removed]}
    for entry in history.entries:
        manifest = entry.manifest
        for save_id, name in ((manifest.previous, manifest.previous_name), (manifest.parent, manifest.parent_name)):
            if save_id is not None and name is not None and not here & {save_id, name}:
                here |= {save_id, name}
                found.append(("not there", name, f"removed or moved; {entry.path.name} was saved after it"))
    for entry in history.entries:
        record = entry.manifest.quality or {}
        if record.get("satisfied") is False:
            why = record.get("reason") or "a restore changes the metric by more than its bound"
            found.append(("bound missed", entry.path.name, str(why)))
        if entry.manifest.nonfinite:
            names = ", ".join(_first(entry.manifest.nonfinite, 3))
            found.append(("NaN or Inf", entry.path.name, f"stored exactly: {names}"))
    more = len(found) - _LISTED
    return found if more <= 0 else [*found[:_LISTED], ("more", "", f"{more} more: see dsq log and dsq verify")]


def _first(texts: Sequence[str], count: int) -> list[str]:
    return [*texts[:count], *([f"{len(texts) - count} more"] if len(texts) > count else [])]


def _axis(names: Sequence[str]) -> list[str]:
    """Return the names below the charts: the first, the one in the middle, and the last."""
    middle = [names[len(names) // 2]] if len(names) % 2 and len(names) > 2 else []
    return [names[0]] if len(names) == 1 else [names[0], *middle, names[-1]]


def _total(history: History) -> list[list[str]]:
    """Return the bytes of the whole run by class, as `dsq log` prints them."""
    def stored(logical: int, count: int) -> str:
        return f"{figures.size(count)} ({figures.ratio(logical, count)})"

    return [
        [name, figures.size(part.logical), stored(part.logical, part.written), stored(part.logical, part.kept)]
        for name, part in history.total.items()
    ]


def _rows(history: History, restores: dict[int, str]) -> list[dict[str, Any]]:
    """Return the rows of the table, newest first."""
    rows = []
    for place, entry in enumerate(history.entries):
        manifest, part = entry.manifest, entry.classes["everything"]
        search = Search.of(manifest)
        before = history.entries[place - 1].manifest.save_id if place else None
        notes = [entry.notes(), restores.get(place, "")]
        if manifest.previous_name and manifest.previous != before and place not in restores:
            notes.append(f"after {manifest.previous_name}")
        if entry.problems:
            notes.append("damaged")
        rows.append({
            "name": entry.path.name, "keyframe": manifest.depth == 0, "problem": bool(entry.problems), "cells": [
                entry.created[:16], "keyframe" if manifest.depth == 0 else f"delta {manifest.depth}",
                figures.size(part.written), figures.size(part.kept), figures.ratio(part.logical, part.written),
                figures.seconds(manifest.seconds), manifest.refinement, "-" if search is None else search.degradation,
                ", ".join(note for note in notes if note) or "",
            ],
        })
    return rows[::-1]


def _groups(entry: RunCheckpoint) -> list[list[str]]:
    """Return a row for each group of a checkpoint, the largest ones."""
    def share(value: float | None) -> str:
        return "-" if value is None or not math.isfinite(value) else f"{100 * value:.2f} %"

    largest = sorted(entry.manifest.groups.items(), key=lambda pair: (-pair[1].elements, pair[0]))
    rows = []
    for name, group in largest[:_LISTED]:
        worst = "-" if group.worst_tensor is None else f"{group.worst_tensor} ({share(group.worst_error)})"
        rows.append([
            name, figures.number(group.elements), f"{max(group.bits_per_element, 0):.3f}", str(group.levels),
            share(group.relative_error), share(compute_restored_error(group)), worst,
        ])
    return rows


def _data(history: History, charts: Sequence[Chart], restores: dict[int, str]) -> Markup:
    """Return the figures of all charts as JSON, safe inside a script element."""
    document = {
        "names": [escape_controls(entry.path.name) for entry in history.entries],
        "saved": [entry.created[:16] for entry in history.entries],
        "notes": {place: escape_controls(text) for place, text in restores.items()},
        "charts": {
            chart.key: {"unit": chart.unit, "series": [
                {"name": escape_controls(one.name), "tone": one.tone, "values": [_short(value) for value in one.values]}
                for one in chart.series
            ]} for chart in charts
        },
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")
