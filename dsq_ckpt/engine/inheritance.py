"""Files of the parent in a new checkpoint: links, and the requested number of copies of keyframe files.

On an object store the manifest names the checkpoint of the run that holds a file, so only files of other runs are
copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.engine.history import ParentRef
from dsq_ckpt.errors import DSQError
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.links import (
    NO_LINKS,
    copy_between_storages,
    copy_file,
    explain_parent_errors,
    get_holder,
    link_files,
    read_parent_manifest,
)
from dsq_ckpt.storage.manifest import ManifestFile
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.predecessors import iter_predecessors


def link_parent_files(
    parent: ParentRef, target: Path, names: frozenset[str], storage: StorageConfig, previous: ParentRef | None = None
) -> None:
    """Link the required files of the parent into a new checkpoint; keyframe files may have several copies.

    Of `storage.keyframe_copies` consecutive checkpoints of a chain no two share a keyframe file: each links it from the
    checkpoint that many before it, or copies it if that one is gone.

    Args:
        parent: the parent.
        target: directory of the new checkpoint.
        names: names of the parent's data files.
        storage: says how many copies of each keyframe file are kept, and whether copies are flushed to the device.
        previous: the previous checkpoint; None: the parent.

    Raises:
        CorruptCheckpoint: a file is missing, a name leads elsewhere, or a copy has another checksum.
        SaveFailed: the parent was removed or replaced meanwhile.
    """
    directory = expand_path(parent.path)
    with explain_parent_errors(directory, parent.save_id):
        if is_remote(target):
            _copy_from_other_run(directory, parent.save_id, target, names)
        else:
            newest = directory if previous is None else expand_path(previous.path)
            _link(directory, target, names, storage, newest)


def link_refinement(parent: Path, target: Path, names: Iterable[str]) -> list[Path] | None:
    """Link refinement files of the parent into a new checkpoint, before it is known whether it needs them.

    Return the new links; None if a file is gone, or where links cannot be made: copies would take more bytes than
    differences save.
    """
    links = list[Path]()
    for name in sorted(names):
        try:
            os.link(parent / name, target / name)
            links.append(target / name)
        except FileExistsError:  # the checkpoint replaces its parent
            pass
        except OSError:
            remove_links(links)
            return None
    return links


def remove_links(links: Iterable[Path]) -> None:
    """Remove links that a checkpoint does not need."""
    for link in links:
        link.unlink(missing_ok=True)


def _link(parent: Path, target: Path, names: frozenset[str], storage: StorageConfig, newest: Path) -> None:
    copies = storage.keyframe_copies
    if copies > 1:
        with CheckpointFiles(parent, lazy=True) as files:
            by_name = {file.name: file for file in files.manifest.files}
            keyframes = {name for name in names & by_name.keys() if files.required_files(name) == {name}}
        holders = _list_newest_first(newest, copies) if keyframes else []
        for name in keyframes:
            if not (target / name).exists():
                sources = [holder / name for holder in holders]
                _link_or_copy(sources, parent / name, target / name, by_name[name], storage)
    link_files(parent, target, names, storage.fsync)


def _copy_from_other_run(parent: Path, save_id: str, target: Path, names: frozenset[str]) -> None:
    """Copy files of a parent in another run, or on another backend, to an object store."""
    for file in read_parent_manifest(parent, save_id).files:
        if file.name in names and get_holder(file, parent, target) is None and file.path_in(parent).parent != target:
            copy_between_storages(file.path_in(parent), target / file.name, file)


def _list_newest_first(newest: Path, count: int) -> list[Path]:
    """Return a checkpoint and its existing predecessors in the run, newest first."""
    with suppress(DSQError):
        return [newest, *(path for path, _ in islice(iter_predecessors(newest), count - 1))]
    return []


def _link_or_copy(
    holders: list[Path], parent: Path, target: Path, file: ManifestFile, storage: StorageConfig
) -> None:
    """Link a file from the oldest of as many holders as there are copies, if no other holder shares it; else copy it.

    A checkpoint after the parent may not need the file, and then does not hold it.
    """
    inodes = []
    for path in holders:
        with suppress(FileNotFoundError):
            inodes.append(path.stat().st_ino)
    if len(inodes) == storage.keyframe_copies and inodes[-1] not in inodes[:-1]:
        try:
            os.link(holders[-1], target)
            return
        except FileExistsError:
            return  # another rank was faster
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
    copy_file(next((path for path in holders if path.exists()), parent), target, storage.fsync, file)
