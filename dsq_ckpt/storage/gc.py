"""Garbage collection of files that an interrupted save left behind.

Three kinds of files are garbage: temporary files; files in a checkpoint directory that its manifest does not list; and
all dsq files in a directory that has neither a manifest nor other files, as a save leaves it that did not complete. A
file is a dsq file only if its whole name has the form of such names, or if a journal of the save lists its checksum: a
tag's `*_states.pt` may be DeepSpeed's own. A tag that was being replaced is restored first (see `attachment_files`). A
save in progress looks the same, so a directory is skipped until its youngest garbage is older than `min_age_seconds`.
An empty directory, left by a save that was killed before its first file, is not deleted: any program may have made it.

Copies and exports are created under a hidden name beside their target, `.NAME.dsq-xxxxxxxx.tmp`. A directory of such a
name is garbage with all its contents, once no file in it is younger. So is the backup of a directory that an export
replaced, `.NAME.dsq-xxxxxxxx.old`, as long as the export exists. Names without that mark, as earlier versions wrote
them, may be a user's: the digits may be a date.
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
from dsq_ckpt.storage.atomic_io import is_hidden, shorten_name
from dsq_ckpt.storage.attachment_files import PLAIN, find_journaled_files, find_plain_backups, restore_backups
from dsq_ckpt.storage.container import checksum_file
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, is_complete
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.references import find_held_files

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
HARMLESS_NAMES = re.compile(r"\.nfs[0-9a-f]+|\.DS_Store|lost\+found")
"""Names of files that file systems and file managers create in any directory."""


class Orphan(NamedTuple):
    """File, or directory with all its contents, that nothing needs; `reason` is for messages."""

    path: Path
    bytes: int
    reason: str


class SkippedDirectory(NamedTuple):
    """Directory whose dsq files are not deleted, though no manifest lists them; `reason` is for messages."""

    path: Path
    reason: str
    is_young: bool
    """Whether their age is the only reason."""


def is_dsq_file(name: str) -> bool:
    """Return whether it is the name of a dsq file: data, refinement, index, journal, backup or temporary file."""
    return any(form.fullmatch(name) for form in (_DATA_NAME, _JOURNAL_NAME, _BACKUP_NAME, _TEMPORARY_NAME))


def find_garbage(path: str | os.PathLike[str], min_age_seconds: float = 3600) -> list[Orphan]:
    """Find orphans in a checkpoint, or in a run directory and the directories directly below it.

    Args:
        path: a checkpoint or run directory.
        min_age_seconds: a directory with a younger orphan is skipped: a save may be in progress.

    Raises:
        CheckpointNotFound: there is no such directory.
    """
    path = expand_path(path)
    orphans = [orphan for directory in _iter_directories(path) for orphan in _find_orphans(directory, min_age_seconds)]
    return [*orphans, *(orphan for orphan, age in _find_unfinished(path) if age >= min_age_seconds)]


def collect_garbage(path: str | os.PathLike[str], min_age_seconds: float = 3600) -> list[Orphan]:
    """Delete the orphans that `find_garbage` returns, and directories that become empty; return the deleted orphans.

    Raises:
        CheckpointNotFound: there is no such directory.
        OSError: a file cannot be deleted.
    """
    removed, path = [], expand_path(path)
    for directory in _iter_directories(path):
        orphans = collect_directory(directory, min_age_seconds)
        removed += orphans
        if orphans and directory != path:
            with contextlib.suppress(OSError):  # not empty: something else lives there
                directory.rmdir()
    for orphan, age in _find_unfinished(path):
        if age < min_age_seconds:
            continue
        with contextlib.suppress(FileNotFoundError):  # just completed, or removed by another collection
            if _is_directory(orphan.path):
                shutil.rmtree(orphan.path)
            else:
                orphan.path.unlink()
            removed.append(orphan)
    return removed


def list_files(orphan: Orphan) -> list[Path]:
    """Return the files that are deleted with an orphan."""
    if not _is_directory(orphan.path):
        return [orphan.path]
    return [entry for entry in orphan.path.rglob("*") if not _is_directory(entry)]


def collect_directory(directory: Path, min_age_seconds: float) -> list[Orphan]:
    """Delete the orphans directly in one directory; return the deleted orphans.

    Raises:
        OSError: a file cannot be read or deleted.
    """
    orphans = _find_orphans(directory, min_age_seconds)
    if orphans and find_plain_backups(directory):
        restore_backups(directory)
    for orphan in orphans:
        orphan.path.unlink(missing_ok=True)
    return orphans


def collect_failed_save(directory: Path, save_id: str, inherited: Container[str], since: float) -> None:
    """Delete the files of a failed save in one directory, and those of earlier incomplete saves.

    If another save is writing to the directory, delete only files that the failed save wrote itself.

    Args:
        directory: directory of the save.
        save_id: save id of the failed save.
        inherited: names of files of its parent, which this or another save may have linked.
        since: start of the save, seconds since the epoch: younger files of others belong to a save in progress.

    Raises:
        OSError: a file cannot be read or deleted.
    """
    if find_plain_backups(directory):
        restore_backups(directory, save_id)
    written = find_journaled_files(directory, save_id)
    pattern = re.compile(rf"\.?{save_id}[-.].*|.*\.dsq-{save_id[:8]}\.tmp")
    others = []
    for orphan, changed in _find_unneeded(directory):
        name = orphan.path.name
        if pattern.fullmatch(name) or name in written:
            orphan.path.unlink(missing_ok=True)
        elif changed >= since and name not in inherited and not _BACKUP_NAME.fullmatch(name):
            others.append(orphan)
    if not others:
        collect_directory(directory, -math.inf)


def find_skipped(path: str | os.PathLike[str], min_age_seconds: float = 3600) -> list[SkippedDirectory]:
    """Return the directories that `find_garbage` skips, and why.

    Raises:
        CheckpointNotFound: there is no such directory.
    """
    path = expand_path(path)
    entries = list(filter(None, (_find_skipped(directory, min_age_seconds) for directory in _iter_directories(path))))
    young = [orphan.path for orphan, age in _find_unfinished(path) if age < min_age_seconds]
    entries += [
        SkippedDirectory(unfinished, "it is too young: a copy or an export may be under way", True)
        for unfinished in young
    ]
    for entry in sorted(path.iterdir()):
        if _FORMER_NAME.fullmatch(entry.name) and not is_dsq_file(entry.name):
            reason = "earlier versions named copies, exports and what these replaced so; delete it by hand if it is one"
            entries.append(SkippedDirectory(entry, reason, False))
        if (replaced := _REPLACED_NAME.fullmatch(entry.name)) and not _has_name(path, replaced["name"]):
            reason = f"what was to replace it is not there; rename it to '{replaced['name']}', or delete it by hand"
            entries.append(SkippedDirectory(entry, reason, False))
    return entries


def _find_skipped(directory: Path, min_age_seconds: float) -> SkippedDirectory | None:
    if _find_orphans(directory, 0) and not _find_orphans(directory, min_age_seconds):
        return SkippedDirectory(directory, "its files are too young: a save may be under way", True)
    names = sorted(os.listdir(directory))
    if not any(map(is_dsq_file, names)):
        return None
    if _is_absent(directory / MANIFEST):
        if {name for name in names if is_dsq_file(name)} <= find_held_files(directory):  # of a removed checkpoint
            return None
        written = find_journaled_files(directory)
        others = [] if find_plain_backups(directory) else _list_foreign_names(names, written)
        cause = f"without a manifest, but with files that are not ours, such as '{others[0]}'" if others else None
        if cause is None:
            return None
        return SkippedDirectory(directory, f"{cause}: delete it by hand if nothing in it is needed", False)
    try:
        Manifest.read(directory)
    except DSQError as error:
        reason = f"its manifest cannot be read, so any of its files may be needed: {error}"
        return SkippedDirectory(directory, reason, False)
    return None


def _list_foreign_names(names: Iterable[str], written: Container[str]) -> list[str]:
    """Return the names that are neither of dsq files nor harmless."""
    return [name for name in names if not (is_dsq_file(name) or name in written or HARMLESS_NAMES.fullmatch(name))]


def _iter_directories(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        raise CheckpointNotFound(f"'{path}' is not a directory; name a run directory or a checkpoint")
    yield path
    if not is_complete(path):
        # Links are not followed: their targets belong to another run.
        for entry in sorted(path.iterdir()):
            if is_hidden(entry.name):
                continue
            if _is_directory(entry) and os.access(entry, os.R_OK | os.X_OK):
                yield entry


def _find_unfinished(path: Path) -> list[tuple[Orphan, float]]:
    """Return incomplete copies and exports directly in a directory, and backups of replaced directories.

    Each with the age in seconds of its youngest file.
    """
    orphans = []
    for entry in sorted(path.iterdir()):
        replaced = _REPLACED_NAME.fullmatch(entry.name)
        if is_dsq_file(entry.name):
            continue
        if not (_UNFINISHED_NAME.fullmatch(entry.name) or (replaced and _has_name(path, replaced["name"]))):
            continue
        try:
            states = [os.lstat(file) for file in (entry, *(entry.rglob("*") if _is_directory(entry) else ()))]
        except FileNotFoundError:
            continue  # it was just completed
        age = time.time() - max(max(state.st_mtime, state.st_ctime) for state in states)
        size = sum(state.st_size for state in states if stat.S_ISREG(state.st_mode))
        reason = "replaced" if replaced else "what was being written did not complete"
        orphans.append((Orphan(entry, size, reason), age))
    return orphans


def _has_name(directory: Path, name: str) -> bool:
    """Return whether a directory has an entry of the name, which may be shortened as in a hidden name."""
    return os.path.lexists(directory / name) or any(shorten_name(entry) == name for entry in os.listdir(directory))


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_absent(path: Path) -> bool:
    """Return whether the path does not exist; False if that is unknown."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _find_orphans(directory: Path, min_age_seconds: float) -> list[Orphan]:
    orphans = _find_unneeded(directory)
    # If one is young, a save may be in progress that needs the others.
    young = any(time.time() - changed < min_age_seconds for _, changed in orphans)
    return [] if young else sorted(orphan for orphan, _ in orphans)


