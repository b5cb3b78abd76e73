"""Garbage collection: files that an interrupted save left behind, and nothing else.

Three kinds of files are garbage: temporary files; files in a checkpoint directory that its manifest does not name;
and all files of ours in a directory without manifest that holds no others, which a save leaves that did not complete.
A file is ours only if its whole name has the form that a save gives, or if a journal of the save lists its checksum: a
tag's `*_states.pt` may be DeepSpeed's own. A tag that was being replaced is restored first (see `foreign_files`). Since
a save that is under way looks the same, a directory is left alone until its youngest such file is older than
`min_age_seconds`. An empty directory, which a save leaves that was killed before its first file, is not deleted:
anybody may have made it.

Copies and exports are made below a hidden name beside their target, `.NAME.dsq-xxxxxxxx.tmp`; a directory of such a
name is garbage with all that is in it, once no file in it is younger. So is the backup of a directory that an export
replaced, `.NAME.dsq-xxxxxxxx.old`, as long as the export is there. Names without that mark, which earlier versions
gave, may be a user's: the digits may be a date.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.storage.atomic_io import is_hidden, within_hidden
from dsq_ckpt.storage.container import file_checksum
from dsq_ckpt.storage.foreign_files import PLAIN, journaled, plain_backups, restore
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, is_complete
from dsq_ckpt.storage.paths import expanded
from dsq_ckpt.storage.references import held_for_others

_DATA = r"[0-9a-f]{16}(?:-\d{5,}\.(?:dsq|refinement)|\.index)"
_DATA_NAME = re.compile(_DATA)
_ATTACHED = r"[A-Za-z0-9_-]+\.pt"
_JOURNAL_NAME = re.compile(r"\.[0-9a-f]{16}(?:-\d{5,})?\.attachments")
_BACKUP_NAME = re.compile(rf"\.(?P<name>{_ATTACHED})\.(?P<save>[0-9a-f]{{16}}|{PLAIN})\.old")
_TEMPORARY_NAME = re.compile(
    rf"\.(?:(?:{re.escape(MANIFEST)}|{_DATA})(?:\.(?:dsq-)?[0-9a-f]{{8}})?|{_ATTACHED}\.dsq-[0-9a-f]{{8}})\.tmp"
)


_REPLACED_NAME = re.compile(r"\.(?P<name>.+)\.dsq-[0-9a-f]{8}\.old")
_UNFINISHED_NAME = re.compile(r"\..+\.dsq-[0-9a-f]{8}\.tmp")
_FORMER_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.(?:tmp|old)")
HARMLESS = re.compile(r"\.nfs[0-9a-f]+|\.DS_Store|lost\+found")
"""Names that file systems and file managers put everywhere."""


class Orphan(NamedTuple):
    """A file that nothing needs, or a directory with all that is in it; `reason` is for people."""

    path: Path
    bytes: int
    reason: str


class Left(NamedTuple):
    """A directory with files of ours that are not deleted although no manifest names them; `reason` is for people."""

    path: Path
    reason: str
    young: bool
    """Only because of their age."""


def is_ours(name: str) -> bool:
    """Return whether a data, index, refinement, hidden or temporary file of ours has such a name."""
    return any(form.fullmatch(name) for form in (_DATA_NAME, _JOURNAL_NAME, _BACKUP_NAME, _TEMPORARY_NAME))


def garbage(path: str | os.PathLike[str], min_age_seconds: float = 3600) -> list[Orphan]:
    """Find orphans in a checkpoint, or in a run directory and the directories directly below it.

    Args:
        path: a checkpoint or run directory.
        min_age_seconds: a directory with a younger orphan is left alone: it may be a save under way.

    Raises:
        CheckpointNotFound: there is no such directory.
    """
    path = expanded(path)
    found = [orphan for directory in _directories(path) for orphan in _orphans(directory, min_age_seconds)]
    return [*found, *(orphan for orphan, age in _unfinished(path) if age >= min_age_seconds)]


def collect(path: str | os.PathLike[str], min_age_seconds: float = 3600) -> list[Orphan]:
    """Delete what `garbage` finds, and directories that held nothing else; returns what was deleted.

    Raises:
        CheckpointNotFound: there is no such directory.
        OSError: a file cannot be deleted.
    """
    removed, path = [], expanded(path)
    for directory in _directories(path):
        orphans = collect_in(directory, min_age_seconds)
        removed += orphans
        if orphans and directory != path:
            with contextlib.suppress(OSError):  # not empty: something else lives there
                directory.rmdir()
    for orphan, age in _unfinished(path):
        if age < min_age_seconds:
            continue
        with contextlib.suppress(FileNotFoundError):  # it was just completed, or another one collects
            if _is_directory(orphan.path):
                shutil.rmtree(orphan.path)
            else:
                orphan.path.unlink()
            removed.append(orphan)
    return removed


def files_of(orphan: Orphan) -> list[Path]:
    """Return the files that go with an orphan."""
    if not _is_directory(orphan.path):
        return [orphan.path]
    return [entry for entry in orphan.path.rglob("*") if not _is_directory(entry)]


def collect_in(directory: Path, min_age_seconds: float) -> list[Orphan]:
    """Delete what `garbage` finds in one directory, and in none below it; returns what was deleted.

    Raises:
        OSError: a file cannot be read or deleted.
    """
    orphans = _orphans(directory, min_age_seconds)
    if orphans and plain_backups(directory):
        restore(directory)
    for orphan in orphans:
        orphan.path.unlink(missing_ok=True)
    return orphans


def collect_failed(directory: Path, save_id: str, inherited: Container[str], since: float) -> None:
    """Delete what a save that failed left in one directory, and with it what earlier ones did.

    Where another save writes to the directory, only those files go that the failed one wrote itself.

    Args:
        directory: directory of the save.
        save_id: save id of the save.
        inherited: names of files of its parent, which it may have linked; so may another save.
        since: when it began, seconds since the epoch: what is younger and not its own is of a save under way.

    Raises:
        OSError: a file cannot be read or deleted.
    """
    if plain_backups(directory):
        restore(directory, save_id)
    written = journaled(directory, save_id)
    own = re.compile(rf"\.?{save_id}[-.].*|.*\.dsq-{save_id[:8]}\.tmp")
    others = []
    for orphan, changed in _unneeded(directory):
        name = orphan.path.name
        if own.fullmatch(name) or name in written:
            orphan.path.unlink(missing_ok=True)
        elif changed >= since and name not in inherited and not _BACKUP_NAME.fullmatch(name):
            others.append(orphan)
    if not others:
        collect_in(directory, -math.inf)


def left(path: str | os.PathLike[str], min_age_seconds: float = 3600) -> list[Left]:
    """Return what `garbage` passes over, and why.

    Raises:
        CheckpointNotFound: there is no such directory.
    """
    path = expanded(path)
    entries = [found for directory in _directories(path) if (found := _left(directory, min_age_seconds))]
    young = [orphan.path for orphan, age in _unfinished(path) if age < min_age_seconds]
    entries += [Left(one, "it is too young: a copy or an export may be under way", True) for one in young]
    for entry in sorted(path.iterdir()):
        if _FORMER_NAME.fullmatch(entry.name) and not is_ours(entry.name):
            why = "earlier versions named copies, exports and what these replaced so; delete it by hand if it is one"
            entries.append(Left(entry, why, False))
        if (replaced := _REPLACED_NAME.fullmatch(entry.name)) and not _has(path, replaced["name"]):
            why = f"what was to replace it is not there; rename it to '{replaced['name']}', or delete it by hand"
            entries.append(Left(entry, why, False))
    return entries


def _left(directory: Path, min_age_seconds: float) -> Left | None:
    if _orphans(directory, 0) and not _orphans(directory, min_age_seconds):
        return Left(directory, "its files are too young: a save may be under way", True)
    names = sorted(os.listdir(directory))
    if not any(map(is_ours, names)):
        return None
    if _is_absent(directory / MANIFEST):
        if {name for name in names if is_ours(name)} <= held_for_others(directory):  # of a checkpoint that was removed
            return None
        written = journaled(directory)
        others = [] if plain_backups(directory) else _others(names, written)
        why = f"without a manifest, but with files that are not ours, such as '{others[0]}'" if others else None
        return Left(directory, f"{why}: delete it by hand if nothing in it is needed", False) if why else None
    try:
        Manifest.read(directory)
    except DSQError as error:
        return Left(directory, f"its manifest cannot be read, so any of its files may be needed: {error}", False)
    return None


def _others(names: Iterable[str], written: Container[str]) -> list[str]:
    """Return the names of files that are neither ours nor harmless."""
    return [name for name in names if not (is_ours(name) or name in written or HARMLESS.fullmatch(name))]


def _directories(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        raise CheckpointNotFound(f"'{path}' is not a directory; name a run directory or a checkpoint")
    yield path
    if not is_complete(path):
        # Links are not followed: what they lead to belongs to another run.
        for entry in sorted(path.iterdir()):
            if is_hidden(entry.name):
                continue
            if _is_directory(entry) and os.access(entry, os.R_OK | os.X_OK):
                yield entry


def _unfinished(path: Path) -> list[tuple[Orphan, float]]:
    """Return copies and exports directly in a directory that did not complete, and what others replaced.

    With the age in seconds of what is youngest in each.
    """
    found = []
    for entry in sorted(path.iterdir()):
        replaced = _REPLACED_NAME.fullmatch(entry.name)
        if is_ours(entry.name):
            continue
        if not (_UNFINISHED_NAME.fullmatch(entry.name) or (replaced and _has(path, replaced["name"]))):
            continue
        try:
            states = [os.lstat(one) for one in (entry, *(entry.rglob("*") if _is_directory(entry) else ()))]
        except FileNotFoundError:
            continue  # it was just completed
        age = time.time() - max(max(state.st_mtime, state.st_ctime) for state in states)
        size = sum(state.st_size for state in states if stat.S_ISREG(state.st_mode))
        found.append((Orphan(entry, size, "replaced" if replaced else "what was being written did not complete"), age))
    return found


def _has(directory: Path, name: str) -> bool:
    """Return whether something in a directory has the name that stands in a hidden one, where it may be shortened."""
    return os.path.lexists(directory / name) or any(within_hidden(entry) == name for entry in os.listdir(directory))


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_absent(path: Path) -> bool:
    """Return whether the path does not exist; False if that is unknown."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _orphans(directory: Path, min_age_seconds: float) -> list[Orphan]:
    found = _unneeded(directory)
    # One that is young says that the others may still be needed.
    young = any(time.time() - changed < min_age_seconds for _, changed in found)
    return [] if young else sorted(orphan for orphan, _ in found)


