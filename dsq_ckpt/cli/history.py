"""`dsq log`: the checkpoints of a run, with their bytes when they were written and now."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsq_ckpt.cli import output
from dsq_ckpt.cli.gradients import LogSession, sessions, show
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.storage.atomic_io import is_hidden
from dsq_ckpt.storage.backend import storage_of
from dsq_ckpt.storage.description import describe
from dsq_ckpt.storage.gc import is_ours
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, checkpoints, is_complete

VARIANT = "variant"  # as in search.space, which would import torch
CLASSES = ("weights", "moments", "everything")


@dataclass
class Bytes:
    """One class of tensors: uncompressed, written by the save, on disk now."""

    logical: int = 0
    written: int = 0
    kept: int = 0

    def add(self, other: Bytes) -> None:
        """Sum over checkpoints."""
        self.logical += other.logical
        self.written += other.written
        self.kept += other.kept

    def as_json(self) -> dict[str, Any]:
        return {
            "bytes_logical": self.logical, "bytes_written": self.written, "bytes_kept": self.kept,
            "ratio_written": output.quotient(self.logical, self.written),
            "ratio_kept": output.quotient(self.logical, self.kept),
        }


@dataclass
class RunCheckpoint:
    """A checkpoint of a run; `classes` are weights, moments and everything (exact tensors and overhead included)."""

    path: Path
    manifest: Manifest
    created: str
    classes: dict[str, Bytes]

    @classmethod
    def read(cls, path: Path, manifest: Manifest) -> RunCheckpoint:
        about = describe(path)
        classes = {name: Bytes() for name in CLASSES}
        for kind, sizes in manifest.kinds.items():
            if kind == "exact":
                continue
            now = sizes.base + (sizes.refinement if manifest.refinement == "kept" else 0)
            part = Bytes(sizes.logical, sizes.base + sizes.refinement, now)
            classes["weights" if kind == "weights" else "moments"].add(part)
        classes["everything"] = Bytes(about["bytes_logical"], about["bytes_written"], about["bytes_kept"])
        return cls(path, manifest, about["created"], classes)

    def notes(self) -> str:
        """Return the notes of the checkpoint: pinned, and the number of tensors with NaN or Inf."""
        count = len(self.manifest.nonfinite)
        return ", ".join([*(["pinned"] if self.manifest.pinned else []), *([f"{count} NaN/Inf"] if count else [])])

    def as_json(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "name": self.path.name, "save_id": manifest.save_id, "created": manifest.created,
            "keyframe": manifest.depth == 0, "depth": manifest.depth, "parent": manifest.parent,
            "seconds": manifest.seconds, "refinement": manifest.refinement, "pinned": manifest.pinned,
            "nonfinite": manifest.nonfinite, "quality": manifest.quality, "lossy_resumes": manifest.lossy_resumes,
            "classes": {name: part.as_json() for name, part in self.classes.items()},
        }


@dataclass
class Search:
    """Texts for the fields of a manifest's `quality`; "-" for an absent field."""

    chosen: str
    degradation: str
    restore: str | None
    """Degradation by a restore from base and refinement layer; None if it was not measured."""
    evaluations: str
    seconds: str
    kept: bool

    @classmethod
    def of(cls, manifest: Manifest) -> Search | None:
        """Return the search that chose the configuration of a checkpoint, or None."""
        record = manifest.quality
        if not record:
            return None
        metric, loses, lost = record.get("metric"), record.get("restore_loses"), record.get("degradation")
        return cls(
            chosen=chosen_of(manifest),
            degradation="-" if lost is None else output.percent(lost),
            restore=output.percent(loses / abs(metric)) if loses is not None and metric else None,
            evaluations=str(record.get("evaluations", "-")),
            seconds="-" if record.get("seconds") is None else output.seconds(record["seconds"]),
            kept=bool(record.get("satisfied", True)),
        )


