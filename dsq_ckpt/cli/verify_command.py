"""`dsq verify`: verification of the checksums of all files, and decoding of every tensor along its chain."""

from __future__ import annotations

import itertools
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsq_ckpt.cli import output
from dsq_ckpt.cli.log_command import print_without_manifest
from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.report.gradient_log import check_segments
from dsq_ckpt.report.history import Leftovers, find_leftovers
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.companion_files import has_lost_manifest, list_missing_files
from dsq_ckpt.storage.concurrent_changes import (
    POLL_INTERVAL,
    REMOVAL_TIMEOUT,
    ConcurrentChange,
    detect_change,
    find_missing_files,
)
from dsq_ckpt.storage.container import checksum_file
from dsq_ckpt.storage.manifest import MANIFEST, REFINEMENT_ROLES, Manifest, ManifestFile, is_complete, iter_checkpoints


@dataclass
class Problem:
    """A problem of a file or tensor."""

    where: str
    problem: str


@dataclass
class CheckpointReport:
    """The result for one checkpoint."""

    path: Path
    save_id: str | None = None
    """Save id of the checkpoint when it was first seen; None if its manifest could not be read."""
    manifest: Manifest | None = None
    problems: list[Problem] = field(default_factory=list)
    tensors: int | None = None
    """Number of decoded tensors and objects; None if decoding was not tried."""
    decoded_by: str | None = None
    """Name of a later checkpoint whose chain contains all of this checkpoint, and was decoded; None without one."""
    change: ConcurrentChange | None = None
    """Change that made the checkpoint disappear during verification, so that nothing is known about it; or None."""

    @property
    def name(self) -> str:
        return self.path.absolute().name

    def as_json(self) -> dict[str, Any]:
        files = [] if self.manifest is None else self.manifest.files
        return {
            "path": str(self.path), "ok": not self.problems, "files": len(files),
            "bytes": sum(file.size for file in files), "tensors_decoded": self.tensors, "decoded_by": self.decoded_by,
            "problems": [vars(problem) for problem in self.problems], "meanwhile": self.change,
        }

    def mark_as_gone(self, change: ConcurrentChange) -> None:
        """Record that the checkpoint was removed or replaced, and discard its other results."""
        self.change, self.problems, self.tensors, self.decoded_by = change, [], None, None


@dataclass
class Verification:
    """The result for a checkpoint or a run."""

    path: Path
    reports: list[CheckpointReport]
    leftovers: Leftovers
    segments: list[tuple[str, int, str | None]] = field(default_factory=list)
    """Segments of a run's gradient log: name, bytes, and problem."""

    @property
    def damaged_segments(self) -> list[tuple[str, str]]:
        return [(name, problem) for name, _, problem in self.segments if problem is not None]

    @property
    def damaged(self) -> list[CheckpointReport]:
        return [report for report in self.reports if report.problems]

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path), "ok": not (self.damaged or self.damaged_segments),
            "checkpoints": [report.as_json() for report in self.reports],
            **self.leftovers.as_json(),
            "gradient_log": [
                {"name": name, "bytes": size, "problem": problem} for name, size, problem in self.segments
            ],
        }

    def print(self) -> None:
        """Print the result as tables."""
        screen = output.console()
        rows = output.table("<checkpoint", "files", "size", "<result", "<decoded")
        for report in self.reports:
            files = [] if report.manifest is None else report.manifest.files
            decoded = "-" if report.decoded_by is None else f"with {report.decoded_by}"
            if report.tensors is not None:
                decoded = f"{report.tensors} tensors and objects"
            result = "ok" if report.change is None else f"{report.change} meanwhile"
            if report.problems:
                result = f"{len(report.problems)} problem{'s' if len(report.problems) > 1 else ''}"
            rows.add_row(
                report.name, str(len(files)), output.size(sum(file.size for file in files)), result, decoded
            )
        screen.print(rows)
        for problems, group in itertools.groupby(self.reports, _problems_by_place):
            if not problems:
                continue
            first, *others = group  # as of a chain, whose keyframe is damaged
            names = ", ".join(report.name for report in (first, *others))
            if len(others) > 2:
                names = f"{first.name} to {others[-1].name} ({1 + len(others)} checkpoints)"
            screen.print(f"\n{names}:", soft_wrap=True)
            for problem in first.problems[:_MAX_SHOWN]:  # lines, since a table of three columns would break paths
                screen.print(f"  {problem.where}: {problem.problem}", soft_wrap=True)
            if len(first.problems) > _MAX_SHOWN:
                screen.print(f"  ... and {len(first.problems) - _MAX_SHOWN} more; --json lists them all")
        if self.segments:
            wrong, total = self.damaged_segments, sum(size for _, size, _ in self.segments)
            result = f"{len(wrong)} damaged" if wrong else "ok"
            screen.print(f"\ngradient log: {len(self.segments)} segment(s), {output.size(total)}: {result}")
            for _, text in wrong[:_MAX_SHOWN]:
                screen.print(f"  {text}", soft_wrap=True)
            if wrong:
                screen.print("  Recovery from a snapshot before these steps ends there; later snapshots remove them.")
        print_without_manifest(self.leftovers)


