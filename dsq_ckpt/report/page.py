"""The page of `dsq report`: one self-contained HTML file."""

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
from dsq_ckpt.report.searches import SearchTexts
from dsq_ckpt.storage.atomic_io import create_file
from dsq_ckpt.storage.description import compute_restored_error
from dsq_ckpt.version import __version__

_SIGNATURE = b"<!doctype html>\n<!-- dsq report -->"
_MAX_LISTED = 50
"""Largest number of listed problems, and of listed groups of a checkpoint."""


def write(history: History, target: Path) -> int:
    """Write the page of a run atomically.

    Args:
        history: history of the run.
        target: file to write; an existing page is replaced.

    Returns:
        Size of the page in bytes.

    Raises:
        ConfigError: the target is a directory, another file, or on an object store.
        OSError: the file cannot be written.
    """
    if is_remote(target):
        raise ConfigError(f"'{target}' is a URL: write the page to a local file, and copy it there")
    if target.is_dir():
        raise ConfigError(f"'{target}' is a directory: name a file, such as '{target / 'report.html'}'")
    if target.exists() and not target.is_file():
        raise ConfigError(f"'{target}' is no ordinary file: name another one")  # a pipe would block open()
    if target.exists():
        with open(target, "rb") as old:
            if old.read(len(_SIGNATURE)) != _SIGNATURE:
                raise ConfigError(f"'{target}' is there and is no page of dsq report: name another file, or remove it")
    page = render(history).encode()
    with create_file(target) as stream:
        stream.write(page)
    return len(page)


