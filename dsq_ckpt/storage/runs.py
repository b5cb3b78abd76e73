"""Run directories: what is one, and what a wrong path may have meant."""

from __future__ import annotations

import difflib
import os
import re
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import CheckpointNotFound
from dsq_ckpt.storage.backend import storage_of
from dsq_ckpt.storage.manifest import checkpoints, is_complete
from dsq_ckpt.storage.paths import absolute, checkpoint_path, expanded

_SIBLINGS = 1000  # names that are compared with one that does not exist
_ALIKE = 0.75
_BESIDE = re.compile(
    r"\..*|latest.*|.*\.(?:log|out|err|txt|md|csv|tsv|jsonl?|ya?ml|toml|ini|cfg|png|svg)|.*tfevents.*", re.IGNORECASE
)
"""Names of files that training may leave in the directory of a run before its first checkpoint."""


def existing_run(run: str | os.PathLike[str]) -> Path:
    """Return the directory of a run, which need not exist yet.

    A directory that does not exist, beside one with checkpoints and nearly the same name, is warned of.

    Raises:
        CheckpointNotFound: it is something else: a file, a checkpoint, or a link to what is not there.
        OSError: whether it exists is unknown.
    """
    directory = expanded(run)
    if is_remote(directory):
        if is_complete(checkpoint_path(directory)):
            raise CheckpointNotFound(
                f"'{directory}' is a checkpoint, not a run; name what it lies in, '{directory.parent}'"
            )
        return directory
    try:
        mode = os.stat(directory).st_mode
    except FileNotFoundError:
        if directory.is_symlink():
            raise CheckpointNotFound(
                f"'{directory}' is a link to '{os.readlink(directory)}', which does not exist: is it mounted?"
            ) from None
        if other := _nearly(absolute(directory)):
            warn(f"'{directory}' does not exist, so a new run begins; '{other}' holds checkpoints: was that meant?")
        return directory
    except NotADirectoryError as error:
        raise CheckpointNotFound(f"'{directory}' leads through a file; name the directory of a run") from error
    if not stat.S_ISDIR(mode):
        raise CheckpointNotFound(f"'{directory}' is a file; name the directory that a run's checkpoints lie in")
    if is_complete(directory) or (directory / ".metadata").exists():
        kind = "checkpoint" if is_complete(directory) else "plain DCP checkpoint"
        raise CheckpointNotFound(
            f"'{directory}' is a {kind}, not a run; name the directory it lies in, '{absolute(directory).parent}'"
        )
    return directory


def warn_of_other(directory: Path) -> None:
    """Warn of a directory without checkpoints that does not look like a new run: the path may be wrong.

    New and empty directories pass, and others with directories, hidden files, logs, notes and settings in them.
    """
    runs, found = [], []
    for entry in islice(storage_of(directory).entries(directory), _SIBLINGS):
        if not entry.directory:
            found += [] if _BESIDE.fullmatch(entry.name) else [entry.name]
        elif any(True for _ in checkpoints(directory / entry.name, lambda *_: None)):
            runs.append(entry.name)
    if runs:
        warn(
            f"'{directory}' holds no checkpoint, so a new run begins; directories in it do, such as '{min(runs)}': "
            "was one of them meant?"
        )
    elif found:
        shown = ", ".join(map(repr, sorted(found)[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        warn(
            f"'{directory}' holds no checkpoint, so a new run begins; other files are there ({shown}): is it the "
            "directory that the run's checkpoints lie in?"
        )


def _nearly(missing: Path) -> Path | None:
    """Return a run with checkpoints whose path differs in the spelling of the first component that does not exist."""
    first = missing
    while not os.path.lexists(first.parent):
        first = first.parent
    with suppress(OSError):
        with os.scandir(first.parent) as entries:
            names = [entry.name for entry in islice(entries, _SIBLINGS)]
        # Runs that are numbered have nearly the same name on purpose.
        names = [name for name in names if _lettered(name) != _lettered(first.name)]
        for name in difflib.get_close_matches(first.name, names, 3, _ALIKE):
            other = first.with_name(name) / missing.relative_to(first)
            if any(True for _ in checkpoints(other, lambda *_: None)):
                return other
    return None


def _lettered(name: str) -> str:
    """Return a name with every number alike."""
    return re.sub(r"\d+", "0", name)


def run_of(path: Path) -> Path:
    """Return the run directory of a checkpoint: the one it lies in, whatever links lead there."""
    return path.parent if is_remote(path) else Path(os.path.realpath(path.absolute().parent))


def canonical(path: Path) -> Path:
    """Return the one path of a checkpoint that may be given by several, as through a link to its run directory."""
    return run_of(path) / path.absolute().name
