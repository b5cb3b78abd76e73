"""Retention of refinement layers: those of older checkpoints are deleted after a commit."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.notices import warn_safely
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.storage.atomic_io import AtomicFile, exchange_names, is_hidden, sync_directory
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.manifest import MANIFEST, REFINEMENT_ROLES, Manifest
from dsq_ckpt.storage.predecessors import iter_predecessors


def retire(directory: Path, config: DSQConfig) -> None:
    """Delete the refinement of older checkpoints, as `config.refinement` defines; after the commit."""
    try:
        drop_refinements(directory, config.refinement.keep_last, config.storage.fsync)
    except (DSQError, OSError) as error:  # the checkpoint is safe; only space is lost, until the next save
        warn_safely(f"old refinement layers below '{directory.parent}' were not dropped: {error}")


def drop_refinements(newest: Path, keep_last: int, fsync: bool) -> list[Path]:
    """Delete the refinement of all but the newest checkpoints of a run; pinned checkpoints keep theirs.

    Called after `newest` was committed. Only its predecessors are changed, not checkpoints of another job in the same
    directory. A checkpoint that the run was resumed from keeps its refinement while the run directory has a copy of it
    by hard links, since either may be the one that was made to keep it. None is changed if it is lossy and has no
    refinement, since its predecessor is then the one to restore. If it holds NaN, refinement is kept back to the newest
    checkpoint that holds NaN in fewer of these tensors. The older manifest is set to "dropped" before its file is
    removed, so that a crash in between leaves an orphan file, never a manifest that names a missing one.

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
    newer, old, skipped, ended = manifest, list[str](), False, False
    settled, superseded = _settled.get(newest.parent, ()), ""
    for age, (directory, older) in enumerate(iter_predecessors(newest, manifest), 1):
        if directory.is_symlink():
            break  # it leads to another run
        if set(older.nonfinite) < set(manifest.nonfinite):
            break  # the checkpoint to restore instead
        if ended := older.save_id in settled and (older.refinement != "kept" or older.pinned):
            superseded = older.save_id
            break  # an earlier call saw that nothing is left to drop from there on, and no copy was put there since
        resumed, newer = newer.lossy_resumes > older.lossy_resumes, older
        if age < keep_last:
            continue
        old.append(older.save_id)
        if older.refinement == "none" or older.pinned:
            continue
        if ended := older.refinement == "dropped":
            break  # older ones were dropped before
        if resumed and _has_linked_copy(directory, older):
            skipped = True
            continue
        due.append((directory, older))
    # The oldest first: after a failure or a kill the next save meets the remaining ones first.
    dropped = [directory for directory, older in reversed(due) if _drop_refinement(directory, older, fsync)]
    if old and not skipped and len(dropped) == len(due) and (ended or _has_no_predecessor(newest.parent, newer)):
        others = [save_id for save_id in settled if save_id not in (superseded, old[0])]
        _settled[newest.parent] = (*others, old[0])[-_MAX_STATES:]
    return dropped[::-1]


_MAX_STATES = 16
"""States saved in one run directory, such as a model and its discriminator, for which `_settled` has an entry."""
_settled: dict[Path, tuple[str, ...]] = {}
"""By run directory, save ids of checkpoints that have no refinement to drop, nor has any of their predecessors.

Without it each save in a run without refinement layers would read the manifests of all checkpoints.
"""


def _has_no_predecessor(run: Path, manifest: Manifest) -> bool:
    """Return whether a checkpoint is the first of its run, or the one before it was removed."""
    if manifest.previous_name is None:
        return True
    try:
        Manifest.read(run / manifest.previous_name)
    except CheckpointNotFound:
        return True
    except DSQError:  # it may be readable again at the next save
        pass
    return False


def _has_linked_copy(directory: Path, manifest: Manifest) -> bool:
    """Return whether another directory of the run is a copy of a checkpoint by hard links.

    A later checkpoint may link the refinement files too, if its own are differences to them.
    """
    files = [directory / file.name for file in manifest.files if file.role == "refinement"]
    if is_remote(directory) or not files:
        return False
    with suppress(FileNotFoundError):
        status = files[0].stat()
        if status.st_nlink > 1:
            for other in directory.parent.iterdir():
                if other.name != directory.name and not other.is_symlink() and not is_hidden(other.name):
                    with suppress(OSError, DSQError):
                        linked = os.path.samestat((other / files[0].name).stat(), status)
                        if linked and Manifest.read(other).save_id == manifest.save_id:
                            return True
    return False


def _drop_refinement(directory: Path, manifest: Manifest, fsync: bool) -> bool:
    """Drop the refinement of one checkpoint.

    Return False if another program removes the checkpoint, such as a trainer that keeps the newest few.
    """
    names = {file.name for file in manifest.files if file.role in REFINEMENT_ROLES}
    files = [file for file in manifest.files if file.role not in REFINEMENT_ROLES]
    updated = manifest.model_copy(update={"refinement": "dropped", "files": files})
    with suppress(FileNotFoundError):
        times = None if is_remote(directory) else directory.stat()
        if times is None:
            replaced = _replace_remote_manifest(directory, updated)
        else:
            replaced = _replace_manifest(directory, updated, fsync)
        if not replaced:
            return False
        for name in names:  # a file that a power failure brings back is an orphan, which `dsq gc` removes
            get_storage(directory).remove(directory / name)
        if times is not None:  # trainers that remove old checkpoints take the mtime of a directory for its age
            with suppress(OSError):  # of another user
                os.utime(directory, ns=(times.st_atime_ns, times.st_mtime_ns))
        return True
    return False


def _replace_manifest(directory: Path, manifest: Manifest, fsync: bool) -> bool:
    """Replace a manifest if it still exists with the same save id; a concurrent `rmtree` meets no new name."""
    with AtomicFile(directory, fsync) as file:  # beside the directory
        file.stream.write(manifest.to_bytes())
        file.complete()
        if not _is_unchanged(directory, manifest) or not exchange_names(file.hidden, directory / MANIFEST):
            return False
        replaced = file.hidden.read_bytes() if file.hidden.exists() else manifest.to_bytes()
        if json.loads(replaced)["save_id"] != manifest.save_id:  # another save committed here meanwhile: restore it
            exchange_names(file.hidden, directory / MANIFEST)
            return False
    if fsync:
        sync_directory(directory)
    return True


def _is_unchanged(directory: Path, manifest: Manifest) -> bool:
    with suppress(DSQError):
        return Manifest.read(directory).save_id == manifest.save_id
    return False


def _replace_remote_manifest(directory: Path, manifest: Manifest) -> bool:
    """Replace a manifest; remove it again if files that it names were removed meanwhile."""
    if not _is_unchanged(directory, manifest):
        return False
    manifest.write(directory, exclusive=False, fsync=False)
    names = {entry.name for entry in get_storage(directory).list_entries(directory)}
    if names.issuperset(file.name for file in manifest.files if file.held_by is None):
        return True
    get_storage(directory).remove(directory / MANIFEST)
    return False
