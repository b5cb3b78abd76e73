"""Copy of checkpoints and runs between a disk and object stores, or between object stores.

The checksum of every file is verified during the copy. A shared file is copied once: on a disk other checkpoints get
hard links to it, on an object store their manifests name the checkpoint that holds it. A copy on a disk appears
complete or not at all; to an object store checkpoints are copied one by one, oldest first, each with its manifest last.
Files of other programs in a run or its checkpoints are copied, too, and those that name a checkpoint last.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import CheckpointExists, CheckpointNotFound, CorruptCheckpoint, DSQError, SaveFailed
from dsq_ckpt.storage.atomic_io import create_directory, is_hidden
from dsq_ckpt.storage.backend import DirectoryEntry, get_storage
from dsq_ckpt.storage.concurrent_changes import REMOVAL_TIMEOUT, detect_change
from dsq_ckpt.storage.gc import is_dsq_file
from dsq_ckpt.storage.links import copy_between_storages, link_or_copy
from dsq_ckpt.storage.manifest import MANIFEST, REFINEMENT_ROLES, Manifest, ManifestFile, is_complete, iter_checkpoints
from dsq_ckpt.storage.references import remove_files

POINTERS = ("latest", "latest_universal")
"""DeepSpeed's files in a run that contain the name of the checkpoint to load."""
_MAX_ATTEMPTS = 3
_LONGEST_NAME = 4096


class RemoteCopy:
    """Copy of a checkpoint, or of a run with its checkpoints and other files.

    Args:
        origin: a checkpoint or a run.
        progress: called with the number of bytes of each write.

    Attributes:
        checkpoints: number of checkpoints in the copy.
        files: number of files written.
        bytes: bytes of the files written.
        links: number of links or references to files that were written already.
        left_out: paths that were not copied, with the reason.
        removed: checkpoints and files that were removed meanwhile.
    """

    def __init__(self, origin: Path, progress: Callable[[int], None] | None) -> None:
        self.checkpoints = self.files = self.bytes = self.links = 0
        self.left_out: dict[Path, str] = {}
        self.removed: list[Path] = []
        self._origin, self._progress = origin, progress
        self._written: dict[tuple[str, str], Path] = {}
        """Path of each file in the copy, by name and checksum; the name of a data file has its save id."""
        self._made: list[Path] = []
        self._committed: list[Path] = []

    def run(self, goal: Path) -> None:
        """Copy to `goal`.

        Raises:
            CheckpointExists: `goal` exists.
            CheckpointNotFound: there is no complete checkpoint, or all were removed meanwhile.
            CorruptCheckpoint: a manifest is unreadable, or a file does not match its manifest; no copy is made.
            SaveFailed: `goal` is inside the source.
            OSError: a file cannot be read or written; no copy is made.
        """
        if goal.is_relative_to(self._origin):
            raise SaveFailed(f"'{goal}' lies in '{self._origin}', which is to be copied; copy it to somewhere else")
        pointers = _read_pointers(self._origin)  # before the run is listed, since training may continue
        paths = [self._origin] if is_complete(self._origin) else [path for path, _ in iter_checkpoints(self._origin)]
        if not paths:
            Manifest.read(self._origin)  # raises, with a description of the path
            raise CheckpointNotFound(f"'{self._origin}' changed while it was read; copy it again")
        with self._create_target(goal) as created:
            for path in paths:
                if path == self._origin:
                    self._copy_checkpoint(path, created)
                else:
                    self._copy_run_checkpoint(path, created / path.name)
            if not self._committed:
                raise CheckpointNotFound(f"'{self._origin}': all that was there was removed while it was copied")
            if paths != [self._origin]:
                self._copy_other_files(self._origin, created, {path.name for path in paths} | pointers.keys())
                for name, data in pointers.items():
                    self._copy_pointer(self._origin / name, created / name, data)

    @contextmanager
    def _create_target(self, goal: Path) -> Iterator[Path]:
        """Yield the path at which to create the copy, and remove the copy after an error."""
        if not is_remote(goal):
            with create_directory(goal) as hidden:
                get_storage(hidden).make_directory(hidden, True)
                yield hidden
            return
        if get_storage(goal).list_entries(goal):
            raise CheckpointExists(f"'{goal}' exists; name what is to be made")
        try:
            yield goal
        except BaseException:
            with suppress(OSError, DSQError):
                remove_files(path / MANIFEST for path in self._committed)
                # Another copy to this path, which has the same names, may have committed a checkpoint meanwhile.
                needed = {path for path in {created.parent for created in self._made} if is_complete(path)}
                remove_files(path for path in self._made if path.parent not in needed)
            raise

    def _copy_run_checkpoint(self, source: Path, target: Path) -> None:
        """Copy a checkpoint of a run, unless it is removed meanwhile."""
        before, manifest = (self.files, self.bytes, self.links), None
        try:
            manifest = Manifest.read(source)
            self._copy_checkpoint(source, target)
        except (OSError, DSQError):
            save_id = None if manifest is None else manifest.save_id
            if detect_change(source, save_id, manifest, time.monotonic() + REMOVAL_TIMEOUT) != "removed":
                raise
            # Other checkpoints that need its files get their own copies.
            self._written = {key: path for key, path in self._written.items() if path.parent != target}
            remove_files(path for path in self._made if path.parent == target)
            self._made = [path for path in self._made if path.parent != target]
            if not is_remote(target):
                shutil.rmtree(target, ignore_errors=True)
            self.files, self.bytes, self.links = before
            self.left_out = {path: reason for path, reason in self.left_out.items() if path.parent != source}
            self.removed = [path for path in self.removed if path.parent != source] + [source]

    def _copy_checkpoint(self, source: Path, target: Path) -> None:
        """Copy a checkpoint. Start over if its manifest is replaced meanwhile, as when its refinement is dropped."""
        get_storage(target).make_directory(target, True)
        for attempt in range(_MAX_ATTEMPTS):
            manifest = Manifest.read(source)
            try:
                files = [self._copy_file(source, target, file) for file in manifest.files]
            except (OSError, CorruptCheckpoint):
                if attempt + 1 < _MAX_ATTEMPTS and Manifest.read(source).checksum != manifest.checksum:
                    continue
                raise
            break
        named = {target / file.name for file in files}
        unneeded = {path for path in self._made if path.parent == target} - named
        remove_files(unneeded)
        # Other checkpoints may need a dropped refinement: they get their own copies.
        self._written = {key: path for key, path in self._written.items() if path not in unneeded}
        copied = manifest.model_copy(update={"files": files})
        self._copy_other_files(source, target, _list_named_files(manifest))
        Manifest.read(source)  # raises if the checkpoint was removed, since other files may be missing then
        if is_complete(target):  # of equal bytes, which a store cannot distinguish from a repeated request
            raise CheckpointExists(f"another copy to '{target}' was completed while this one was made; it stays")
        copied.write(target, exclusive=True, fsync=True)
        self._committed.append(target)
        self.checkpoints += 1
        self.files += 1

    def _copy_other_files(self, source: Path, target: Path, names: Collection[str]) -> None:
        """Copy the files of other programs directly in a directory, such as settings."""
        for entry in _list_other_entries(source, names):
            path = source / entry.name
            if is_hidden(entry.name):
                self.left_out[path] = "of a save, a copy or an export that did not complete"
            elif entry.is_directory:
                self.left_out[path] = "a directory that is no complete checkpoint"
            elif not is_remote(path) and not path.is_file():
                self.left_out[path] = "neither a file nor a directory"
            else:
                self._made.append(target / entry.name)
                try:
                    self.bytes += copy_between_storages(path, target / entry.name, None, self._progress)
                except FileNotFoundError:
                    if not _is_gone(path):
                        raise
                    self.removed.append(path)
                else:
                    self.files += 1

    def _copy_pointer(self, source: Path, target: Path, data: bytes) -> None:
        """Copy a file that contains the name of a checkpoint, if the copy has this checkpoint."""
        name = data.decode(errors="replace").strip()
        if target.parent / name not in self._committed:
            self.left_out[source] = f"it names '{name}', which is not in the copy"
            return
        self._made.append(target)
        with get_storage(target).create(target, fsync=True) as copy:
            copy.stream.write(data)
            copy.publish()
        self.files, self.bytes = self.files + 1, self.bytes + len(data)

    def _copy_file(self, source: Path, target: Path, file: ManifestFile) -> ManifestFile:
        """Copy a file, or link or refer to its copy; return its entry in the manifest of the copy."""
        own_file = file.model_copy(update={"held_by": None})
        roles = ("own", "ancestor") if is_remote(target) else ("own", "ancestor", *REFINEMENT_ROLES)
        copied = self._written.get((file.name, file.checksum)) if file.role in roles else None
        if copied is not None and copied.parent != target and file.role == "own" and is_remote(target):
            copied = None  # two checkpoints of one save, as by a copy, each have their own files
        if copied is None or copied.parent == target:
            if copied is None:
                self._made.append(target / file.name)
                copy_between_storages(file.path_in(source), target / file.name, file, progress=self._progress)
                self._written[file.name, file.checksum] = target / file.name
                self.files, self.bytes = self.files + 1, self.bytes + file.size
            return own_file
        self.links += 1
        if is_remote(target):
            return file.model_copy(update={"held_by": copied.parent.name, "role": "ancestor"})
        link_or_copy(copied, target / file.name, True)
        return own_file