_MAX_SHOWN = 8
_ATTEMPTS = 3


def _problems_by_place(report: CheckpointReport) -> list[tuple[str, str]]:
    """Return problems without the checkpoint's path, which are the same for all checkpoints that link a file."""
    path = re.compile(rf"(?<='){re.escape(str(report.path))}(?=['/])")  # in quotes: `5` is also a part of a checksum
    return [(problem.where, path.sub("", problem.problem)) for problem in report.problems]


def verify(path: Path, deep: bool, quiet: bool = False) -> Verification:
    """Check a checkpoint or all checkpoints of a run.

    Each file is read once, even if it is linked into several checkpoints. Decoding a checkpoint walks its chain, so
    parents are decoded with the last checkpoint of their chain. Training may continue meanwhile. A checkpoint that
    training removes or replaces does not count as damaged.

    Args:
        path: a checkpoint or run directory.
        deep: also decode tensors.
        quiet: show no progress.

    Raises:
        CheckpointNotFound: there is no checkpoint, or all were removed meanwhile.
    """
    reports: list[CheckpointReport] = []
    unreadable = Leftovers([], [], [])
    segments: list[tuple[str, int, str | None]] = []
    if is_complete(path):
        reports = [CheckpointReport(path, Manifest.read(path).save_id)]
    else:
        complete = dict(iter_checkpoints(path, lambda *_: None))
        reports = [CheckpointReport(directory, manifest.save_id) for directory, manifest in complete.items()]
        if is_remote(path) or path.is_dir():
            unreadable = find_leftovers(path, complete)
            segments = [] if is_remote(path) else check_segments(path, deep)
            damaged = unreadable.damaged
            reports += [CheckpointReport(entry, problems=[Problem(MANIFEST, text)]) for entry, text in damaged]
        if not reports:
            Manifest.read(path)  # raises an error that describes the path
            raise CheckpointNotFound(f"'{path}' changed while it was being read; verify again")
    for report in reports:
        if not report.problems:
            _read_manifest(report)
    readable = [(report, report.manifest) for report in reports if report.manifest is not None]
    _check_files(readable, quiet)
    waiting = readable
    while True:
        if deep:
            _decode(waiting, quiet)
        _recheck_checkpoints(reports)
        gone = {report.name for report in reports if report.change is not None}
        waiting = [(report, manifest) for report, manifest in readable if report.decoded_by in gone]
        if not waiting:
            break
    if not segments and all(report.change is not None for report in reports):
        changes = " or ".join(sorted({str(report.change) for report in reports}))
        raise CheckpointNotFound(f"'{path}': all that was there was {changes} while it was being read; verify again")
    return Verification(path, reports, unreadable, segments)


def _read_manifest(report: CheckpointReport) -> None:
    try:
        report.manifest = Manifest.read(report.path)
        report.save_id = report.manifest.save_id
    except DSQError as error:
        report.problems.append(Problem(MANIFEST, str(error)))


def _check_files(reports: list[tuple[CheckpointReport, Manifest]], quiet: bool) -> None:
    checked: dict[object, tuple[int, str]] = {}
    total = sum({file.name: file.size for _, manifest in reports for file in manifest.files}.values())
    with output.meter("checksums", total, hidden=quiet) as meter:
        for report, manifest in reports:
            for file in manifest.files:
                problem = _check_file(file.path_in(report.path), file, checked, meter)
                if problem is not None and not _is_dropped_refinement(report.path, file):
                    report.problems.append(Problem(file.name, problem))
            entries = get_storage(report.path).list_entries(report.path) if manifest.beside else ()
            names = {entry.name for entry in entries}
            report.problems += [
                Problem(name, "is missing: it was saved with the checkpoint, which may not be resumed from without it")
                for name in list_missing_files(report.path, manifest, names)
            ]


def _check_file(
    path: Path, file: ManifestFile, checked: dict[object, tuple[int, str]], meter: output.Meter
) -> str | None:
    """Return the problem of a file, or None. `checked` caches sizes and checksums by inode or URL."""
    try:
        inode: object = path
        if not is_remote(path):
            status = os.stat(path)
            inode = (status.st_dev, status.st_ino)
        if inode not in checked:
            checked[inode] = checksum_file(path)
            meter.advance(file.size)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    size, checksum = checked[inode]
    if size != file.size:
        return f"has {size} bytes, expected {file.size}"
    if checksum != file.checksum:
        return f"has checksum {checksum}, expected {file.checksum}"
    return None


