"""`History`: the checkpoints of a run, with their bytes when written and now."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dsq_ckpt.core import figures
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.core.workers import map_concurrently
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.report.gradient_log import LogSession, list_log_sessions
from dsq_ckpt.storage.atomic_io import is_hidden
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.companion_files import has_lost_manifest, list_missing_files
from dsq_ckpt.storage.description import compute_sizes, list_linked_refinement
from dsq_ckpt.storage.gc import is_dsq_file
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, is_complete, iter_checkpoints
from dsq_ckpt.storage.runs import find_run_below

CLASSES = ("weights", "moments", "everything")
_CONCURRENT_REQUESTS = 16  # to an object store
WITHOUT_MANIFEST = (
    f"there is no {MANIFEST}, beside files of Trainer or Accelerate: it was deleted, or not copied, and nothing can be "
    "resumed from here; bring it back from a copy, or delete the directory"
)


@dataclass
class ByteCounts:
    """Bytes of one class of tensors: uncompressed, written by the save, and kept on disk now."""

    logical: int = 0
    written: int = 0
    kept: int = 0

    def add(self, other: ByteCounts) -> None:
        """Add the bytes of another checkpoint."""
        self.logical += other.logical
        self.written += other.written
        self.kept += other.kept

    def as_json(self) -> dict[str, Any]:
        return {
            "bytes_logical": self.logical, "bytes_written": self.written, "bytes_kept": self.kept,
            "ratio_written": figures.quotient(self.logical, self.written),
            "ratio_kept": figures.quotient(self.logical, self.kept),
        }


@dataclass
class RunCheckpoint:
    """A checkpoint of a run.

    Attributes:
        path: directory of the checkpoint.
        manifest: manifest of the checkpoint.
        classes: bytes of weights, moments and everything (including exact tensors and overhead).
        growth: bytes of files on disk that no earlier checkpoint of the run links.
        problems: files that are missing, or whose size differs from the manifest.
    """

    path: Path
    manifest: Manifest
    classes: dict[str, ByteCounts]
    growth: int = 0
    problems: list[str] = field(default_factory=list)

    @classmethod
    def from_manifest(cls, path: Path, manifest: Manifest, overhead: int) -> RunCheckpoint:
        """Create a checkpoint from its manifest, whose file has `overhead` bytes."""
        classes = {name: ByteCounts() for name in CLASSES}
        for kind, sizes in manifest.kinds.items():
            if kind == "exact":
                continue
            size_kept = sizes.base + (sizes.refinement if manifest.refinement == "kept" else 0)
            counts = ByteCounts(sizes.logical, sizes.base + sizes.refinement, size_kept)
            classes["weights" if kind == "weights" else "moments"].add(counts)
        classes["everything"] = ByteCounts(*compute_sizes(manifest, overhead))
        return cls(path, manifest, classes)

    @property
    def created(self) -> str:
        """Local date and time of the save."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.manifest.created))

    def notes(self) -> str:
        """Return the notes of the checkpoint: uncompressed, pinned, and the number of tensors with NaN or Inf."""
        count = len(self.manifest.nonfinite)
        return ", ".join([
            *(["uncompressed"] if self.manifest.sum_bytes("attachment") and not self.manifest.kinds else []),
            *(["pinned"] if self.manifest.pinned else []), *([f"{count} NaN/Inf"] if count else []),
        ])

    def as_json(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "name": self.path.name, "save_id": manifest.save_id, "created": manifest.created,
            "keyframe": manifest.depth == 0, "depth": manifest.depth, "parent": manifest.parent,
            "seconds": manifest.seconds, "refinement": manifest.refinement, "pinned": manifest.pinned,
            "nonfinite": manifest.nonfinite, "quality": manifest.quality, "lossy_resumes": manifest.lossy_resumes,
            "classes": {name: counts.as_json() for name, counts in self.classes.items()}, "problems": self.problems,
        }


class Leftovers(NamedTuple):
    """Directories of a run that have files of dsq_ckpt, but cannot be read as checkpoints.

    Attributes:
        damaged: directories whose manifest cannot be read or was lost, and the problem.
        incomplete: directories without a manifest, with files that no checkpoint needs: a save is under way, or failed.
        removed: directories of removed checkpoints, and the number of files that other checkpoints need.
    """

    damaged: list[tuple[Path, str]]
    incomplete: list[Path]
    removed: list[tuple[Path, int]]

    def as_json(self) -> dict[str, Any]:
        return {
            "incomplete": [path.name for path in self.incomplete],
            "removed": [{"name": path.name, "files": count} for path, count in self.removed],
        }