def has_held_files(origin: Path) -> bool:
    """Return whether manifests of a local checkpoint or run refer to files of others, as on an object store."""
    return any(file.held_by is not None for _, manifest in _list_checkpoints(origin) for file in manifest.files)


def compute_copy_size(origin: Path) -> int:
    """Return the total bytes of the files that a copy writes."""
    pairs = _list_checkpoints(origin)
    others = [entry for path, manifest in pairs for entry in _list_other_entries(path, _list_named_files(manifest))]
    if not is_complete(origin):
        others += _list_other_entries(origin, ())
    file_sizes = {file.name: file.size for _, manifest in pairs for file in manifest.files}
    return sum(file_sizes.values()) + sum(entry.size for entry in others if not entry.is_directory)


def _list_checkpoints(origin: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoint and its manifest, or all readable ones of a run."""
    if is_complete(origin):
        return [(origin, Manifest.read(origin))]
    return list(iter_checkpoints(origin, lambda *_: None))


def _list_named_files(manifest: Manifest) -> set[str]:
    return {MANIFEST, *(file.name for file in manifest.files)}


def _list_other_entries(directory: Path, names: Collection[str]) -> list[DirectoryEntry]:
    """Return the entries of a directory that are neither dsq files nor in `names`."""
    return [
        entry for entry in get_storage(directory).list_entries(directory)
        if entry.name not in names and not is_dsq_file(entry.name)
    ]


def _is_gone(file: Path) -> bool:
    try:
        get_storage(file).size(file)
    except FileNotFoundError:
        return True
    return False


def _read_pointers(run: Path) -> dict[str, bytes]:
    """Return the contents of a run's files that contain the name of a checkpoint."""
    pointers = {}
    for entry in get_storage(run).list_entries(run):
        if entry.name in POINTERS and not entry.is_directory and entry.size <= _LONGEST_NAME:
            with suppress(FileNotFoundError):
                pointers[entry.name] = get_storage(run).read(run / entry.name, _LONGEST_NAME)
    return pointers
