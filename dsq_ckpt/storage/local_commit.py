"""Commit of a checkpoint on a file system, and removal of the files of the checkpoint that it replaces.

There are no locks, and two saves may replace the same checkpoint, which one of them is coded against. Two rules keep
every file that a complete checkpoint needs, as `references` does on object stores:

* A save writes its manifest, and then checks that the files that it names are there.
* A removal renames a file, and then reads which files the manifest names.

In either order of the two, the save finds a file missing and takes its manifest back, or the removal finds the manifest
and gives the file its name back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.errors import CheckpointExists, CheckpointNotFound, DSQError, SaveFailed
from dsq_ckpt.storage.atomic_io import hidden_name, sync_directory
from dsq_ckpt.storage.concurrent_changes import find_missing_files
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, ManifestNotFlushed
from dsq_ckpt.storage.references import find_held_files, format_concurrent_save, try_read_manifest


def commit_manifest(path: Path, manifest: Manifest, overwrite: bool, fsync: bool) -> bool:
    """Commit a checkpoint, and remove files of a replaced checkpoint that it does not need.

    Args:
        path: directory of the checkpoint.
        manifest: its manifest.
        overwrite: replace a checkpoint at `path`.
        fsync: flush what is written.

    Returns:
        Whether its name is on the device.

    Raises:
        CheckpointExists: another save committed a checkpoint here meanwhile.
        SaveFailed: another save replaced the checkpoint at `path` meanwhile, and removed files that this one needs.
    """
    before: Manifest | None = None
    flushed, held = True, set[str]()
    if overwrite and try_read_manifest(path) is not None:
        held = find_held_files(path)

    def read_replaced() -> None:
        nonlocal before
        before = try_read_manifest(path) if overwrite else None

    if fsync:
        sync_directory(path)
    try:
        manifest.write(path, exclusive=not overwrite, fsync=fsync, before_publish=read_replaced)
    except FileExistsError as error:
        raise CheckpointExists(format_concurrent_save(path)) from error
    except ManifestNotFlushed as error:  # the checkpoint is visible, and removing it could fail as well
        flushed = False
        warn_safely(
            f"'{path}' is complete, but flushing its directory failed ({error.strerror}), so that a power failure "
            "may take it back: what it replaces and older refinement layers are kept; look at the device, save again"
        )
    if overwrite and (missing := find_missing_files(path, manifest)):
        _take_back(path, manifest, before, fsync)
        raise SaveFailed(
            f"the checkpoint that was at '{path}' was replaced meanwhile by another save, or removed, and with it "
            f"'{missing[0]}', which the new one needs: it was not committed; save again, and give each job a directory "
            "of its own"
        )
    if before is not None and flushed:
        old = {file.name for file in before.files if file.held_by is None}
        _remove_replaced(path, old - {file.name for file in manifest.files} - held)
    return flushed


def _take_back(path: Path, manifest: Manifest, before: Manifest | None, fsync: bool) -> None:
    """Put the manifest that a save replaced back, or remove that of the save; leave that of a third one."""
    replacement = try_read_manifest(path)
    if replacement is None or replacement.save_id != manifest.save_id:
        return
    if before is not None and not find_missing_files(path, before):
        with suppress(OSError):  # a full disk, for example
            before.write(path, exclusive=False, fsync=fsync)
            return
    (path / MANIFEST).unlink(missing_ok=True)


def _remove_replaced(path: Path, names: Iterable[str]) -> None:
    """Remove files of a replaced checkpoint that the manifest does not name, which may be that of another save by now.

    What fails is a warning, since the checkpoint is complete; `dsq gc` tries again.
    """
    hidden = {name: hidden_name(path / name) for name in names}
    moved = [name for name, goal in hidden.items() if _try(os.rename, path / name, goal)]
    try:
        needed = {file.name for file in Manifest.read(path).files}
    except CheckpointNotFound:
        needed = set()
    except DSQError:  # any file may be needed
        needed = set(moved)
    for name in moved:
        _try(os.rename, hidden[name], path / name) if name in needed else _try(os.unlink, hidden[name])


def _try(operation: Callable[..., object], *paths: Path) -> bool:
    """Return whether an operation on files succeeded; warn of errors except where the file is gone."""
    try:
        operation(*paths)
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        warn_safely(f"'{paths[0]}' of the checkpoint that was replaced was not deleted: {error}")
        return False
