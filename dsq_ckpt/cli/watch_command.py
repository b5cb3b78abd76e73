"""`dsq watch`: a live view of the checkpoints of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from dsq_ckpt.cli import output
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.report.history import RunCheckpoint
from dsq_ckpt.storage.atomic_io import is_hidden
from dsq_ckpt.storage.backend import DirectoryEntry, get_storage
from dsq_ckpt.storage.description import format_losses
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, is_complete
from dsq_ckpt.storage.save_order import sort_by_save_order

_RECHECKED = 8  # number of newest checkpoints, whose refinement may be dropped
_MAX_INTERVALS = 10  # number of intervals between checkpoints, whose median predicts the next one
_RESERVED_LINES = 7  # lines of a terminal besides checkpoints


class RunWatcher:
    """A watcher of a run. Each `poll` lists the checkpoints again, and reads the manifests that may have changed.

    Attributes:
        run: run directory, which need not exist yet.
        entries: complete checkpoints, oldest first.
        damaged: problems of damaged checkpoints, by directory.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.entries: list[RunCheckpoint] = []
        self.damaged: dict[Path, str] = {}
        self._seen: dict[Path, tuple[float | None, RunCheckpoint]] = {}

    def poll(self) -> list[RunCheckpoint]:
        """Read changed checkpoints; return the new ones, oldest first.

        Raises:
            DSQError, OSError: the run cannot be read.
        """
        before = {entry.manifest.save_id for entry in self.entries}
        newest = {entry.path for entry in self.entries[-_RECHECKED:]}
        seen: dict[Path, tuple[float | None, RunCheckpoint]] = {}
        self.damaged = {}
        for path, entry in self._directories():
            earlier = self._seen.get(path)
            if earlier is not None and earlier[0] == entry.modified and path not in newest:
                seen[path] = earlier
                continue
            try:
                manifest = Manifest.read(path)
                overhead = get_storage(path).size(path / MANIFEST)
            except (CheckpointNotFound, FileNotFoundError):
                continue  # an unfinished save, a foreign directory, or removed meanwhile
            except DSQError as error:
                self.damaged[path] = str(error)
                continue
            seen[path] = entry.modified, RunCheckpoint.from_manifest(path, manifest, overhead)
        self._seen = seen
        by_path = {path: checkpoint for path, (_, checkpoint) in seen.items()}
        manifests = [(checkpoint.path, checkpoint.manifest) for checkpoint in by_path.values()]
        self.entries = [by_path[path] for path, _ in sort_by_save_order(manifests)]
        return [entry for entry in self.entries if entry.manifest.save_id not in before]

    def _directories(self) -> Iterator[tuple[Path, DirectoryEntry]]:
        for entry in get_storage(self.run).list_entries(self.run):
            if entry.is_directory and not is_hidden(entry.name) and entry.name != "lost+found":
                yield self.run / entry.name, entry

    @property
    def bytes_kept(self) -> int:
        """Bytes of manifests and of the files in them. A linked file has the same name everywhere, and counts once."""
        files: dict[object, int] = {}
        for entry in self.entries:
            manifest = entry.manifest
            size = manifest.sum_bytes("own", "index", "refinement", "attachment")
            files[entry.path] = entry.classes["everything"].kept - size
            for file in manifest.files:
                files[(entry.path, file.name) if file.role == "attachment" else file.name] = file.size
        return sum(files.values())

    def typical_interval(self) -> float | None:
        """Return the median seconds between checkpoints, or None with fewer than three checkpoints."""
        times = sorted(entry.manifest.created for entry in self.entries[-_MAX_INTERVALS - 1 :])
        gaps = [after - before for before, after in pairwise(times)]
        return statistics.median(gaps) if len(gaps) > 1 else None