@dataclass
class History:
    """The history of a run: its checkpoints, oldest first, and directories that cannot be read as checkpoints."""

    run: Path
    entries: list[RunCheckpoint]
    total: dict[str, ByteCounts]
    leftovers: Leftovers
    log_sessions: list[LogSession] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> History:
        """Read the history of a run directory.

        Raises:
            CheckpointNotFound: the directory has no checkpoint.
        """
        if is_complete(run):
            raise CheckpointNotFound(
                f"'{run}' is a checkpoint; name its run directory '{run.absolute().parent}', or use dsq inspect"
            )
        if not is_remote(run) and not run.is_dir():
            raise CheckpointNotFound(f"'{run}' is not a directory; name the directory that a run's checkpoints lie in")
        entries = list(_read_checkpoints(list(iter_checkpoints(run, lambda *_: None))))
        others = find_leftovers(run, {entry.path: entry.manifest for entry in entries})
        if not entries:
            hint = f"; damaged: {others.damaged[0][1]}" if others.damaged else ""
            hint += f"; '{others.incomplete[0].name}' holds a save that did not complete" if others.incomplete else ""
            hint += "" if (below := find_run_below(run)) is None else f"; directories in it do, such as '{below}'"
            raise CheckpointNotFound(f"'{run}' holds no complete checkpoint{hint}; name a run's directory")
        total = {name: ByteCounts() for name in CLASSES}
        for entry in entries:
            for name, counts in entry.classes.items():
                total[name].add(counts)
        linked = {file.name[:16] for file in list_linked_refinement([entry.manifest for entry in entries])}
        for entry in entries:
            if entry.manifest.save_id in linked:
                for kind, sizes in entry.manifest.kinds.items():
                    total["weights" if kind == "weights" else "moments"].kept += sizes.refinement
        total["everything"].kept = sum(entry.growth for entry in entries)
        return cls(run, entries, total, others, list_log_sessions(run))

    def as_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run), "checkpoints": [entry.as_json() for entry in self.entries],
            "total": {name: counts.as_json() for name, counts in self.total.items()},
            "seconds": sum(entry.manifest.seconds for entry in self.entries),
            "damaged": [{"name": path.name, "problem": problem} for path, problem in self.leftovers.damaged],
            **self.leftovers.as_json(),
            "gradient_log": [session.as_json() for session in self.log_sessions],
        }


def find_leftovers(run: Path, complete: Mapping[Path, Manifest]) -> Leftovers:
    """Return the directories of damaged, incomplete and removed checkpoints.

    Args:
        run: run directory.
        complete: manifests of complete checkpoints, by directory; these directories are skipped.
    """
    leftovers = Leftovers([], [], [])
    storage = get_storage(run)
    needed = {file.path_in(path) for path, manifest in complete.items() for file in manifest.files}
    for directory in sorted(run / entry.name for entry in storage.list_entries(run) if entry.is_directory):
        if directory in complete:
            continue
        try:
            names = {entry.name for entry in storage.list_entries(directory)}
        except PermissionError:
            continue  # lost+found and the like
        own_names = {name for name in names if is_dsq_file(name)}
        if not own_names:
            continue
        if MANIFEST not in names or is_hidden(directory.name):
            if all(directory / name in needed for name in own_names):
                leftovers.removed.append((directory, len(own_names)))
            elif has_lost_manifest(directory):
                leftovers.damaged.append((directory, WITHOUT_MANIFEST))
            else:
                leftovers.incomplete.append(directory)
            continue
        try:
            Manifest.read(directory)
        except DSQError as error:
            leftovers.damaged.append((directory, str(error)))
    return leftovers


Listing = dict[str, tuple[object, int]]
"""The files of a directory by name: the identity of the file, which all its links share, and its size in bytes."""


def _list_files(directory: Path) -> Listing:
    if is_remote(directory):
        return {
            entry.name: (directory / entry.name, entry.size)
            for entry in get_storage(directory).list_entries(directory) if not entry.is_directory
        }
    listing: Listing = {}
    try:
        with os.scandir(directory) as files:
            for file in files:
                try:
                    status = os.stat(file.path)
                except OSError:  # removed meanwhile
                    continue
                listing[file.name] = ((status.st_dev, status.st_ino), status.st_size)
    except OSError:  # the directory was removed
        pass
    return listing


def _read_checkpoints(manifests: Sequence[tuple[Path, Manifest]]) -> Iterator[RunCheckpoint]:
    """Yield the checkpoints with growth and problems of their files. Skip checkpoints that were removed meanwhile."""
    paths = [path for path, _ in manifests]
    listings = dict(zip(paths, map_concurrently(_list_files, paths, _CONCURRENT_REQUESTS), strict=True))
    counted: set[object] = set()
    for path, manifest in manifests:
        problems = _file_problems(path, manifest, listings)
        if problems:  # training may have dropped the refinement or removed the checkpoint meanwhile
            try:
                manifest = Manifest.read(path)
            except DSQError:
                continue
            listings[path] = _list_files(path)
            problems = _file_problems(path, manifest, listings)
        if MANIFEST not in listings[path]:
            continue
        entry = RunCheckpoint.from_manifest(path, manifest, listings[path][MANIFEST][1])
        entry.problems = problems
        for file in [path / MANIFEST, *(file.path_in(path) for file in manifest.files)]:
            status = listings[file.parent].get(file.name)
            if status is not None and status[0] not in counted:
                counted.add(status[0])
                entry.growth += status[1]
        yield entry


def _file_problems(path: Path, manifest: Manifest, listings: dict[Path, Listing]) -> list[str]:
    """Return the problems of a checkpoint's files, by name and size. Add listings of further directories."""
    problems = []
    for file in manifest.files:
        file_path = file.path_in(path)
        if file_path.parent not in listings:
            listings[file_path.parent] = _list_files(file_path.parent)
        status = listings[file_path.parent].get(file_path.name)
        if status is None:
            problems.append(f"lacks {file.name}")
        elif status[1] != file.size:
            problems.append(f"{file.name} has {status[1]} bytes, expected {file.size}")
    return problems + [f"lacks {name}" for name in list_missing_files(path, manifest, listings[path])]
