"""Files that several checkpoints share: hard links, on object stores names of their holders, elsewhere copies."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, DSQError, LoadFailed, SaveFailed
from dsq_ckpt.storage.atomic_io import AtomicFile, relink
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.concurrent_changes import REMOVAL_TIMEOUT, ConcurrentChange, detect_change
from dsq_ckpt.storage.container import checksum_file, read_pieces
from dsq_ckpt.storage.manifest import Manifest, ManifestFile
from dsq_ckpt.storage.manifest_names import is_plain_name
from dsq_ckpt.storage.runs import get_run

NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.ENOSYS)
"""Errors that say that a link cannot be made here, and not that anything is wrong."""


def link_files(source: Path, target: Path, names: frozenset[str], fsync: bool) -> None:
    """Make `names` of the directory `source` appear in `target`: hard links, copies where links cannot be made.

    Raises:
        CorruptCheckpoint: a file is missing in `source`, or a name leads out of it.
        CheckpointNotFound: `source` is gone.
        SaveFailed: it is on an object store.
    """
    if names and is_remote(source):
        raise SaveFailed(
            f"the parent '{source}' is on an object store, and a checkpoint on a disk ('{target}') has links to the "
            f"files of its parent: copy it first (dsq cp {source} {target.parent / source.name}), or leave parent out"
        )
    for name in sorted(names):
        if not is_plain_name(name):
            raise CorruptCheckpoint(f"a data file in '{source}' requires {name!r}, which is not a plain file name")
        goal = target / name
        if goal.exists():
            continue
        try:
            link_or_copy(source / name, goal, fsync)
        except FileNotFoundError as error:
            files = Manifest.read(source).files
            held = {file.name: file.path_in(source) for file in files if file.held_by is not None}
            if name in held:  # the run was copied from an object store, as it lies there
                link_or_copy(held[name], goal, fsync)
                continue
            raise CorruptCheckpoint(
                f"'{source / name}' is missing, but the new checkpoint is coded against it: save again, which writes a "
                "keyframe where the file stays missing"
            ) from error


def read_parent_manifest(parent: Path, save_id: str) -> Manifest:
    """Return the manifest of the checkpoint that a new one is coded against.

    Raises:
        SaveFailed: it was removed or replaced meanwhile.
    """
    with explain_parent_errors(parent, save_id):
        manifest = Manifest.read(parent)
        if manifest.save_id != save_id:
            raise CheckpointNotFound(f"'{parent}' is of save {manifest.save_id}, expected {save_id}")
        return manifest


@contextmanager
def explain_parent_errors(parent: Path, save_id: str) -> Iterator[None]:
    """Let errors of reading the checkpoint that a new one is coded against say so where it is there no longer.

    Args:
        parent: the checkpoint.
        save_id: its save id; of another one that has its place now, nothing can be used.

    Raises:
        SaveFailed: it was removed or replaced meanwhile.
    """
    try:
        yield
    except (FileNotFoundError, CorruptCheckpoint, LoadFailed) as error:  # a `CheckpointNotFound` is one of the first
        found = _detect_parent_change(parent, save_id)
        if found is None:
            raise
        by, advice = _CHANGE_MESSAGES[found]
        raise SaveFailed(
            f"'{parent}' was {by} while this checkpoint, which needs files of it, was being saved: save again, and "
            + advice
        ) from error


_CHANGE_MESSAGES = {
    "removed": (
        "removed",
        "remove a checkpoint only when the next one is complete, as the result of a save in the background tells",
    ),
    "replaced": ("replaced by another save", "give each job a directory of its own"),
}


def _detect_parent_change(path: Path, save_id: str) -> ConcurrentChange | None:
    """Return whether a checkpoint is gone or replaced; wait for one that is on its way out."""
    try:
        manifest = Manifest.read(path)
    except CheckpointNotFound:
        return "removed"
    except DSQError:
        return None
    return detect_change(path, save_id, manifest, time.monotonic() + REMOVAL_TIMEOUT)


def link_or_copy(source: Path, target: Path, fsync: bool) -> None:
    """Give a file another name, one of a copy where links cannot be made; nothing where there is a file of that name.

    Raises:
        OSError: it cannot be linked or copied.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return  # another rank was faster
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        copy_file(source, target, fsync)


def compute_freed_space(files: Iterable[Path], before: Iterable[Path] = ()) -> tuple[set[Path], int]:
    """Return which local files have links elsewhere that stay when they are removed, and the bytes that this frees.

    Args:
        files: the files, of which several may be links to one.
        before: others that are removed before them, and are there still.
    """
    removed, earlier = _stat_files(files), _stat_files(before)
    links = Counter(map(_identity, (removed | earlier).values()))
    staying = {file for file, status in removed.items() if status.st_nlink > links[_identity(status)]}
    freed = dict[object, int]()
    for file, status in removed.items():
        if file not in staying:  # not all file systems number files
            freed[_identity(status) if status.st_nlink > 1 else file] = status.st_size
    return staying, sum(freed.values())


def _stat_files(files: Iterable[Path]) -> dict[Path, os.stat_result]:
    found = {}
    for file in files:
        with suppress(FileNotFoundError):
            found[file] = os.lstat(file)
    return found


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def replace_by_link(source: Path, target: Path) -> None:
    """Make a name stand for another file, complete or not at all; a copy where links cannot be made."""
    try:
        relink(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        copy_file(source, target, fsync=True)


def copy_file(source: Path, target: Path, fsync: bool, expected: ManifestFile | None = None) -> None:
    """Copy a file, complete or not at all; what has the target's name is replaced.

    Raises:
        CorruptCheckpoint: the copy is not the file that was expected.
    """
    with open(source, "rb") as origin, AtomicFile(target, fsync) as copy:
        shutil.copyfileobj(origin, copy.stream, 1 << 22)
        copy.complete()
        if expected is not None and checksum_file(copy.hidden) != (expected.size, expected.checksum):
            raise CorruptCheckpoint(f"'{source}' is not what was written: its checksum is wrong; nothing was copied")
        copy.publish()


def get_holder(file: ManifestFile, parent: Path, target: Path) -> str | None:
    """Return the name of the checkpoint that a new one refers to for a file of its parent.

    None: the new one has the file itself, by a link or a copy, as it always does on a local file system.
    """
    if not is_remote(target):
        return None
    holder = file.path_in(parent).parent
    return holder.name if holder != target and holder.parent == get_run(target) else None


def copy_between_storages(
    source: Path, target: Path, expected: ManifestFile | None, progress: Callable[[int], None] | None = None
) -> int:
    """Copy a file between backends, complete or not at all; its bytes.

    Args:
        source: the file.
        target: path of the copy.
        expected: the file as a manifest has it; None: whatever it is.
        progress: called with the number of bytes of each write.

    Raises:
        CorruptCheckpoint: it is not what was written.
        OSError: it cannot be read or written.
    """
    digest, size = xxhash.xxh3_64(), 0
    with get_storage(target).create(target, fsync=True) as copy:
        for piece in read_pieces(source):
            digest.update(piece)
            size += len(piece)
            copy.stream.write(piece)
            if progress is not None:
                progress(len(piece))
        if expected is not None and (size, digest.hexdigest()) != (expected.size, expected.checksum):
            raise CorruptCheckpoint(f"'{source}' is not what was written: its checksum is wrong; nothing was copied")
        copy.publish()
    return size