def run(path: Path, interval: float, once: bool) -> None:
    """Show the checkpoints of a run until an interrupt.

    Args:
        path: run directory, which need not exist yet.
        interval: seconds between polls.
        once: print the present checkpoints, and return.

    Raises:
        CheckpointNotFound: the path is a checkpoint or a file; or, with `once`, holds no checkpoint.
    """
    if is_complete(path) or (not is_remote(path) and path.exists() and not path.is_dir()):
        raise CheckpointNotFound(f"'{path}' is no run: name the directory that a run's checkpoints lie in")
    watcher = RunWatcher(path)
    new = watcher.poll()
    if once and not new:
        damaged = next(iter(watcher.damaged.values()), None)
        raise CheckpointNotFound(f"'{path}' holds no complete checkpoint{'' if damaged is None else f': {damaged}'}")
    screen = output.console()
    if once or not screen.is_terminal:
        _print_lines(watcher, new, interval, once)
        return
    problem = None
    with Live(_render(watcher, problem), console=screen, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    watcher.poll()
                    problem = None
                except (DSQError, OSError) as error:  # such as a network that is down
                    problem = str(error)
                live.update(_render(watcher, problem), refresh=True)
        except KeyboardInterrupt:
            pass


def _print_lines(watcher: RunWatcher, new: list[RunCheckpoint], interval: float, once: bool) -> None:
    """Print a line for each new checkpoint, and a line on stderr for each new problem."""
    printed: set[str] = set()
    try:
        while True:
            for entry in new:
                typer.echo(output.escape_controls(_format_line(entry)))
            problems = {f"{path.name}: {text}" for path, text in watcher.damaged.items()}
            if once:
                break
            time.sleep(interval)
            try:
                new = watcher.poll()
            except (DSQError, OSError) as error:
                new, problems = [], problems | {f"{error}; trying again"}
            for problem in sorted(problems - printed):
                typer.echo(output.escape_controls(f"problem: {' '.join(problem.split())}"), err=True)
            printed = problems
    except KeyboardInterrupt:
        pass


def _format_line(entry: RunCheckpoint) -> str:
    counts, manifest = entry.classes["everything"], entry.manifest
    return ", ".join([
        f"{entry.path.name}: {output.size(counts.written)}", output.ratio(counts.logical, counts.written),
        f"delta {manifest.depth}" if manifest.depth else "keyframe", output.seconds(manifest.seconds),
        *format_losses(manifest.quality),
    ])


def _render(watcher: RunWatcher, problem: str | None) -> Any:
    """Return a table of the newest checkpoints that fit into the terminal, with a summary below."""
    screen = output.console()
    rows = output.table("<checkpoint", "<saved", "<coded", "written", "ratio", "took", "<refined", "base loses")
    shown = watcher.entries[-max(screen.height - _RESERVED_LINES, 1) :]
    for entry in shown:
        counts, manifest = entry.classes["everything"], entry.manifest
        degradation = (manifest.quality or {}).get("degradation")
        rows.add_row(
            entry.path.name, entry.created[5:16], f"delta {manifest.depth}" if manifest.depth else "keyframe",
            output.size(counts.written), output.ratio(counts.logical, counts.written), output.seconds(manifest.seconds),
            manifest.refinement, "-" if degradation is None else output.percent(degradation),
        )
    damaged = [f"damaged: {path.name}: {text}" for path, text in watcher.damaged.items()]
    damaged_lines = [f"{len(damaged) - 3} more damaged"] if len(damaged) > 3 else []
    lines = [*_summary_lines(watcher), *damaged[:3], *damaged_lines]
    if problem is not None:
        lines.append(f"{problem}; trying again")
    texts = [Text(output.escape_controls(line)) for line in [*lines, "Ctrl-C ends"]]
    return Group(rows, "", *texts) if shown else Group(*texts)


def _summary_lines(watcher: RunWatcher) -> list[str]:
    if not watcher.entries:
        return [f"waiting for the first checkpoint in '{watcher.run}'"]
    everything = [entry.classes["everything"] for entry in watcher.entries]
    logical, written = sum(counts.logical for counts in everything), sum(counts.written for counts in everything)
    count, kept = len(everything), watcher.bytes_kept
    lines = [
        f"{count} checkpoint{'' if count == 1 else 's'}: {output.size(logical)} uncompressed, {output.size(written)} "
        f"written ({output.ratio(logical, written)}), {output.size(kept)} kept ({output.ratio(logical, kept)})"
    ]
    age = max(time.time() - max(entry.manifest.created for entry in watcher.entries), 0.0)
    newest_age, interval = f"newest {output.seconds(age)} ago", watcher.typical_interval()
    if interval is None:
        return [*lines, newest_age]
    due = f": next in about {output.seconds(interval - age)}" if age < interval else ""
    return [*lines, f"{newest_age}, usually one every {output.seconds(interval)}{due}"]