def chosen_of(manifest: Manifest) -> str:
    """Return the configuration that a search chose, such as "step 2.8, 3 bits"; the bits are of the refinement."""
    record = manifest.quality or {}
    chosen = record.get("chosen")
    if not chosen:
        return f"none: {manifest.setting('search', 'fallback') or '-'}"
    variant = str(chosen.get(VARIANT, "default"))
    bits = manifest.setting("quantize", "weights", "refinement_bits")
    return ", ".join([
        *([variant] if variant != "default" else []),
        output.settings({name: value for name, value in chosen.items() if name != VARIANT}),
        *([f"{bits} bits"] if bits else []),
    ])


@dataclass
class History:
    """A run: its checkpoints, oldest first, and directories in it that cannot be read as checkpoints."""

    run: Path
    entries: list[RunCheckpoint]
    total: dict[str, Bytes]
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    incomplete: list[Path] = field(default_factory=list)
    gradients: list[LogSession] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> History:
        """Return the history of a run directory.

        Raises:
            CheckpointNotFound: the directory holds no checkpoint.
        """
        if is_complete(run):
            raise CheckpointNotFound(
                f"'{run}' is a checkpoint; name its run directory '{run.absolute().parent}', or use dsq inspect"
            )
        if not is_remote(run) and not run.is_dir():
            raise CheckpointNotFound(f"'{run}' is not a directory; name the directory that a run's checkpoints lie in")
        entries = [RunCheckpoint.read(path, manifest) for path, manifest in checkpoints(run, lambda *_: None)]
        damaged, incomplete = leftovers(run)
        if not entries:
            found = f"; damaged: {damaged[0][1]}" if damaged else ""
            found += f"; '{incomplete[0].name}' holds a save that did not complete" if incomplete else ""
            raise CheckpointNotFound(f"'{run}' holds no complete checkpoint{found}")
        total = {name: Bytes() for name in CLASSES}
        for entry in entries:
            for name, part in entry.classes.items():
                total[name].add(part)
        total["everything"].kept = disk_use(entries)
        return cls(run, entries, total, damaged, incomplete, sessions(run))

    def as_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run), "checkpoints": [entry.as_json() for entry in self.entries],
            "total": {name: part.as_json() for name, part in self.total.items()},
            "seconds": sum(entry.manifest.seconds for entry in self.entries),
            "damaged": [{"name": path.name, "problem": problem} for path, problem in self.damaged],
            "incomplete": [path.name for path in self.incomplete],
            "gradient_log": [session.as_json() for session in self.gradients],
        }

    def print(self) -> None:
        """Print tables."""
        screen = output.console()
        wide = screen.width >= output.WIDE
        noted = any(entry.notes() for entry in self.entries)
        rows = output.table(
            "<checkpoint", *(["<saved"] if wide else []), "<coded", "written", "kept", "weights", "moments", "all",
            "took", "<refined", *(["<notes"] if noted else []),
        )
        for entry in self.entries:
            depth, everything = entry.manifest.depth, entry.classes["everything"]
            rows.add_row(
                entry.path.name, *([entry.created[5:16]] if wide else []), f"delta {depth}" if depth else "keyframe",
                output.size(everything.written), output.size(everything.kept),
                *(output.ratio(entry.classes[name].logical, entry.classes[name].kept) for name in CLASSES),
                output.seconds(entry.manifest.seconds), entry.manifest.refinement,
                *([entry.notes()] if noted else []),
            )
        screen.print(rows)
        screen.print(
            "written, kept: bytes, now without linked ancestors\n"
            "weights, moments, all: ratios of uncompressed bytes to those kept"
        )
        screen.print()
        if any(entry.manifest.quality for entry in self.entries):
            screen.print(self._searches())
            screen.print()
        count = len(self.entries)
        totals = output.table("<whole run", "bytes", "weights", "moments", "all")
        everything = self.total["everything"]
        totals.add_row("uncompressed", output.size(everything.logical))
        totals.add_row("written", output.size(everything.written), *(
            output.ratio(self.total[name].logical, self.total[name].written) for name in CLASSES
        ))
        totals.add_row("kept on disk", output.size(everything.kept), *(
            output.ratio(self.total[name].logical, self.total[name].kept) for name in CLASSES
        ))
        screen.print(totals)
        spent = output.seconds(sum(entry.manifest.seconds for entry in self.entries))
        screen.print(", ".join([f"{count} checkpoint{'s' if count > 1 else ''}", f"{spent} of saving", *self._told()]))
        if self.gradients:
            screen.print()
            show(self.gradients)
        self.print_leftovers()

    def _searches(self) -> Any:
        """Return a table of the searches, apart from the checkpoints since terminals have 80 or 100 columns."""
        found = [(entry, Search.of(entry.manifest)) for entry in self.entries]
        searches = [search for _, search in found if search is not None]
        restores = any(search.restore is not None for search in searches)
        missed = any(not search.kept for search in searches)
        rows = output.table(
            "<checkpoint", "<chosen", "base loses", *(["restore loses"] if restores else []), "evaluations", "searched",
            *(["<bound"] if missed else []),
        )
        for entry, search in found:
            if search is None:
                rows.add_row(entry.path.name, *["-"] * (len(rows.columns) - 1))
                continue
            rows.add_row(
                entry.path.name, search.chosen, search.degradation, *([search.restore or "-"] if restores else []),
                search.evaluations, search.seconds, *(["kept" if search.kept else "missed"] if missed else []),
            )
        return rows

    def _told(self) -> list[str]:
        """Return the texts about searches and restores for the line below the tables."""
        records = [entry.manifest.quality for entry in self.entries if entry.manifest.quality]
        evaluations = sum(record.get("evaluations") or 0 for record in records)
        searched = output.seconds(sum(record.get("seconds") or 0.0 for record in records))
        resumes = self.entries[-1].manifest.lossy_resumes
        return [
            *([f"{searched} of searching with {evaluations} evaluations"] if records else []),
            *([f"lossy resumes: {resumes}"] if resumes else []),
        ]

    def print_leftovers(self) -> None:
        """Print warnings about damaged and incomplete checkpoints."""
        screen = output.console()
        for path, problem in self.damaged:
            screen.print(f"damaged: {path.name}: {problem}", soft_wrap=True)
        print_incomplete(self.incomplete)


