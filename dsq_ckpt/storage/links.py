"""Files shared by checkpoints: hard links, copies without links, or on object stores references to the holder."""

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
"""Error numbers of systems on which a hard link is not possible."""


def link_files(source: Path, target: Path, names: frozenset[str], fsync: bool) -> None:
    """Link files of the directory `source` into `target`, or copy them where links are not possible.

    Raises:
        CorruptCheckpoint: a file is missing in `source`, or a name is no plain file name.
        CheckpointNotFound: `source` does not exist.
        SaveFailed: `source` is on an object store.
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
            linked = {file.name: file.path_in(source) for file in files if file.held_by is not None}
            if name in linked:  # the run was copied from an object store file by file
                link_or_copy(linked[name], goal, fsync)
                continue
            raise CorruptCheckpoint(
                f"'{source / name}' is missing, but the new checkpoint is coded against it: save again, which writes a "
                "keyframe where the file stays missing"
            ) from error


def read_parent_manifest(parent: Path, save_id: str) -> Manifest:
    """Return the manifest of the parent of a save.

    Raises:
        SaveFailed: the parent was removed or replaced meanwhile.
    """
    with explain_parent_errors(parent, save_id):
        manifest = Manifest.read(parent)
        if manifest.save_id != save_id:
            raise CheckpointNotFound(f"'{parent}' is of save {manifest.save_id}, expected {save_id}")
        return manifest


@contextmanager
def explain_parent_errors(parent: Path, save_id: str) -> Iterator[None]:
    """Translate errors of reading the parent of a save if it was removed or replaced.

    Args:
        parent: the parent checkpoint.
        save_id: its save id.

    Raises:
        SaveFailed: the parent was removed or replaced meanwhile.
    """
    try:
        yield
    except (FileNotFoundError, CorruptCheckpoint, LoadFailed) as error:  # the first includes `CheckpointNotFound`
        change = _detect_parent_change(parent, save_id)
        if change is None:
            raise
        by, advice = _CHANGE_MESSAGES[change]
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
    """Return whether a checkpoint was removed or replaced. Wait for a removal in progress."""
    try:
        manifest = Manifest.read(path)
    except CheckpointNotFound:
        return "removed"
    except DSQError:
        return None
    return detect_change(path, save_id, manifest, time.monotonic() + REMOVAL_TIMEOUT)


def link_or_copy(source: Path, target: Path, fsync: bool) -> None:
    """Create a hard link, or a copy where links are not possible. Do nothing if `target` exists.

    Raises:
        OSError: the file cannot be linked or copied.
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
    """Return which local files keep other hard links after their removal, and the bytes that the removal frees.

    Args:
        files: files to remove, several of which may be links to one file.
        before: files to remove before these, which still exist.
    """
    removed, earlier = _stat_files(files), _stat_files(before)
    links = Counter(map(_identity, (removed | earlier).values()))
    staying = {file for file, status in removed.items() if status.st_nlink > links[_identity(status)]}
    freed = dict[object, int]()
    for file, status in removed.items():
        if file not in staying:  # inode numbers are not unique on all file systems
            freed[_identity(status) if status.st_nlink > 1 else file] = status.st_size
    return staying, sum(freed.values())


def _stat_files(files: Iterable[Path]) -> dict[Path, os.stat_result]:
    statuses = {}
    for file in files:
        with suppress(FileNotFoundError):
            statuses[file] = os.lstat(file)
    return statuses


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def replace_by_link(source: Path, target: Path) -> None:
    """Atomically replace `target` by a hard link to `source`, or by a copy where links are not possible."""
    try:
        relink(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        copy_file(source, target, fsync=True)


def copy_file(source: Path, target: Path, fsync: bool, expected: ManifestFile | None = None) -> None:
    """Copy a file, replacing `target` atomically.

    Raises:
        CorruptCheckpoint: the copy does not match `expected`.
    """
    with open(source, "rb") as origin, AtomicFile(target, fsync) as copy:
        shutil.copyfileobj(origin, copy.stream, 1 << 22)
        copy.complete()
        if expected is not None and checksum_file(copy.hidden) != (expected.size, expected.checksum):
            raise CorruptCheckpoint(f"'{source}' is not what was written: its checksum is wrong; nothing was copied")
        copy.publish()


def get_holder(file: ManifestFile, parent: Path, target: Path) -> str | None:
    """Return the name of the checkpoint that holds a file of the parent, for reference by a new checkpoint.

    None if the new checkpoint has its own link or copy, as always on a local file system.
    """
    if not is_remote(target):
        return None
    holder = file.path_in(parent).parent
    return holder.name if holder != target and holder.parent == get_run(target) else None


def copy_between_storages(
    source: Path, target: Path, expected: ManifestFile | None, progress: Callable[[int], None] | None = None
) -> int:
    """Copy a file between storage backends atomically; return its size in bytes.

    Args:
        source: the file.
        target: path of the copy.
        expected: its entry in a manifest; None: not verified.
        progress: called with the number of bytes of each write.

    Raises:
        CorruptCheckpoint: the file does not match `expected`.
        OSError: a file cannot be read or written.
    """
    digest, size = xxhash.xxh3_64(), 0
    known_size = expected.size if expected is not None and is_remote(source) else None
    with get_storage(target).create(target, fsync=True) as copy:
        for piece in read_pieces(source, known_size):
            digest.update(piece)
            size += len(piece)
            copy.stream.write(piece)
            if progress is not None:
                progress(len(piece))
        if expected is not None and (size, digest.hexdigest()) != (expected.size, expected.checksum):
            raise CorruptCheckpoint(f"'{source}' is not what was written: its checksum is wrong; nothing was copied")
        copy.publish()
    return size