def render(history: History) -> str:
    """Return the page of a run as HTML."""
    restores = _find_restores(history.entries)
    charts = {
        "Bytes": sections.size_charts(history), "Quality": sections.quality_charts(history), "Chain and time":
        sections.chain_charts(history), "Groups": sections.group_charts(history),
    }
    script, style = _read_template("script.js"), _read_template("style.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    count = len(history.entries)
    return _TEMPLATE.render(
        name=history.run.absolute().name or str(history.run), path=str(history.run), version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"), tiles=_build_tiles(history), problems=_collect_problems(history),
        sections=[(name, section) for name, section in charts.items() if section],
        restores=[(WIDTH * index / count, text) for index, text in restores.items()],
        axis=_axis_labels([entry.path.name for entry in history.entries]), rows=_table_rows(history, restores),
        newest=history.entries[-1].path.name, groups=_group_rows(history.entries[-1]),
        data=_chart_data(history, [chart for section in charts.values() for chart in section], restores),
        script=Markup(script), style=Markup(style), digest=digest, total=_total_rows(history),
    )


def _read_template(name: str) -> str:
    return files("dsq_ckpt.report").joinpath("templates", name).read_text(encoding="utf-8")


_ENVIRONMENT = Environment(  # everything is escaped, since names of files and tensors are untrusted
    loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    finalize=lambda value: escape_controls(value, "\n") if type(value) is str else value,
)
_TEMPLATE = _ENVIRONMENT.from_string(_read_template("page.html"))


@dataclass
class Tile:
    """A value at the top of the page."""

    value: str
    label: str
    note: str


def _build_tiles(history: History) -> list[Tile]:
    totals, newest = history.total["everything"], history.entries[-1]
    keyframes = sum(entry.manifest.depth == 0 for entry in history.entries)
    count, size = len(history.entries), figures.size
    counts = newest.classes["everything"]
    return [
        Tile(figures.ratio(totals.logical, totals.kept), "smaller on disk",
             f"{size(totals.kept)} of {size(totals.logical)}"),
        Tile(figures.ratio(totals.logical, totals.written), "less written",
             f"{size(totals.written)} in {figures.seconds(sum(e.manifest.seconds for e in history.entries))}"),
        Tile(str(count), "checkpoint" if count == 1 else "checkpoints",
             f"{keyframes} keyframe{'' if keyframes == 1 else 's'}, {count - keyframes} "
             f"delta{'' if count - keyframes == 1 else 's'}"),
        Tile(newest.path.name, "newest", f"{newest.created[:16]}, {size(counts.kept)}, "
             f"{figures.ratio(counts.logical, counts.kept)}, refinement {newest.manifest.refinement}"),
    ]


def _find_restores(entries: Sequence[RunCheckpoint]) -> dict[int, str]:
    """Return a text for each checkpoint that was saved after a restore from lossy state, by index.

    A manifest counts such restores of its run. Restores from exact checkpoints are not recorded.
    """
    by_id = {entry.manifest.save_id: entry for entry in entries}
    restores: dict[int, str] = {}
    for index, entry in enumerate(entries):
        manifest = entry.manifest
        previous = by_id.get(manifest.previous or "")
        older = previous if previous is not None else entries[index - 1] if index else None
        count = manifest.lossy_resumes - (0 if older is None else older.manifest.lossy_resumes)
        if count > 0:
            source = previous.path.name if previous is not None else manifest.previous_name
            times = "" if count == 1 else f"{count} times, last "
            restores[index] = f"restored {times}from {source}" if source else f"restored {count} time(s) before"
    return restores


def _collect_problems(history: History) -> list[tuple[str, str, str]]:
    """Return kind, name and text of each problem and each missing checkpoint."""
    problems = [("damaged", path.name, text) for path, text in history.leftovers.damaged]
    problems += [("damaged", e.path.name, "; ".join(_truncate(e.problems, 3))) for e in history.entries if e.problems]
    problems += [("incomplete", path.name, "no manifest: a save under way, or one that failed (dsq gc)")
                 for path in history.leftovers.incomplete]
    problems += [("removed", path.name, f"{count} file(s) stay, which other checkpoints need")
                 for path, count in history.leftovers.removed]
    own_names = {entry.manifest.save_id for entry in history.entries} | {entry.path.name for entry in history.entries}
    own_names |= {path.name for path, _ in [*history.leftovers.damaged, *history.leftovers.removed]}
    for entry in history.entries:
        manifest = entry.manifest
        for save_id, name in ((manifest.previous, manifest.previous_name), (manifest.parent, manifest.parent_name)):
            if save_id is not None and name is not None and not own_names & {save_id, name}:
                own_names |= {save_id, name}
                problems.append(("not there", name, f"removed or moved; {entry.path.name} was saved after it"))
    for entry in history.entries:
        record = entry.manifest.quality or {}
        if record.get("satisfied") is False:
            reason = record.get("reason") or "a restore changes the metric by more than its bound"
            problems.append(("bound missed", entry.path.name, str(reason)))
        if entry.manifest.nonfinite:
            names = ", ".join(_truncate(entry.manifest.nonfinite, 3))
            problems.append(("NaN or Inf", entry.path.name, f"stored exactly: {names}"))
    hidden_count = len(problems) - _MAX_LISTED
    if hidden_count > 0:
        return [*problems[:_MAX_LISTED], ("more", "", f"{hidden_count} more: see dsq log and dsq verify")]
    return problems


def _truncate(texts: Sequence[str], count: int) -> list[str]:
    return [*texts[:count], *([f"{len(texts) - count} more"] if len(texts) > count else [])]


def _axis_labels(names: Sequence[str]) -> list[str]:
    """Return the labels below the charts: the first, the middle and the last name."""
    middle = [names[len(names) // 2]] if len(names) % 2 and len(names) > 2 else []
    return [names[0]] if len(names) == 1 else [names[0], *middle, names[-1]]


def _total_rows(history: History) -> list[list[str]]:
    """Return the bytes of the whole run by class, as `dsq log` prints them."""
    def stored(logical: int, count: int) -> str:
        return f"{figures.size(count)} ({figures.ratio(logical, count)})"

    return [
        [name, figures.size(total.logical), stored(total.logical, total.written), stored(total.logical, total.kept)]
        for name, total in history.total.items()
    ]


def _table_rows(history: History, restores: dict[int, str]) -> list[dict[str, Any]]:
    """Return the rows of the table of checkpoints, newest first."""
    rows = []
    for index, entry in enumerate(history.entries):
        manifest, counts = entry.manifest, entry.classes["everything"]
        search = SearchTexts.from_manifest(manifest)
        before = history.entries[index - 1].manifest.save_id if index else None
        notes = [entry.notes(), restores.get(index, "")]
        if manifest.previous_name and manifest.previous != before and index not in restores:
            notes.append(f"after {manifest.previous_name}")
        if entry.problems:
            notes.append("damaged")
        rows.append({
            "name": entry.path.name, "keyframe": manifest.depth == 0, "problem": bool(entry.problems), "cells": [
                entry.created[:16], "keyframe" if manifest.depth == 0 else f"delta {manifest.depth}",
                figures.size(counts.written), figures.size(counts.kept), figures.ratio(counts.logical, counts.written),
                figures.seconds(manifest.seconds), manifest.refinement, "-" if search is None else search.degradation,
                ", ".join(note for note in notes if note) or "",
            ],
        })
    return rows[::-1]


def _group_rows(entry: RunCheckpoint) -> list[list[str]]:
    """Return the rows of the largest groups of a checkpoint."""
    def share(value: float | None) -> str:
        return "-" if value is None or not math.isfinite(value) else f"{100 * value:.2f} %"

    largest = sorted(entry.manifest.groups.items(), key=lambda pair: (-pair[1].elements, pair[0]))
    rows = []
    for name, group in largest[:_MAX_LISTED]:
        worst = "-" if group.worst_tensor is None else f"{group.worst_tensor} ({share(group.worst_error)})"
        rows.append([
            name, figures.number(group.elements), f"{max(group.bits_per_element, 0):.3f}", str(group.levels),
            share(group.relative_error), share(compute_restored_error(group)), worst,
        ])
    return rows


def _chart_data(history: History, charts: Sequence[Chart], restores: dict[int, str]) -> Markup:
    """Return the values of all charts as JSON that is safe inside a script element."""
    document = {
        "names": [escape_controls(entry.path.name) for entry in history.entries],
        "saved": [entry.created[:16] for entry in history.entries],
        "notes": {index: escape_controls(text) for index, text in restores.items()},
        "charts": {
            chart.key: {"unit": chart.unit, "series": [
                {"name": escape_controls(series.name), "tone": series.tone,
                 "values": [_shorten(value) for value in series.values]}
                for series in chart.series
            ]} for chart in charts
        },
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _shorten(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")
