"""Garbage collection on an object store: objects of interrupted saves and of checkpoints that are no longer needed.

The rules are those of `gc`: only dsq files are deleted, by the form of their whole name; none that a manifest of the
run lists; none in a directory with other objects, unless it has a manifest; and none before the youngest of them is
older than `min_age_seconds`, since a save may be in progress.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.storage import references
from dsq_ckpt.storage.backend import DirectoryEntry, get_storage
from dsq_ckpt.storage.gc import HARMLESS_NAMES, Orphan, SkippedDirectory, is_dsq_file
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from dsq_ckpt.storage.paths import expand_path


def find_garbage(path: Path, min_age_seconds: float = 3600) -> list[Orphan]:
    """Find orphans in a checkpoint, or in a run and its checkpoints; see `gc.find_garbage`."""
    return [orphan for orphans in _scan(path, min_age_seconds) if isinstance(orphans, list) for orphan in orphans]


def collect_garbage(path: Path, min_age_seconds: float = 3600) -> list[Orphan]:
    """Delete the orphans that `find_garbage` returns; return them.

    Raises:
        OSError: an object cannot be deleted.
    """
    orphans = find_garbage(path, min_age_seconds)
    references.remove_files(orphan.path for orphan in orphans)
    return orphans


def find_skipped(path: Path, min_age_seconds: float = 3600) -> list[SkippedDirectory]:
    """Return the directories that `find_garbage` skips, and why."""
    return [skipped for skipped in _scan(path, min_age_seconds) if isinstance(skipped, SkippedDirectory)]


def _scan(path: Path, min_age_seconds: float) -> Iterator[list[Orphan] | SkippedDirectory]:
    """Yield for each directory its orphans, or why it is skipped.

    Raises:
        CheckpointNotFound: there are no objects below `path`.
    """
    path = expand_path(path)
    top = get_storage(path).list_entries(path)
    if not top:
        raise CheckpointNotFound(f"nothing is at '{path}'; name a run or a checkpoint")
    below = [path / entry.name for entry in top if entry.is_directory]
    listed = {  # before manifests are read
        path: top, **{directory: get_storage(directory).list_entries(directory) for directory in below},
    }
    run = path if below else path.parent
    try:
        needed = _collect_needed_names(listed)
    except DSQError as error:
        yield SkippedDirectory(run, f"a manifest cannot be read, so any object may be needed: {error}", False)
        return
    for directory, entries in listed.items():
        names = {entry.name for entry in entries}
        dsq_files = [entry for entry in entries if is_dsq_file(entry.name) and not entry.is_directory]
        needed_names = needed[directory]
        unneeded = [entry for entry in dsq_files if entry.name not in needed_names]
        others = sorted(
            entry.name for entry in entries
            if not (entry.is_directory or entry in dsq_files)
            and not (entry.name == MANIFEST or HARMLESS_NAMES.fullmatch(entry.name))
        )
        if not unneeded:
            continue
        if MANIFEST not in names and others:
            yield SkippedDirectory(
                directory, f"without a manifest, but with objects that are not ours, such as '{others[0]}': delete it "
                "by hand if nothing in it is needed", False,
            )
        elif any(_is_young(entry, min_age_seconds) for entry in unneeded):
            yield SkippedDirectory(directory, "its objects are too young: a save may be under way", True)
        else:
            reason = "not in a manifest" if MANIFEST in names or needed_names else "save did not complete"
            yield sorted(Orphan(directory / entry.name, entry.size, reason) for entry in unneeded)


def _collect_needed_names(listed: dict[Path, list[DirectoryEntry]]) -> dict[Path, set[str]]:
    """Return the needed names in each directory: those listed in its manifest or in others of its run.

    The run of a checkpoint counts even if only the checkpoint is collected: it may have keys below its own, as of logs.

    Raises:
        DSQError: a manifest cannot be read, so any file may be needed.
    """
    needed: dict[Path, set[str]] = {}
    runs: dict[Path, dict[str, set[str]]] = {}
    for directory, entries in listed.items():
        needed[directory] = set()
        if not any(is_dsq_file(entry.name) for entry in entries):
            continue
        run = directory.parent
        if run not in runs:
            runs[run] = references.collect_needed_files(run)
        needed[directory] |= runs[run].get(directory.name, set())
        if run == directory and any(entry.name == MANIFEST for entry in entries):  # a bucket has no run
            needed[directory] |= {file.name for file in Manifest.read(directory).files}
    return needed


def _is_young(entry: DirectoryEntry, min_age_seconds: float) -> bool:
    if entry.modified is None:  # not reported by the store
        return min_age_seconds > 0
    return time.time() - entry.modified < min_age_seconds