def _is_dropped_refinement(path: Path, file: ManifestFile) -> bool:
    """Return whether training has committed a newer checkpoint meanwhile, and dropped this refinement."""
    try:
        return file.role in REFINEMENT_ROLES and Manifest.read(path).refinement == "dropped"
    except DSQError:
        return False


def _recheck_checkpoints(reports: list[CheckpointReport]) -> None:
    """Mark checkpoints that disappeared meanwhile, and report files of theirs that other checkpoints need."""
    deadline = time.monotonic() + REMOVAL_TIMEOUT
    for report in reports:
        if report.problems and report.change is None:
            if report.save_id is None and _stays_without_manifest(report.path, deadline):
                continue
            change = detect_change(report.path, report.save_id, report.manifest, deadline)
            if change is not None:
                report.mark_as_gone(change)
    for report in reports:
        if report.manifest is not None and not report.problems and report.change is None:
            missing = find_missing_files(report.path, report.manifest, of_others=True)
            if missing and detect_change(report.path, report.save_id) is None:
                report.problems += [Problem(name, "was removed with the checkpoint that it lay in") for name in missing]


def _stays_without_manifest(path: Path, deadline: float) -> bool:
    """Return whether a checkpoint has lost only its manifest. Wait for a removal to finish, until the deadline."""
    while (lost := path.is_dir() and has_lost_manifest(path)) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
    return lost


def _decode(reports: list[tuple[CheckpointReport, Manifest]], quiet: bool) -> None:
    chosen = _choose_decoded(reports)
    total = sum(sizes.logical for _, manifest in chosen for sizes in manifest.kinds.values())
    storage = StorageConfig()
    with (
        Workers(storage.thread_count(), storage.block_elements) as workers,
        output.meter("decoding", total, hidden=quiet) as meter,
    ):
        for report, _ in chosen:
            report.problems += _decode_with_retries(report, workers, meter)


def _choose_decoded(reports: list[tuple[CheckpointReport, Manifest]]) -> list[tuple[CheckpointReport, Manifest]]:
    """Return the checkpoints to decode, and set `decoded_by` of the others."""
    chosen = []
    for index, (report, manifest) in enumerate(reports):
        report.decoded_by = None
        own_files = {file.name for file in manifest.files if file.role == "own"}
        for later, later_manifest in reversed(reports[index + 1 :]):
            if own_files <= {file.name for file in later_manifest.files if file.role == "ancestor"}:
                report.decoded_by = later.name
                break
        if report.decoded_by is None or manifest.refinement == "kept":
            report.decoded_by = None
            chosen.append((report, manifest))
    return chosen


def _decode_with_retries(report: CheckpointReport, workers: Workers, meter: output.Meter) -> list[Problem]:
    """Decode a checkpoint. Retry if its manifest was rewritten meanwhile, as when its refinement was dropped."""
    problems: list[Problem] = []
    for _ in range(_ATTEMPTS):
        checksum = None
        try:
            with Checkpoint(report.path) as checkpoint:
                checksum = checkpoint.manifest.checksum
                problems = _decode_checkpoint(report, checkpoint, workers, meter)
        except Exception as error:  # any error means that this checkpoint does not load; others are still verified
            problems = [Problem("index", str(error) or repr(error))]
        if not problems or checksum is None or not _is_rewritten(report.path, checksum):
            break
    return problems


def _is_rewritten(path: Path, checksum: str) -> bool:
    try:
        return Manifest.read(path).checksum != checksum
    except DSQError:
        return False


def _decode_checkpoint(
    report: CheckpointReport, checkpoint: Checkpoint, workers: Workers, meter: output.Meter
) -> list[Problem]:
    """Decode all tensors and objects; return a problem for each that raises an error of any type."""
    report.tensors = 0
    with checkpoint.translate_errors():
        sizes = {fqn: [0, tensor["shape"]] for fqn, tensor in checkpoint.index["tensors"].items()}
        failed: dict[str, str] = {}
        for key, ref in checkpoint.iter_chunks():
            try:
                with checkpoint.translate_errors():
                    checkpoint.read_record(ref, key.fqn, key.offsets)
                    tensor = checkpoint.decode_tensor(ref, checkpoint.has_refinement, workers)
                sizes[key.fqn][0] += tensor.numel()
                meter.advance(tensor.nbytes)
            except Exception as error:
                failed.setdefault(key.fqn, str(error) or repr(error))
        for fqn in checkpoint.index["objects"]:
            try:
                with checkpoint.translate_errors():
                    checkpoint.read_object(checkpoint.find_record(fqn, None))
            except Exception as error:
                failed[fqn] = str(error) or repr(error)
        for fqn, (elements, shape) in sizes.items():
            expected = 1
            for length in shape:
                expected *= length
            if fqn not in failed and elements != expected:
                failed[fqn] = f"chunks hold {elements} elements, expected {expected}"
        report.tensors = len(sizes) + len(checkpoint.index["objects"]) - len(failed)
        return [Problem(fqn, problem) for fqn, problem in failed.items()]
