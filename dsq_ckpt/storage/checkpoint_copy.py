"""Copy of checkpoints and runs. Hard links are kept: a file that several checkpoints share is copied once.

Copies from or to an object store are made by `remote_copy`.

The checksum of every file of a checkpoint is verified during the copy. The copy appears complete or not at all.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import xxhash

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import CheckpointExists, CheckpointNotFound, CorruptCheckpoint, DSQError, SaveFailed
from dsq_ckpt.storage import remote_copy
from dsq_ckpt.storage.atomic_io import add_path_to_errors, create_directory, flush, is_hidden, sync_directory
from dsq_ckpt.storage.attachment_files import find_replaced_plain
from dsq_ckpt.storage.concurrent_changes import REMOVAL_TIMEOUT, detect_change
from dsq_ckpt.storage.gc import is_dsq_file
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, ManifestFile, is_complete
from dsq_ckpt.storage.paths import resolve_checkpoint_path
from dsq_ckpt.storage.remote_copy import POINTERS, RemoteCopy, has_held_files

_PIECE = 1 << 22
_MAX_ATTEMPTS = 3


class CopyResult(NamedTuple):
    """Result of a copy.

    Attributes:
        path: path of the copy.
        checkpoints: number of checkpoints in the copy.
        files: number of files written.
        bytes: bytes of the files written.
        links: number of links to files that were written already.
        left_out: paths that were not copied, with the reason: incomplete saves, copies and exports, and paths that are
            neither file, directory nor link; for copies from or to an object store see `remote_copy`.
        removed: paths that were removed during the copy, which therefore lacks them.
    """

    path: Path
    checkpoints: int
    files: int
    bytes: int
    links: int
    left_out: dict[Path, str]
    removed: list[Path]


def copy_checkpoints(
    source: str | os.PathLike[str], target: str | os.PathLike[str], progress: Callable[[int], None] | None = None
) -> CopyResult:
    """Copy a checkpoint, or a run directory with all its contents.

    Training may continue in the run. A checkpoint whose refinement is dropped meanwhile is copied without it, and a
    checkpoint that is removed is left out.

    Args:
        source: a checkpoint or run directory.
        target: the directory to create.
        progress: called with the number of bytes of each write.

    Raises:
        CheckpointExists: `target` exists.
        CheckpointNotFound: `source` is no directory.
        CorruptCheckpoint: a file does not match its manifest; no copy is made.
        SaveFailed: `target` is inside `source`.
    """
    origin, goal = resolve_checkpoint_path(source), resolve_checkpoint_path(target)
    if is_remote(origin) or is_remote(goal):
        return _copy_remote(origin, goal, progress)
    if not origin.is_dir():
        raise CheckpointNotFound(f"'{origin}' is not a directory; name a checkpoint or a run directory")
    if os.path.lexists(goal):
        raise CheckpointExists(f"'{goal}' exists; name the directory that is to be made")
    if goal.parent.resolve().is_relative_to(origin.resolve()):
        raise SaveFailed(f"'{goal}' lies in '{origin}', which is to be copied; copy it to somewhere else")
    if has_held_files(origin):
        return _copy_remote(origin, goal, progress)
    with create_directory(goal) as hidden:
        work = _LocalCopy(origin, progress)
        work.copy_directory(origin, hidden)
    return CopyResult(goal, work.checkpoints, work.files, work.bytes, work.links, work.left_out, work.removed)


def _copy_remote(origin: Path, goal: Path, progress: Callable[[int], None] | None) -> CopyResult:
    work = RemoteCopy(origin, progress)
    work.run(goal)
    return CopyResult(goal, work.checkpoints, work.files, work.bytes, work.links, work.left_out, work.removed)


def compute_copy_size(source: Path) -> int:
    """Return the bytes of all files below a directory, each counted once if it has several hard links."""
    if is_remote(source):
        return remote_copy.compute_copy_size(source)
    sizes = {}
    for directory, _, names in os.walk(source):
        for name in names:
            with suppress(FileNotFoundError):  # removed meanwhile
                status = os.lstat(os.path.join(directory, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


class _LocalCopy:
    """Copy in progress, with the files written so far by inode of the original."""

    def __init__(self, origin: Path, progress: Callable[[int], None] | None) -> None:
        self.checkpoints = self.files = self.bytes = self.links = 0
        self.left_out: dict[Path, str] = {}
        self.removed: list[Path] = []
        self._origin, self._progress = origin, progress
        self._written: dict[tuple[int, int], tuple[Path, int, str]] = {}

    def copy_directory(self, source: Path, target: Path) -> None:
        target.mkdir()
        manifest = self._copy_checkpoint(source, target) if is_complete(source) else None
        names = {MANIFEST, *(file.name for file in manifest.files)} if manifest else set()
        for name in POINTERS:  # before the directory is listed, since training may continue
            if (source / name).is_file() and not (source / name).is_symlink() and name not in names:
                self._copy_file(source / name, target / name, None)
                names.add(name)
        backups = {} if manifest else find_replaced_plain(source)  # of a tag that an incomplete save was replacing
        for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
            path, goal = Path(entry.path), target / entry.name
            if entry.name in names or is_dsq_file(entry.name):  # an unlisted dsq file is garbage
                continue
            if is_hidden(entry.name):
                self.left_out[path] = "of a save, a copy or an export that did not complete"
            elif entry.is_symlink():
                os.symlink(os.readlink(path), goal)
            elif entry.is_dir():
                self._copy_subdirectory(path, goal)
            elif entry.is_file():
                self._copy_file(backups.get(entry.name, path), goal, None)
            else:
                self.left_out[path] = "neither a file nor a directory"
        shutil.copystat(source, target)
        sync_directory(target)

    def _copy_subdirectory(self, source: Path, target: Path) -> None:
        """Copy a directory of a run, unless it is removed meanwhile."""
        before = self.checkpoints, self.files, self.bytes, self.links, dict(self.left_out), len(self.removed)
        manifest, complete = None, False
        try:
            complete = is_complete(source)
            if complete:
                manifest = Manifest.read(source)
            elif _has_only_leftovers(source):
                self.left_out[source] = "of a save that did not complete"
                return
            self.copy_directory(source, target)
            if complete and not (target / MANIFEST).exists():
                Manifest.read(source)  # raises, since it was removed before it was copied
        except (OSError, DSQError):
            if not _is_removed(source, complete, manifest):
                raise
            shutil.rmtree(target, ignore_errors=True)
            self.checkpoints, self.files, self.bytes, self.links, self.left_out, removed = before
            del self.removed[removed:]
            self.removed.append(source)

    def _copy_checkpoint(self, source: Path, target: Path) -> Manifest:
        """Copy the files of a checkpoint. Start over if the manifest is replaced meanwhile."""
        for attempt in range(_MAX_ATTEMPTS):
            text = (source / MANIFEST).read_bytes()
            (target / MANIFEST).write_bytes(text)
            manifest = Manifest.read(target)
            try:
                for file in manifest.files:
                    if not (target / file.name).exists():
                        self._copy_file(source / file.name, target / file.name, file)
            except (OSError, CorruptCheckpoint):
                if attempt + 1 < _MAX_ATTEMPTS and (source / MANIFEST).read_bytes() != text:
                    continue
                raise
            break
        named = {MANIFEST, *(file.name for file in manifest.files)}
        for entry in os.listdir(target):
            if entry not in named:  # listed by the replaced manifest
                (target / entry).unlink()
        with open(target / MANIFEST, "rb") as stream:
            flush(stream, True)
        shutil.copystat(source / MANIFEST, target / MANIFEST)
        self.files, self.bytes = self.files + 1, self.bytes + len(text)
        self.checkpoints += 1
        return manifest

    def _copy_file(self, source: Path, target: Path, expected: ManifestFile | None) -> None:
        """Copy a file, or link it to its copy under another name, and compare it with its entry in the manifest."""
        with open(source, "rb") as stream:
            status = os.fstat(stream.fileno())
            copied = self._written.get((status.st_dev, status.st_ino))
            if copied is not None and _try_link(copied[0], target):
                self.links += 1
            else:
                copied = self._written[status.st_dev, status.st_ino] = (target, *self._copy_bytes(stream, target))
                shutil.copystat(source, target)
                self.files += 1
        _, size, checksum = copied
        if expected is not None and (size, checksum) != (expected.size, expected.checksum):
            raise CorruptCheckpoint(
                f"'{source}' has {size} bytes with checksum {checksum}, its manifest says {expected.size} with "
                f"{expected.checksum}: it was altered; nothing was copied"
            )

    def _copy_bytes(self, stream: IO[bytes], target: Path) -> tuple[int, str]:
        hashed, size = xxhash.xxh3_64(), 0
        with open(target, "xb") as out:
            while piece := _read_piece(stream):
                hashed.update(piece)
                size += out.write(piece)
                if self._progress is not None:
                    self._progress(len(piece))
            flush(out, True)
        self.bytes += size
        return size, hashed.hexdigest()


def _read_piece(stream: IO[bytes]) -> bytes:
    with add_path_to_errors(Path(stream.name), "while it was read"):
        return stream.read(_PIECE)


def _try_link(source: Path, target: Path) -> bool:
    """Create a hard link. Return False if the file system has none, or no more for this file."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _is_removed(directory: Path, complete: bool, manifest: Manifest | None) -> bool:
    """Return whether a directory that could not be copied, or the checkpoint in it, was removed."""
    if not complete:
        return not os.path.lexists(directory)
    save_id = None if manifest is None else manifest.save_id
    return detect_change(directory, save_id, manifest, time.monotonic() + REMOVAL_TIMEOUT) == "removed"


def _has_only_leftovers(directory: Path) -> bool:
    """Return whether a directory has nothing but the files of an incomplete save."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise DSQError(f"'{directory}' cannot be read: {error.strerror}") from error
    return bool(names) and MANIFEST not in names and all(map(is_dsq_file, names))
