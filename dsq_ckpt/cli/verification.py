"""`dsq verify`: every byte of a checkpoint or a run against its checksum, and every tensor through its chain."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsq_ckpt.cli import output
from dsq_ckpt.cli.history import print_without_manifest
from dsq_ckpt.config.schema import StorageConfig
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.report.gradient_log import check
from dsq_ckpt.report.history import Leftovers, leftovers
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
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, ManifestFile, is_complete, iter_checkpoints


@dataclass
class Problem:
    """A problem, and the file or tensor that has it."""

    where: str
    problem: str


@dataclass
class Report:
    """The findings about one checkpoint."""

    path: Path
    save_id: str | None = None
    """Save id of the checkpoint that was found first; None: its manifest could not be read."""
    manifest: Manifest | None = None
    problems: list[Problem] = field(default_factory=list)
    tensors: int | None = None
    """Number of tensors and objects decoded; None: decoding was not tried."""
    decoded_by: str | None = None
    """A later checkpoint whose decoding walked the whole chain of this one."""
    meanwhile: ConcurrentChange | None = None
    """How the checkpoint went before all of it was read; nothing is known of it then."""

    @property
    def name(self) -> str:
        return self.path.absolute().name

    def as_json(self) -> dict[str, Any]:
        files = [] if self.manifest is None else self.manifest.files
        return {
            "path": str(self.path), "ok": not self.problems, "files": len(files),
            "bytes": sum(file.size for file in files), "tensors_decoded": self.tensors, "decoded_by": self.decoded_by,
            "problems": [vars(problem) for problem in self.problems], "meanwhile": self.meanwhile,
        }

    def gone(self, became: ConcurrentChange) -> None:
        """Note that the checkpoint was removed or replaced, and with it what was found."""
        self.meanwhile, self.problems, self.tensors, self.decoded_by = became, [], None, None


@dataclass
class Verification:
    """The result for a checkpoint or a run."""

    path: Path
    reports: list[Report]
    left: Leftovers
    segments: list[tuple[str, int, str | None]] = field(default_factory=list)
    """Of a run's gradient log: name, bytes, and what is wrong."""

    @property
    def damaged_segments(self) -> list[tuple[str, str]]:
        return [(name, problem) for name, _, problem in self.segments if problem is not None]

    @property
    def damaged(self) -> list[Report]:
        return [report for report in self.reports if report.problems]

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path), "ok": not (self.damaged or self.damaged_segments),
            "checkpoints": [report.as_json() for report in self.reports],
            **self.left.as_json(),
            "gradient_log": [
                {"name": name, "bytes": size, "problem": problem} for name, size, problem in self.segments
            ],
        }

    def print(self) -> None:
        """Print tables."""
        screen = output.console()
        rows = output.table("<checkpoint", "files", "size", "<result", "<decoded")
        for report in self.reports:
            files = [] if report.manifest is None else report.manifest.files
            decoded = "-" if report.decoded_by is None else f"with {report.decoded_by}"
            if report.tensors is not None:
                decoded = f"{report.tensors} tensors and objects"
            result = "ok" if report.meanwhile is None else f"{report.meanwhile} meanwhile"
            if report.problems:
                result = f"{len(report.problems)} problem{'s' if len(report.problems) > 1 else ''}"
            rows.add_row(
                report.name, str(len(files)), output.size(sum(file.size for file in files)), result, decoded
            )
        screen.print(rows)
        for report in self.damaged:  # lines and not a table: paths in three columns would be cut to pieces
            screen.print(f"\n{report.name}:", soft_wrap=True)
            for problem in report.problems[:_SHOWN]:
                screen.print(f"  {problem.where}: {problem.problem}", soft_wrap=True)
            if len(report.problems) > _SHOWN:
                screen.print(f"  ... and {len(report.problems) - _SHOWN} more; --json lists them all")
        if self.segments:
            wrong, total = self.damaged_segments, sum(size for _, size, _ in self.segments)
            result = f"{len(wrong)} damaged" if wrong else "ok"
            screen.print(f"\ngradient log: {len(self.segments)} segment(s), {output.size(total)}: {result}")
            for _, text in wrong[:_SHOWN]:
                screen.print(f"  {text}", soft_wrap=True)
            if wrong:
                screen.print("  Recovery from a snapshot before these steps ends there; later snapshots remove them.")
        print_without_manifest(self.left)


_SHOWN = 8
_ATTEMPTS = 3


def verify(path: Path, deep: bool, quiet: bool = False) -> Verification:
    """Check a checkpoint or all checkpoints of a run.

    Each file is read once, into however many checkpoints it is linked. Decoding a checkpoint walks its chain, so in a
    run the checkpoints that others are coded against are decoded with the last of them. Training may go on: what it
    removes or replaces meanwhile is not damaged.

    Args:
        path: a checkpoint or run directory.
        deep: decode tensors too.
        quiet: show no progress.

    Raises:
        CheckpointNotFound: there is none, or none is left.
    """
    reports: list[Report] = []
    left = Leftovers([], [], [])
    segments: list[tuple[str, int, str | None]] = []
    if is_complete(path):
        reports = [Report(path, Manifest.read(path).save_id)]
    else:
        complete = dict(iter_checkpoints(path, lambda *_: None))
        reports = [Report(directory, manifest.save_id) for directory, manifest in complete.items()]
        if is_remote(path) or path.is_dir():
            left = leftovers(path, complete)
            segments = [] if is_remote(path) else check(path, deep)
            reports += [Report(entry, problems=[Problem(MANIFEST, text)]) for entry, text in left.damaged]
        if not reports:
            Manifest.read(path)  # raises, and says what is there instead
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
        _compare_with_present(reports)
        gone = {report.name for report in reports if report.meanwhile is not None}
        waiting = [(report, manifest) for report, manifest in readable if report.decoded_by in gone]
        if not waiting:
            break
    if not segments and all(report.meanwhile is not None for report in reports):
        how = " or ".join(sorted({str(report.meanwhile) for report in reports}))
        raise CheckpointNotFound(f"'{path}': all that was there was {how} while it was being read; verify again")
    return Verification(path, reports, left, segments)


