"""`dsq log`: the checkpoints of a run, with their bytes when written and now."""

from __future__ import annotations

from typing import Any

from dsq_ckpt.cli import output
from dsq_ckpt.report.gradient_log import LogSession
from dsq_ckpt.report.history import CLASSES, History, Leftovers
from dsq_ckpt.report.searches import SearchTexts


def print_history(history: History) -> None:
    """Print the tables of a run."""
    screen = output.console()
    wide = screen.width >= output.WIDE_COLUMNS
    has_notes = any(entry.notes() for entry in history.entries)
    rows = output.table(
        "<checkpoint", *(["<saved"] if wide else []), "<coded", "written", "kept", "weights", "moments", "all",
        "took", "<refined", *(["<notes"] if has_notes else []),
    )
    for entry in history.entries:
        depth, everything = entry.manifest.depth, entry.classes["everything"]
        rows.add_row(
            entry.path.name, *([entry.created[5:16]] if wide else []), f"delta {depth}" if depth else "keyframe",
            output.size(everything.written), output.size(everything.kept),
            *(output.ratio(entry.classes[name].logical, entry.classes[name].kept) for name in CLASSES),
            output.seconds(entry.manifest.seconds), entry.manifest.refinement,
            *([entry.notes()] if has_notes else []),
        )
    screen.print(rows)
    screen.print(
        "written, kept: bytes, now without linked ancestors\n"
        "weights, moments, all: ratios of uncompressed bytes to those kept"
    )
    screen.print()
    if any(entry.manifest.quality for entry in history.entries):
        screen.print(_search_table(history))
        screen.print()
    count = len(history.entries)
    totals = output.table("<whole run", "bytes", "weights", "moments", "all")
    everything = history.total["everything"]
    totals.add_row("uncompressed", output.size(everything.logical))
    totals.add_row("written", output.size(everything.written), *(
        output.ratio(history.total[name].logical, history.total[name].written) for name in CLASSES
    ))
    totals.add_row("kept on disk", output.size(everything.kept), *(
        output.ratio(history.total[name].logical, history.total[name].kept) for name in CLASSES
    ))
    screen.print(totals)
    spent = output.seconds(sum(entry.manifest.seconds for entry in history.entries))
    summary = [f"{count} checkpoint{'s' if count > 1 else ''}", f"{spent} of saving", *_search_texts(history)]
    screen.print(", ".join(summary))
    if history.log_sessions:
        screen.print()
        _print_sessions(history.log_sessions)
    _print_leftovers(history)


def _search_table(history: History) -> Any:
    """Return a table of the searches. It is separate from the checkpoints, since terminals have 80 or 100 columns."""
    by_checkpoint = [(entry, SearchTexts.from_manifest(entry.manifest)) for entry in history.entries]
    searches = [search for _, search in by_checkpoint if search is not None]
    restores = any(search.restore is not None for search in searches)
    missed = any(not search.satisfied for search in searches)
    rows = output.table(
        "<checkpoint", "<chosen", "base loses", *(["restore loses"] if restores else []), "evaluations", "searched",
        *(["<bound"] if missed else []),
    )
    for entry, search in by_checkpoint:
        if search is None:
            rows.add_row(entry.path.name, *["-"] * (len(rows.columns) - 1))
            continue
        rows.add_row(
            entry.path.name, search.chosen, search.degradation, *([search.restore or "-"] if restores else []),
            search.evaluations, search.seconds, *(["kept" if search.satisfied else "missed"] if missed else []),
        )
    return rows


def _search_texts(history: History) -> list[str]:
    """Return the texts about searches and restores for the summary line."""
    records = [entry.manifest.quality for entry in history.entries if entry.manifest.quality]
    evaluations = sum(record.get("evaluations") or 0 for record in records)
    searched = output.seconds(sum(record.get("seconds") or 0.0 for record in records))
    resumes = history.entries[-1].manifest.lossy_resumes
    return [
        *([f"{searched} of searching with {evaluations} evaluations"] if records else []),
        *([f"lossy resumes: {resumes}"] if resumes else []),
    ]


def _print_leftovers(history: History) -> None:
    """Print warnings about damaged, incomplete and removed checkpoints."""
    screen = output.console()
    for path, problem in history.leftovers.damaged:
        screen.print(f"damaged: {path.name}: {problem}", soft_wrap=True)
    for entry in history.entries:
        if entry.problems:
            suffix = f" and {len(entry.problems) - 1} more" if len(entry.problems) > 1 else ""
            screen.print(f"damaged: {entry.path.name}: {entry.problems[0]}{suffix}; see dsq verify", soft_wrap=True)
    print_without_manifest(history.leftovers)


def print_without_manifest(leftovers: Leftovers) -> None:
    """Print a line for each directory of a checkpoint without a manifest."""
    screen = output.console()
    for path in leftovers.incomplete:
        screen.print(f"incomplete: {path.name}: a save under way, or a failed one for dsq gc", soft_wrap=True)
    for path, count in leftovers.removed:
        screen.print(f"removed: {path.name}: {count} file(s) stay, which other checkpoints need", soft_wrap=True)


def _print_sessions(sessions: list[LogSession]) -> None:
    """Print a table of the sessions of a gradient log."""
    screen = output.console()
    rows = output.table("<gradient log", "steps", "segments", "size", "per step", "<snapshot", "recovers to")
    for session in sessions:
        rows.add_row(
            session.session, f"{session.first} to {session.last}", str(session.segments), output.size(session.bytes),
            output.size(round(session.bytes / session.steps)), session.snapshot or "none",
            str(session.complete or "-"),
        )
    screen.print(rows)
    screen.print("Unless a file is damaged: `dsq verify` reads every byte.", markup=False, style="dim")
    for session in sessions:
        if session.ended is not None:
            screen.print(f"{session.session} ends at step {session.complete}: {session.ended}", soft_wrap=True)