def print_incomplete(paths: list[Path]) -> None:
    """Print a line for each directory of a save without a manifest."""
    for path in paths:
        output.console().print(f"incomplete: {path.name}: a save under way, or a failed one for dsq gc", soft_wrap=True)


def leftovers(run: Path) -> tuple[list[tuple[Path, str]], list[Path]]:
    """Return the directories of damaged checkpoints, with the problem, and of incomplete ones."""
    damaged, incomplete = [], []
    storage = storage_of(run)
    for entry in sorted(run / found.name for found in storage.entries(run) if found.directory):
        try:
            names = {found.name for found in storage.entries(entry)}
        except PermissionError:
            continue  # lost+found and the like
        if not any(map(is_ours, names)):
            continue
        if MANIFEST not in names or is_hidden(entry.name):
            incomplete.append(entry)
            continue
        try:
            Manifest.read(entry)
        except DSQError as error:
            damaged.append((entry, str(error)))
    return damaged, incomplete


def disk_use(entries: list[RunCheckpoint]) -> int:
    """Return the bytes on disk of all checkpoints; a file with several links counts once."""
    if entries and is_remote(entries[0].path):  # files of ancestors that were removed are kept as long as needed
        files = {file.path_in(entry.path): file.size for entry in entries for file in entry.manifest.files}
        return sum(files.values()) + sum(storage_of(entry.path).size(entry.path / MANIFEST) for entry in entries)
    found: dict[tuple[int, int], int] = {}
    for entry in entries:
        for name in [MANIFEST, *(file.name for file in entry.manifest.files)]:
            try:
                status = os.stat(entry.path / name)
            except OSError:
                continue  # `dsq verify` reports it
            found[status.st_dev, status.st_ino] = status.st_size
    return sum(found.values())
