"""`dsq watch`: the checkpoints of a run as they are committed."""

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

_READ_AGAIN = 8  # newest checkpoints, whose refinement may be dropped
_INTERVALS = 10  # between checkpoints, whose median tells when the next one comes
_AROUND = 7  # lines of a terminal that are not checkpoints


class Watched:
    """The checkpoints of a run, read again at each `poll`, and each manifest only where it may have changed.

    Attributes:
        run: the run directory, which need not exist yet.
        entries: complete checkpoints, oldest first.
        damaged: what is wrong with others, by directory.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.entries: list[RunCheckpoint] = []
        self.damaged: dict[Path, str] = {}
        self._seen: dict[Path, tuple[float | None, RunCheckpoint]] = {}

    def poll(self) -> list[RunCheckpoint]:
        """Read what changed; return the checkpoints that are new, oldest first.

        Raises:
            DSQError, OSError: the run cannot be read.
        """
        before = {entry.manifest.save_id for entry in self.entries}
        newest = {entry.path for entry in self.entries[-_READ_AGAIN:]}
        seen: dict[Path, tuple[float | None, RunCheckpoint]] = {}
        self.damaged = {}
        for path, entry in self._directories():
            known = self._seen.get(path)
            if known is not None and known[0] == entry.modified and path not in newest:
                seen[path] = known
                continue
            try:
                manifest = Manifest.read(path)
                overhead = get_storage(path).size(path / MANIFEST)
            except (CheckpointNotFound, FileNotFoundError):
                continue  # a save under way, something else, or removed meanwhile
            except DSQError as error:
                self.damaged[path] = str(error)
                continue
            seen[path] = entry.modified, RunCheckpoint.of(path, manifest, overhead)
        self._seen = seen
        by_path = {path: one for path, (_, one) in seen.items()}
        found = [(one.path, one.manifest) for one in by_path.values()]
        self.entries = [by_path[path] for path, _ in sort_by_save_order(found)]
        return [entry for entry in self.entries if entry.manifest.save_id not in before]

    def _directories(self) -> Iterator[tuple[Path, DirectoryEntry]]:
        for entry in get_storage(self.run).list_entries(self.run):
            if entry.is_directory and not is_hidden(entry.name) and entry.name != "lost+found":
                yield self.run / entry.name, entry

    @property
    def kept(self) -> int:
        """Bytes of manifests and of all files that they name, each once: a linked file has one name everywhere."""
        files: dict[object, int] = {}
        for entry in self.entries:
            manifest = entry.manifest
            own = manifest.sum_bytes("own", "index", "refinement", "attachment")
            files[entry.path] = entry.classes["everything"].kept - own
            for file in manifest.files:
                files[(entry.path, file.name) if file.role == "attachment" else file.name] = file.size
        return sum(files.values())

    def every(self) -> float | None:
        """Return the usual seconds between checkpoints, None where fewer than three tell."""
        times = sorted(entry.manifest.created for entry in self.entries[-_INTERVALS - 1 :])
        gaps = [after - before for before, after in pairwise(times)]
        return statistics.median(gaps) if len(gaps) > 1 else None


def run(path: Path, interval: float, once: bool) -> None:
    """Show the checkpoints of a run until an interrupt, which is the ordinary end.

    Args:
        path: the run directory; it is waited for.
        interval: seconds between looks at it.
        once: print the present ones, and return.

    Raises:
        CheckpointNotFound: the path is a checkpoint or a file; or, with `once`, holds no checkpoint.
    """
    if is_complete(path) or (not is_remote(path) and path.exists() and not path.is_dir()):
        raise CheckpointNotFound(f"'{path}' is no run: name the directory that a run's checkpoints lie in")
    watched = Watched(path)
    found = watched.poll()
    if once and not found:
        damaged = next(iter(watched.damaged.values()), None)
        raise CheckpointNotFound(f"'{path}' holds no complete checkpoint{'' if damaged is None else f': {damaged}'}")
    screen = output.console()
    if once or not screen.is_terminal:
        _print_lines(watched, found, interval, once)
        return
    problem = None
    with Live(_view(watched, problem), console=screen, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    watched.poll()
                    problem = None
                except (DSQError, OSError) as error:  # such as a network that is down
                    problem = str(error)
                live.update(_view(watched, problem), refresh=True)
        except KeyboardInterrupt:
            pass


def _print_lines(watched: Watched, found: list[RunCheckpoint], interval: float, once: bool) -> None:
    """Print a line for each checkpoint as it comes, and one on stderr for each problem."""
    told: set[str] = set()
    try:
        while True:
            for entry in found:
                typer.echo(output.escape_controls(_line(entry)))
            problems = {f"{path.name}: {text}" for path, text in watched.damaged.items()}
            if once:
                break
            time.sleep(interval)
            try:
                found = watched.poll()
            except (DSQError, OSError) as error:
                found, problems = [], problems | {f"{error}; trying again"}
            for problem in sorted(problems - told):
                typer.echo(output.escape_controls(f"problem: {' '.join(problem.split())}"), err=True)
            told = problems
    except KeyboardInterrupt:
        pass


def _line(entry: RunCheckpoint) -> str:
    part, manifest = entry.classes["everything"], entry.manifest
    return ", ".join([
        f"{entry.path.name}: {output.size(part.written)}", output.ratio(part.logical, part.written),
        f"delta {manifest.depth}" if manifest.depth else "keyframe", output.seconds(manifest.seconds),
        *format_losses(manifest.quality),
    ])


def _view(watched: Watched, problem: str | None) -> Any:
    """Return the newest checkpoints as a table, with a summary below, as high as the terminal."""
    screen = output.console()
    rows = output.table("<checkpoint", "<saved", "<coded", "written", "ratio", "took", "<refined", "base loses")
    shown = watched.entries[-max(screen.height - _AROUND, 1) :]
    for entry in shown:
        part, manifest = entry.classes["everything"], entry.manifest
        lost = (manifest.quality or {}).get("degradation")
        rows.add_row(
            entry.path.name, entry.created[5:16], f"delta {manifest.depth}" if manifest.depth else "keyframe",
            output.size(part.written), output.ratio(part.logical, part.written), output.seconds(manifest.seconds),
            manifest.refinement, "-" if lost is None else output.percent(lost),
        )
    damaged = [f"damaged: {path.name}: {text}" for path, text in watched.damaged.items()]
    lines = [*_summary(watched), *damaged[:3], *([f"{len(damaged) - 3} more damaged"] if len(damaged) > 3 else [])]
    if problem is not None:
        lines.append(f"{problem}; trying again")
    texts = [Text(output.escape_controls(line)) for line in [*lines, "Ctrl-C ends"]]
    return Group(rows, "", *texts) if shown else Group(*texts)


def _summary(watched: Watched) -> list[str]:
    if not watched.entries:
        return [f"waiting for the first checkpoint in '{watched.run}'"]
    everything = [entry.classes["everything"] for entry in watched.entries]
    logical, written = sum(part.logical for part in everything), sum(part.written for part in everything)
    count, kept = len(everything), watched.kept
    found = [
        f"{count} checkpoint{'' if count == 1 else 's'}: {output.size(logical)} uncompressed, {output.size(written)} "
        f"written ({output.ratio(logical, written)}), {output.size(kept)} kept ({output.ratio(logical, kept)})"
    ]
    age = max(time.time() - max(entry.manifest.created for entry in watched.entries), 0.0)
    ago, every = f"newest {output.seconds(age)} ago", watched.every()
    if every is None:
        return [*found, ago]
    due = f": next in about {output.seconds(every - age)}" if age < every else ""
    return [*found, f"{ago}, usually one every {output.seconds(every)}{due}"]
