"""Chains of checkpoints: which is the parent, its codes, links that make a child self-contained, retention."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dsq_ckpt.checkpoint import Checkpoint, Codes
from dsq_ckpt.chunk import ChunkKey
from dsq_ckpt.compress import ParentModel
from dsq_ckpt.config import DSQConfig
from dsq_ckpt.container import sync_directory
from dsq_ckpt.errors import CorruptCheckpoint, DSQError, SaveFailed
from dsq_ckpt.manifest import Manifest, checkpoints
from dsq_ckpt.shard import RecordRef
from dsq_ckpt.workers import Workers

logger = logging.getLogger(__name__)


_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.ENOSYS)


class ParentRef(NamedTuple):
    """A checkpoint to code against; plain strings and numbers, so that DCP can carry it in a plan."""

    save_id: str
    path: str
    depth: int


@dataclass
class Remembered:
    """A checkpoint this process wrote or read, with the codes of its chunks here (1 byte per element)."""

    save_id: str
    path: Path
    codes: dict[ChunkKey, Codes] = field(default_factory=dict)


@dataclass
class _Run:
    committed: Remembered | None = None
    pending: Remembered | None = None


# Per run directory. Module-level, because DCP's process mode pickles the writer anew for every save.
_runs: dict[Path, _Run] = {}


def run_of(path: Path) -> Path:
    """The run directory of a checkpoint: the one it lies in."""
    return path.absolute().parent


def remember_pending(path: Path, save_id: str, codes: dict[ChunkKey, Codes]) -> None:
    """The codes of a save under way; they count once its manifest is there."""
    _runs.setdefault(run_of(path), _Run()).pending = Remembered(save_id, path.absolute(), codes)


def remember_committed(path: Path, save_id: str) -> None:
    """A checkpoint that was committed: the parent of the next save of its run."""
    run = _runs.setdefault(run_of(path), _Run())
    if run.pending is not None and run.pending.save_id == save_id:
        run.committed, run.pending = run.pending, None
    elif run.committed is None or run.committed.save_id != save_id:
        run.committed = Remembered(save_id, path.absolute())


def remember_loaded(path: Path, save_id: str, codes: dict[ChunkKey, Codes]) -> None:
    """A checkpoint that was loaded: the parent of the next save of its run, whatever was saved before."""
    _runs[run_of(path)] = _Run(Remembered(save_id, path.absolute(), codes))


def forget(path: Path | None = None) -> None:
    """Forget what is known of the run that `path` belongs to, or of all runs; the next save is a keyframe."""
    if path is None:
        _runs.clear()
    else:
        _runs.pop(run_of(path), None)


def choose_parent(path: Path, parent: str | os.PathLike[str] | None, config: DSQConfig) -> ParentRef | None:
    """The parent of a save to `path`; only the coordinator decides.

    Args:
        path: the new checkpoint.
        parent: "auto": the last checkpoint this process committed or loaded in the same run; None: a keyframe; else
            the path of a complete checkpoint.
        config: chain length and whether deltas are made at all.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: a parent named by the caller is not there.
    """
    if parent is None:
        return None
    if parent != "auto":
        named = Path(parent).absolute()
        manifest = Manifest.read(named)
        return _within_policy(named, manifest, config)
    run = _runs.get(run_of(path))
    if run is None:
        return None
    for candidate in (run.pending, run.committed):
        if candidate is None:
            continue
        try:
            manifest = Manifest.read(candidate.path)
        except DSQError:
            continue
        if manifest.save_id == candidate.save_id:
            return _within_policy(candidate.path, manifest, config)
    if run.committed is not None:
        warnings.warn(
            f"the parent checkpoint '{run.committed.path}' is gone or was replaced; writing a keyframe", stacklevel=2
        )
    return None


def _within_policy(path: Path, manifest: Manifest, config: DSQConfig) -> ParentRef | None:
    if not config.delta.enabled or manifest.depth >= config.delta.max_chain:
        return None
    missing = [
        file.name for file in manifest.files
        if file.role in ("own", "ancestor") and not (path / file.name).is_file()
    ]
    if missing:
        warnings.warn(
            f"the parent checkpoint '{path}' lacks {missing[0]}; writing a keyframe instead of a delta", stacklevel=2
        )
        return None
    return ParentRef(manifest.save_id, str(path), manifest.depth)


class Base(NamedTuple):
    """What a chunk is coded against: previous codes, their record, and all files that record needs."""

    codes: Codes
    ref: RecordRef
    requires: frozenset[str]


class Parent:
    """The parent checkpoint as seen by one rank: from memory where its codes are still there, else from disk."""

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
        self._memory = known.codes if known is not None and known.save_id == ref.save_id else {}
        self._refs = dict(self.checkpoint.chunks())

    def close(self) -> None:
        self.checkpoint.close()

    def base(self, key: ChunkKey, group: str) -> Base | None:
        """Previous codes of a chunk, or None where it must start anew (other sharding, group or alphabet)."""
        ref = self._refs.get(key)
        book = self.model.books.get(group)
        if ref is None or book is None:
            return None
        record = self.checkpoint.record(ref, key.fqn, key.offsets)
        if record["type"] != "coded" or record["group"] != group:
            return None
        if self.checkpoint.codebook(ref).symbols != book.symbols:
            return None
        if record.get("exponent", 0) != self.model.exponents.get(key.fqn, 0):
            return None
        codes = self._memory.get(key)
        if codes is None:
            codes = self.checkpoint.codes(ref, self._workers)
        return Base(codes, ref, self.checkpoint.requires(ref.file))


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


def drop_refinements(run: Path, keep_last: int, newest: str) -> list[Path]:
    """Unlink refinements of all but the newest checkpoints of a run; pinned ones keep theirs.

    Called after a newer checkpoint was committed. The older manifest says "dropped" before its file goes, so that a
    crash in between leaves an orphan, never a promise that is not kept.

    Args:
        run: the run directory.
        keep_last: how many of the newest checkpoints keep their refinement.
        newest: save id of the checkpoint just committed.

    Returns:
        The directories whose refinement was dropped.
    """
    found = list(checkpoints(run))
    ids = [manifest.save_id for _, manifest in found]
    if newest not in ids:
        return []
    dropped = []
    for directory, manifest in found[: max(ids.index(newest) + 1 - keep_last, 0)]:
        if manifest.refinement != "kept" or manifest.pinned:
            continue
        names = [file.name for file in manifest.files if file.role == "refinement"]
        kept = [file for file in manifest.files if file.role != "refinement"]
        manifest.model_copy(update={"refinement": "dropped", "files": kept}).write(
            directory, exclusive=False, fsync=True
        )
        for name in names:
            (directory / name).unlink(missing_ok=True)
        sync_directory(directory)
        dropped.append(directory)
    return dropped


def latest(run: str | os.PathLike[str]) -> str | None:
    """Path of the newest complete checkpoint directly below a run directory, or None."""
    found = list(checkpoints(Path(run)))
    return str(found[-1][0]) if found else None


