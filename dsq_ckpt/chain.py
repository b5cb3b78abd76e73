"""Chains of checkpoints: which is the parent, what it leaves to its child, links between them, retention."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from dsq_ckpt.analysis import ParentModel
from dsq_ckpt.checkpoint import Checkpoint, dtype_of
from dsq_ckpt.chunk import ChunkKey, Codes, Floats32
from dsq_ckpt.config import DSQConfig
from dsq_ckpt.container import sync_directory
from dsq_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, DSQError, SaveFailed
from dsq_ckpt.groups import QUANTIZABLE
from dsq_ckpt.manifest import Manifest, checkpoints, local_path
from dsq_ckpt.notices import warn
from dsq_ckpt.runs import existing_run
from dsq_ckpt.shard import RecordRef
from dsq_ckpt.workers import Workers

logger = logging.getLogger(__name__)


_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.ENOSYS)


class ParentRef(NamedTuple):
    """A checkpoint to code against; plain strings and numbers, so that DCP can carry it in a plan."""

    save_id: str
    path: str
    depth: int
    lossy_resumes: int = 0
    """Of what comes after it: its own, and one more where this process was restored from it and it is lossy."""


@dataclass
class Memory:
    """What the next save needs of the chunks here.

    Attributes:
        codes: what it codes against where `delta.against` is "codes": 1 byte per element.
        values: what it takes differences to where that is "values", the base layer's: float32, flat.
        resident: `codes` in device memory, of chunks that were quantized there; 1 byte per element.
    """

    codes: dict[ChunkKey, Codes] = field(default_factory=dict)
    values: dict[ChunkKey, Floats32] = field(default_factory=dict)
    resident: dict[ChunkKey, torch.Tensor] = field(default_factory=dict)


@dataclass
class Remembered:
    """A checkpoint this process wrote or read, with what it knows of its chunks here."""

    save_id: str
    path: Path
    memory: Memory = field(default_factory=Memory)
    loaded: bool = False
    """It was loaded: what is saved next comes from a restored state."""


@dataclass
class _Run:
    committed: Remembered | None = None
    pending: Remembered | None = None


# Per run directory. Module-level, because DCP's process mode pickles the writer anew for every save.
_runs: dict[Path, _Run] = {}


def run_of(path: Path) -> Path:
    """The run directory of a checkpoint: the one it lies in."""
    return path.absolute().parent


def remember_pending(path: Path, save_id: str, memory: Memory) -> None:
    """What a save under way leaves for the next; it counts once its manifest is there."""
    run = _runs.setdefault(run_of(path), _Run())
    if run.pending is not None and run.pending.save_id != save_id and _is_there(run.pending):
        run.committed = run.pending  # by another process
    run.pending = Remembered(save_id, path.absolute(), memory)


def remember_committed(path: Path, save_id: str) -> None:
    """A checkpoint that was committed: the parent of the next save of its run."""
    run = _runs.setdefault(run_of(path), _Run())
    if run.pending is not None and run.pending.save_id == save_id:
        run.committed, run.pending = run.pending, None
    elif run.committed is None or run.committed.save_id != save_id:
        run.committed = Remembered(save_id, path.absolute())


def remember_loaded(path: Path, save_id: str, memory: Memory) -> None:
    """A checkpoint that was loaded: the parent of the next save of its run, whatever was saved before."""
    _runs[run_of(path)] = _Run(Remembered(save_id, path.absolute(), memory, loaded=True))


Outline = dict[Path, _Run]


def outline() -> Outline:
    """Return which checkpoints this process knows, without their chunks; plain data for another process."""
    def of(known: Remembered | None) -> Remembered | None:
        return None if known is None else replace(known, memory=Memory())

    return {key: _Run(of(run.committed), of(run.pending)) for key, run in _runs.items()}


def adopt(runs: Outline) -> None:
    """Know the checkpoints that another process knows, in place of one's own; what is known of their chunks stays."""
    known = {one.save_id: one.memory for run in _runs.values() for one in (run.committed, run.pending) if one}
    for run in runs.values():
        for one in (run.committed, run.pending):
            if one is not None:
                one.memory = known.get(one.save_id, one.memory)
    _runs.clear()
    _runs.update(runs)


def forget(path: Path | None = None) -> None:
    """Forget what is known of the run that `path` belongs to, or of all runs; the next save is a keyframe."""
    if path is None:
        _runs.clear()
    else:
        _runs.pop(run_of(path), None)


def release_resident(path: Path) -> None:
    """Free codes in device memory that the run of `path` left there: its next checkpoint is a keyframe."""
    run = _runs.get(run_of(path), _Run())
    for known in (run.committed, run.pending):
        if known is not None:
            known.memory.resident.clear()


