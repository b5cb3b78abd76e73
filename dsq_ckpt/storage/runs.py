"""Run directories: validation of their paths, and hints for mistyped ones."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path

from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import CheckpointNotFound, ConfigError
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import is_complete, iter_checkpoints
from dsq_ckpt.storage.paths import expand_path, resolve_checkpoint_path, to_absolute

_MAX_NAMES = 1000  # of a directory that are compared with a path that does not exist
_LONG_WORD = 5  # letters of a word in which one differing letter counts as a typo
_SEPARATORS = re.compile(r"(?<!\d)[-_. ]+|[-_. ]+(?!\d)")
"""Separators between words of a name, except those between numbers: 1.1 is not 11."""

_PARTS = re.compile(r"[^\W\d_]+|\d+|[^-_. \w]")  # words, numbers, other characters
_EARLY_FILE_NAMES = re.compile(
    r"\..*|latest.*|.*\.(?:log|out|err|txt|md|csv|tsv|jsonl?|ya?ml|toml|ini|cfg|png|svg)|.*tfevents.*", re.IGNORECASE
)
"""Names of files that training may write to a run directory before its first checkpoint."""


def resolve_run(run: str | os.PathLike[str], rank: int = 0) -> Path:
    """Return the path of a run directory, which need not exist yet.

    Warn if it does not exist and a similarly named directory has checkpoints.

    Args:
        run: path of the directory.
        rank: rank of this process; rank 0 warns.

    Raises:
        CheckpointNotFound: it is a file, a checkpoint or a dangling link.
        ConfigError: the path is empty, has a null character, or is a malformed URL.
        OSError: whether it exists is unknown.
    """
    if not os.fspath(run):
        raise ConfigError("run is '': expected the directory of a run; that of the process is '.'")
    directory = expand_path(run)
    if is_remote(directory):
        if is_complete(resolve_checkpoint_path(directory)):
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
        if other_run := _find_similar_run(to_absolute(directory)):
            warn(
                f"'{directory}' does not exist, so a new run begins; '{other_run}' holds checkpoints: was that meant?",
                rank=rank,
            )
        return directory
    except NotADirectoryError as error:
        raise CheckpointNotFound(f"'{directory}' leads through a file; name the directory of a run") from error
    if not stat.S_ISDIR(mode):
        raise CheckpointNotFound(f"'{directory}' is a file; name the directory that a run's checkpoints lie in")
    if is_complete(directory) or (directory / ".metadata").exists():
        kind = "checkpoint" if is_complete(directory) else "plain DCP checkpoint"
        raise CheckpointNotFound(
            f"'{directory}' is a {kind}, not a run; name the directory it lies in, '{to_absolute(directory).parent}'"
        )
    return directory


def warn_about_unrelated_directory(directory: Path, rank: int = 0) -> None:
    """Warn about a directory without checkpoints that does not look like that of a new run.

    A new run's directory may have subdirectories, hidden files, logs, notes and settings.
    """
    entries = islice(get_storage(directory).list_entries(directory), _MAX_NAMES)
    names = [entry.name for entry in entries if not entry.is_directory and not _EARLY_FILE_NAMES.fullmatch(entry.name)]
    if (run := find_run_below(directory)) is not None:
        warn(
            f"'{directory}' holds no checkpoint, so a new run begins; directories in it do, such as '{run}': "
            "was one of them meant?", rank=rank,
        )
    elif names:
        shown = ", ".join(map(repr, sorted(names)[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warn(
            f"'{directory}' holds no checkpoint, so a new run begins; other files are there ({shown}): is it the "
            "directory that the run's checkpoints lie in?", rank=rank,
        )


def find_run_below(directory: Path) -> str | None:
    """Return the alphabetically first name of a subdirectory that has checkpoints; None without any."""
    entries = islice(get_storage(directory).list_entries(directory), _MAX_NAMES)
    names = sorted(entry.name for entry in entries if entry.is_directory)
    return next((name for name in names if _has_checkpoints(directory / name)), None)


def _has_checkpoints(directory: Path) -> bool:
    return any(True for _ in iter_checkpoints(directory, lambda *_: None))


def _find_similar_run(missing: Path) -> Path | None:
    """Return a run with checkpoints whose path differs by a typo in the first component that does not exist."""
    first = missing
    while not os.path.lexists(first.parent):
        first = first.parent
    with suppress(OSError):
        with os.scandir(first.parent) as entries:
            names = [entry.name for entry in islice(entries, _MAX_NAMES)]
        for name in sorted(name for name in names if _is_similar(first.name, name)):
            candidate = first.with_name(name) / missing.relative_to(first)
            if _has_checkpoints(candidate):
                return candidate
    return None


def _is_similar(name: str, other: str) -> bool:
    """Return whether two names differ by case and separators, or by a typo within one word.

    Related runs have names that differ by numbers, single letters, prefixes and suffixes of words, and short words.
    """
    one, two = name.casefold(), other.casefold()
    parts, others = _PARTS.findall(one), _PARTS.findall(two)
    if parts == others or _SEPARATORS.sub("", one) == _SEPARATORS.sub("", two):
        return True
    differing = [(part, other_part) for part, other_part in zip(parts, others, strict=False) if part != other_part]
    return len(parts) == len(others) and len(differing) == 1 and _is_typo(*differing[0])


def _is_typo(word: str, other: str) -> bool:
    """Return whether words differ by two swapped neighbouring letters or, if they are long, by one inner letter."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, other, strict=False)))
    short, long = sorted((word[same:], other[same:]), key=len)
    if not (word + other).isalpha():
        return False
    if len(short) == len(long) > 1 and max(len(word), len(other)) > 2 and short == long[1::-1] + long[2:]:
        return True
    same_ends = word[0] == other[0] and word[-1] == other[-1]
    return same_ends and max(len(word), len(other)) >= _LONG_WORD and long[1:] in (short, short[1:])


def get_run(path: Path) -> Path:
    """Return the run directory of a checkpoint: its parent directory, with links resolved."""
    return path.parent if is_remote(path) else Path(os.path.realpath(path.absolute().parent))


def canonicalize(path: Path) -> Path:
    """Return the canonical path of a checkpoint: links in the path of its run directory are resolved."""
    return get_run(path) / path.absolute().name