def _read_manifest(report: Report) -> None:
    try:
        report.manifest = Manifest.read(report.path)
        report.save_id = report.manifest.save_id
    except DSQError as error:
        report.problems.append(Problem(MANIFEST, str(error)))


def _check_files(reports: list[tuple[Report, Manifest]], quiet: bool) -> None:
    known: dict[object, tuple[int, str]] = {}
    total = sum({file.name: file.size for _, manifest in reports for file in manifest.files}.values())
    with output.meter("checksums", total, hidden=quiet) as meter:
        for report, manifest in reports:
            for file in manifest.files:
                problem = _check_file(file.path_in(report.path), file, known, meter)
                if problem is not None and not _dropped_meanwhile(report.path, file):
                    report.problems.append(Problem(file.name, problem))
            entries = get_storage(report.path).list_entries(report.path) if manifest.beside else ()
            there = {entry.name for entry in entries}
            report.problems += [
                Problem(name, "is missing: it was saved with the checkpoint, which may not be resumed from without it")
                for name in list_missing_files(report.path, manifest, there)
            ]


def _check_file(
    path: Path, file: ManifestFile, known: dict[object, tuple[int, str]], meter: output.Meter
) -> str | None:
    """Return the problem of a file, if any; `known` holds sizes and checksums by inode or URL."""
    try:
        inode: object = path
        if not is_remote(path):
            status = os.stat(path)
            inode = (status.st_dev, status.st_ino)
        if inode not in known:
            known[inode] = checksum_file(path)
            meter.advance(file.size)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    size, checksum = known[inode]
    if size != file.size:
        return f"has {size} bytes, expected {file.size}"
    if checksum != file.checksum:
        return f"has checksum {checksum}, expected {file.checksum}"
    return None


def _dropped_meanwhile(path: Path, file: ManifestFile) -> bool:
    """Return whether training committed a newer checkpoint meanwhile and dropped this refinement."""
    try:
        return file.role == "refinement" and Manifest.read(path).refinement == "dropped"
    except DSQError:
        return False


def _compare_with_present(reports: list[Report]) -> None:
    """Take back what was found of checkpoints that are not there any more, and look for what others need of them."""
    deadline = time.monotonic() + REMOVAL_TIMEOUT
    for report in reports:
        if report.problems and report.meanwhile is None:
            if report.save_id is None and _without_manifest(report.path, deadline):
                continue
            found = detect_change(report.path, report.save_id, report.manifest, deadline)
            if found is not None:
                report.gone(found)
    for report in reports:
        if report.manifest is not None and not report.problems and report.meanwhile is None:
            lost = find_missing_files(report.path, report.manifest, of_others=True)
            if lost and detect_change(report.path, report.save_id) is None:
                report.problems += [Problem(name, "was removed with the checkpoint that it lay in") for name in lost]


def _without_manifest(path: Path, deadline: float) -> bool:
    """Return whether a checkpoint has lost its manifest alone; one that is being removed is given time to go."""
    while (lost := path.is_dir() and has_lost_manifest(path)) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
    return lost


def _decode(reports: list[tuple[Report, Manifest]], quiet: bool) -> None:
    chosen = _decoded_themselves(reports)
    total = sum(sizes.logical for _, manifest in chosen for sizes in manifest.kinds.values())
    storage = StorageConfig()
    with (
        Workers(storage.thread_count(), storage.block_elements) as workers,
        output.meter("decoding", total, hidden=quiet) as meter,
    ):
        for report, _ in chosen:
            report.problems += _decode_present(report, workers, meter)


def _decoded_themselves(reports: list[tuple[Report, Manifest]]) -> list[tuple[Report, Manifest]]:
    """Return checkpoints that are to be decoded; note at the others which of these they are decoded with."""
    chosen = []
    for place, (report, manifest) in enumerate(reports):
        report.decoded_by = None
        own = {file.name for file in manifest.files if file.role == "own"}
        for later, other in reversed(reports[place + 1 :]):
            if own <= {file.name for file in other.files if file.role == "ancestor"}:
                report.decoded_by = later.name
                break
        if report.decoded_by is None or manifest.refinement == "kept":
            report.decoded_by = None
            chosen.append((report, manifest))
    return chosen


def _decode_present(report: Report, workers: Workers, meter: output.Meter) -> list[Problem]:
    """Decode a checkpoint; begin again if its manifest was rewritten meanwhile, as when its refinement goes."""
    problems: list[Problem] = []
    for _ in range(_ATTEMPTS):
        began = None
        try:
            with Checkpoint(report.path) as checkpoint:
                began = checkpoint.manifest.checksum
                problems = _decode_checkpoint(report, checkpoint, workers, meter)
        except Exception as error:  # whatever it is, this checkpoint does not load, and the others are looked at
            problems = [Problem("index", str(error) or repr(error))]
        if not problems or began is None or not _rewritten(report.path, began):
            break
    return problems


def _rewritten(path: Path, checksum: str) -> bool:
    try:
        return Manifest.read(path).checksum != checksum
    except DSQError:
        return False


def _decode_checkpoint(
    report: Report, checkpoint: Checkpoint, workers: Workers, meter: output.Meter
) -> list[Problem]:
    """Decode everything; a tensor that raises, whatever it raises, is a tensor that cannot be loaded."""
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