@contextmanager
def apart(path: Path) -> Iterator[None]:
    """What is known of the run that `path` belongs to is not used in here, and is the same afterwards."""
    key = run_of(path)
    known = _runs.pop(key, None)
    try:
        yield
    finally:
        _runs.pop(key, None)
        if known is not None:
            _runs[key] = known


def predecessor(path: Path, parent: str | os.PathLike[str] | None) -> ParentRef | None:
    """The checkpoint that a save to `path` comes after in its run, whether it is coded against it or not.

    Args:
        path: the new checkpoint.
        parent: "auto" or None: the last checkpoint this process committed or loaded in the same run; else the path of a
            complete checkpoint.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: a parent named by the caller is not there.
    """
    last = _last(run_of(path))
    if parent is not None and parent != "auto":
        named = local_path(parent)
        manifest = Manifest.read(named)
        # Whatever it is coded against, the state comes from what this process saved or loaded last.
        origin = last or _last(run_of(named))
        resumes = manifest.lossy_resumes if origin is None else origin.lossy_resumes
        return ParentRef(manifest.save_id, str(named), manifest.depth, resumes)
    run = _runs.get(run_of(path), _Run())
    if last is None and run.committed is not None and parent is not None:
        warn(
            f"the parent checkpoint '{run.committed.path}' is gone or was replaced; writing a keyframe"
        )
    return last


def _last(key: Path) -> ParentRef | None:
    """What this process saved or loaded last in a run directory; having loaded it is a resume, if it is lossy."""
    run = _runs.get(key, _Run())
    for candidate in (run.pending, run.committed):
        if candidate is None:
            continue
        manifest = _is_there(candidate)
        if manifest is not None:
            resumes = manifest.lossy_resumes + (candidate.loaded and manifest.lossy)
            return ParentRef(manifest.save_id, str(candidate.path), manifest.depth, resumes)
    return None


def _is_there(candidate: Remembered) -> Manifest | None:
    """The manifest of a checkpoint that is known, if that is still, or by now, at its path."""
    try:
        manifest = Manifest.read(candidate.path)
    except DSQError:
        return None
    return manifest if manifest.save_id == candidate.save_id else None


def choose_parent(
    previous: ParentRef | None, parent: str | os.PathLike[str] | None, config: DSQConfig
) -> ParentRef | None:
    """`previous`, if a delta against it is wanted and possible; only the coordinator decides.

    Args:
        previous: see `predecessor`.
        parent: None asks for a keyframe.
        config: chain length and whether deltas are made at all.
    """
    if previous is None or parent is None or not config.delta.enabled or previous.depth >= config.delta.max_chain:
        return None
    path = Path(previous.path)
    for file in Manifest.read(path).files:
        if file.role not in ("own", "ancestor"):
            continue
        try:
            size = (path / file.name).stat().st_size
        except OSError:
            size = -1
        if size != file.size:
            problem = "lacks" if size < 0 else f"has {size} instead of {file.size} bytes in"
            warn(
                f"the parent checkpoint '{path}' {problem} {file.name}; writing a keyframe instead of a delta"
            )
            return None
    return previous


class Base(NamedTuple):
    """What a chunk is coded against.

    Attributes:
        ref: a record of the parent.
        requires: all files that record needs.
        residual: the chunk is added to that record's values; otherwise its codes are coded given that record's.
    """

    ref: RecordRef
    requires: frozenset[str]
    residual: bool = False