def _unneeded(directory: Path) -> list[tuple[Orphan, float]]:
    """Return files of ours that no manifest names, and when each was written or linked, seconds since the epoch."""
    entries = [entry for entry in os.scandir(directory) if entry.name != MANIFEST]
    named: set[str] = set()
    reason = "save did not complete"
    backups = plain_backups(directory)  # of a tag that was being replaced, and without a manifest was not
    written = journaled(directory) - backups.keys()
    data_too = bool(backups) or not _others((entry.name for entry in entries), written)
    if not _is_absent(directory / MANIFEST):
        reason = "not in the manifest"
        try:
            manifest = Manifest.read(directory)
            named = {file.name for file in manifest.files} | _needed_backups(directory, manifest)
            data_too = True
        except DSQError:
            data_too = False  # the files it lists are unknown, so all data may be needed
    orphans = []
    for entry in entries:
        temporary = bool(_TEMPORARY_NAME.fullmatch(entry.name))
        ours = is_ours(entry.name) or entry.name in written
        unnamed = data_too and ours and entry.name not in named
        if not (temporary or unnamed) or not entry.is_file(follow_symlinks=False):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # a save under way just renamed it
        orphan = Orphan(Path(entry.path), status.st_size, "temporary file" if temporary else reason)
        # Linking a file into a directory leaves its mtime alone and sets its ctime.
        orphans.append((orphan, max(status.st_mtime, status.st_ctime)))
    held = held_for_others(directory) if orphans else set[str]()
    return [(orphan, changed) for orphan, changed in orphans if orphan.path.name not in held]


def _needed_backups(directory: Path, manifest: Manifest) -> set[str]:
    """Return backups that an incomplete save made of files of the complete checkpoint in a directory.

    The journals are included, since they list the files that a backup may replace.
    """
    found = set()
    for file in manifest.files:
        backup = f".{file.name}.{manifest.save_id}.old"
        if file.role == "attachment" and (directory / backup).exists():
            try:
                whole = file_checksum(directory / file.name) == (file.size, file.checksum)
            except OSError:
                whole = False
            if not whole:
                found.add(backup)
    return found | {name for name in os.listdir(directory) if found and _JOURNAL_NAME.fullmatch(name)}
