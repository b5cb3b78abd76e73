"""Retention of refinement layers: after a commit those of older checkpoints are deleted."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.atomic_io import AtomicFile, exchange_names, sync_directory
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import MANIFEST, Manifest
from dsq_ckpt.storage.predecessors import iter_predecessors


def retire(directory: Path, config: DSQConfig) -> None:
    """Delete the refinement of older checkpoints, as `config.refinement` asks; after the commit."""
    try:
        drop_refinements(directory, config.refinement.keep_last, config.storage.fsync)
    except (DSQError, OSError) as error:  # the checkpoint is safe; only space is lost, until the next save
        warn_safely(f"old refinement layers below '{directory.parent}' were not dropped: {error}")


def drop_refinements(newest: Path, keep_last: int, fsync: bool) -> list[Path]:
    """Delete the refinement of all but the newest checkpoints of a run; pinned checkpoints keep theirs.

    Called after `newest` was committed. Only the checkpoints it comes after are touched, not those of another job in
    the same directory; and none, if it is lossy and has no refinement, since the one before it is then the one to go
    back to. If it holds NaN, all keep theirs from the newest one on that holds it in fewer of these tensors. The older
    manifest says "dropped" before its file goes, so that a crash in between leaves an orphan, never a promise that is
    not kept.

    Args:
        newest: the checkpoint just committed.
        keep_last: how many of the newest checkpoints keep their refinement.
        fsync: flush what is written.

    Returns:
        The directories whose refinement was dropped.
    """
    manifest = Manifest.read(newest)
    if manifest.refinement != "kept" and manifest.lossy:
        return []
    due: list[tuple[Path, Manifest]] = []
    for age, (directory, older) in enumerate(iter_predecessors(newest), 1):
        if directory.is_symlink():
            break  # it leads to another run
        if set(older.nonfinite) < set(manifest.nonfinite):
            break  # the one to go back to
        if age < keep_last or older.refinement == "none" or older.pinned:
            continue
        if older.refinement == "dropped":
            break  # what is older was dropped before
        due.append((directory, older))
    # The oldest first: what a failure or a kill leaves is then what the next save meets first.
    dropped = [directory for directory, older in reversed(due) if _drop(directory, older, fsync)]
    return dropped[::-1]


def _drop(directory: Path, manifest: Manifest, fsync: bool) -> bool:
    """Return False if somebody else removes the checkpoint, such as a trainer that keeps the newest few."""
    names = {file.name for file in manifest.files if file.role == "refinement"}
    kept = [file for file in manifest.files if file.role != "refinement"]
    without = manifest.model_copy(update={"refinement": "dropped", "files": kept})
    with suppress(FileNotFoundError):
        times = None if is_remote(directory) else directory.stat()
        if not (_replace(directory, without, fsync) if times is not None else _replace_remote(directory, without)):
            return False
        for name in names:  # if a power failure takes that back, the file is an orphan that `dsq gc` removes
            get_storage(directory).remove(directory / name)
        if times is not None:  # trainers that remove old checkpoints take the time of a directory for that of its save
            with suppress(OSError):  # of another user
                os.utime(directory, ns=(times.st_atime_ns, times.st_mtime_ns))
        return True
    return False


def _replace(directory: Path, manifest: Manifest, fsync: bool) -> bool:
    """Replace a manifest, if it is there still and no other; who empties the directory meets no new name in it."""
    with AtomicFile(directory, fsync) as file:  # beside the directory
        file.stream.write(manifest.to_bytes())
        file.complete()
        if not _is_there(directory, manifest) or not exchange_names(file.hidden, directory / MANIFEST):
            return False
        replaced = file.hidden.read_bytes() if file.hidden.exists() else manifest.to_bytes()
        if json.loads(replaced)["save_id"] != manifest.save_id:  # of a save that came here meanwhile: back with it
            exchange_names(file.hidden, directory / MANIFEST)
            return False
    if fsync:
        sync_directory(directory)
    return True


def _is_there(directory: Path, manifest: Manifest) -> bool:
    with suppress(DSQError):
        return Manifest.read(directory).save_id == manifest.save_id
    return False


def _replace_remote(directory: Path, manifest: Manifest) -> bool:
    """Replace a manifest, and take it back if files that it names were removed meanwhile."""
    if not _is_there(directory, manifest):
        return False
    manifest.write(directory, exclusive=False, fsync=False)
    there = {entry.name for entry in get_storage(directory).list_entries(directory)}
    if there.issuperset(file.name for file in manifest.files if file.held_by is None):
        return True
    get_storage(directory).remove(directory / MANIFEST)
    return False