class Parent:
    """The parent checkpoint as seen by one rank: from memory where what is needed is still there, else from disk."""

    def __init__(self, ref: ParentRef, model: ParentModel, workers: Workers) -> None:
        self.ref = ref
        self.model = model
        self._workers = workers
        self.checkpoint = Checkpoint(Path(ref.path))
        if self.checkpoint.manifest.save_id != ref.save_id:
            self.checkpoint.close()
            raise SaveFailed(
                f"the parent '{ref.path}' was replaced while this save was planned: it is "
                f"{self.checkpoint.manifest.save_id}, expected {ref.save_id}; save again"
            )
        run = _runs.get(run_of(Path(ref.path)), _Run())
        if run.pending is not None and run.pending.save_id == ref.save_id:
            run.committed, run.pending = run.pending, None
        known = run.committed
        self._memory = known.memory if known is not None and known.save_id == ref.save_id else Memory()

    def close(self) -> None:
        self.checkpoint.close()

    def codes(self, key: ChunkKey, group: str) -> tuple[Base, Codes] | None:
        """Previous codes of a chunk, or None where it must start anew (other sharding, group or alphabet)."""
        book = self.model.books.get(group)
        try:
            ref = self.checkpoint.find(key.fqn, key.offsets)
        except CheckpointNotFound:
            return None
        record = self.checkpoint.record(ref)
        if book is None or tuple(record["shape"]) != key.shape:
            return None
        if record["type"] != "coded" or record["group"] != group or "residual" in record:
            return None
        if self.checkpoint.codebook(ref).symbols != book.symbols:
            return None
        if record.get("exponent", 0) != self.model.exponents.get(key.fqn, 0):
            return None
        codes = self._memory.codes.get(key)
        if codes is None:
            codes = self.checkpoint.codes(ref, self._workers)
        return Base(ref, self.checkpoint.requires(ref.file)), codes

    def resident(self, key: ChunkKey) -> torch.Tensor | None:
        """The codes that `codes` tells of in device memory; they are then no longer held here, so that they can go."""
        return self._memory.resident.pop(key, None)

    def values(self, key: ChunkKey) -> tuple[Base, Floats32] | None:
        """What a chunk decodes to, flat, or None where it must start anew (other sharding, or no numbers)."""
        try:
            ref = self.checkpoint.find(key.fqn, key.offsets)
        except CheckpointNotFound:
            return None
        record = self.checkpoint.record(ref)
        if tuple(record["shape"]) != key.shape or dtype_of(record["dtype"]) not in QUANTIZABLE:
            return None
        values = self._memory.values.get(key)
        if values is None:
            values = self.checkpoint.values(ref, self._workers)
        return Base(ref, self.checkpoint.requires(ref.file), residual=True), values


def link_files(source: Path, target: Path, names: frozenset[str], fsync: bool) -> None:
    """Make `names` of the directory `source` appear in `target`: hard links, copies where links cannot be made.

    Raises:
        CorruptCheckpoint: a file is missing in `source`.
    """
    for name in sorted(names):
        destination = target / name
        if destination.exists():
            continue
        try:
            os.link(source / name, destination)
        except FileExistsError:
            continue  # another rank was faster
        except FileNotFoundError as error:
            raise CorruptCheckpoint(
                f"'{source / name}' is missing, but the new checkpoint is coded against it; "
                "save with parent=None for a keyframe"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _copy(source / name, destination, fsync)


def _copy(source: Path, destination: Path, fsync: bool) -> None:
    temporary = destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(source, "rb") as origin, open(temporary, "xb") as copy:
            shutil.copyfileobj(origin, copy, 1 << 22)
            copy.flush()
            if fsync:
                os.fsync(copy.fileno())
        os.replace(temporary, destination)
    finally:
        temporary.unlink(missing_ok=True)


def drop_refinements(newest: Path, keep_last: int, fsync: bool) -> list[Path]:
    """Unlink refinements of all but the newest checkpoints of a run; pinned ones keep theirs.

    Called after `newest` was committed. Only the checkpoints it comes after are touched, not those of another job in
    the same directory; and none, if it is lossy and has no refinement, or holds NaN, since the one before it is then
    the one to go back to. The older manifest says "dropped" before its file goes, so that a crash in between leaves an
    orphan, never a promise that is not kept.

    Args:
        newest: the checkpoint just committed.
        keep_last: how many of the newest checkpoints keep their refinement.
        fsync: flush what is written.

    Returns:
        The directories whose refinement was dropped.
    """
    manifest = Manifest.read(newest)
    if (manifest.refinement != "kept" and manifest.lossy) or manifest.nonfinite:
        return []
    dropped: list[Path] = []
    directory, age = newest, 0
    while manifest.previous_name is not None:
        directory, expected, age = directory.parent / manifest.previous_name, manifest.previous, age + 1
        try:
            manifest = Manifest.read(directory)
        except DSQError:
            break
        if manifest.save_id != expected or (age >= keep_last and manifest.refinement == "dropped"):
            break  # replaced by another; or what is older was dropped before
        if age >= keep_last and manifest.refinement == "kept" and not manifest.pinned:
            _drop(directory, manifest, fsync)
            dropped.append(directory)
    return dropped


def _drop(directory: Path, manifest: Manifest, fsync: bool) -> None:
    names = [file.name for file in manifest.files if file.role == "refinement"]
    kept = [file for file in manifest.files if file.role != "refinement"]
    manifest.model_copy(update={"refinement": "dropped", "files": kept}).write(directory, exclusive=False, fsync=fsync)
    for name in names:
        (directory / name).unlink(missing_ok=True)
    if fsync:
        sync_directory(directory)


def latest(run: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint directly below a run directory.

    None: the run has not begun. Its directory holds no checkpoint yet, or does not exist; a warning tells of another
    directory with checkpoints and nearly the same name.

    Raises:
        CheckpointNotFound: `run` is a file, a checkpoint or a dangling link, and no run directory.
    """
    found = list(checkpoints(existing_run(run)))
    return str(found[-1][0]) if found else None