def _find_unneeded(directory: Path) -> list[tuple[Orphan, float]]:
    """Return the dsq files that no manifest lists, with the time of their last write or link in epoch seconds."""
    entries = [entry for entry in os.scandir(directory) if entry.name != MANIFEST]
    named: set[str] = set()
    reason = "save did not complete"
    backups = find_plain_backups(directory)  # of a tag that was being replaced, and without a manifest was not
    written = find_journaled_files(directory) - backups.keys()
    data_too = bool(backups) or not _list_foreign_names((entry.name for entry in entries), written)
    if not _is_absent(directory / MANIFEST):
        reason = "not in the manifest"
        try:
            manifest = Manifest.read(directory)
            named = {file.name for file in manifest.files} | _find_needed_backups(directory, manifest)
            data_too = True
        except DSQError:
            data_too = False  # the files it lists are unknown, so all data may be needed
    orphans = []
    for entry in entries:
        temporary = bool(_TEMPORARY_NAME.fullmatch(entry.name))
        is_dsq = is_dsq_file(entry.name) or entry.name in written
        unnamed = data_too and is_dsq and entry.name not in named
        if not (temporary or unnamed) or not entry.is_file(follow_symlinks=False):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # just renamed by a save in progress
        orphan = Orphan(Path(entry.path), status.st_size, "temporary file" if temporary else reason)
        # Linking a file into a directory leaves its mtime alone and sets its ctime.
        orphans.append((orphan, max(status.st_mtime, status.st_ctime)))
    needed = find_held_files(directory) if orphans else set[str]()
    return [(orphan, changed) for orphan, changed in orphans if orphan.path.name not in needed]


def _find_needed_backups(directory: Path, manifest: Manifest) -> set[str]:
    """Return the names of backups of the complete checkpoint's files that an incomplete save has replaced.

    Journals are included, since they list the files that a backup may replace.
    """
    needed = set()
    for file in manifest.files:
        backup = f".{file.name}.{manifest.save_id}.old"
        if file.role == "attachment" and (directory / backup).exists():
            try:
                is_intact = checksum_file(directory / file.name) == (file.size, file.checksum)
            except OSError:
                is_intact = False
            if not is_intact:
                needed.add(backup)
    return needed | {name for name in os.listdir(directory) if needed and _JOURNAL_NAME.fullmatch(name)}
