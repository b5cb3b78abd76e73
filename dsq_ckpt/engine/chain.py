"""Chains of checkpoints: the parent of a save, its codes and values, and the latest checkpoint of a run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect_run
from dsq_ckpt.core.arrays import F32, Codes
from dsq_ckpt.core.interrupts import propagate_handler_errors
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import RemoteError, is_remote
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.job import get_job_rank
from dsq_ckpt.engine.chain_price import is_keyframe_cheaper
from dsq_ckpt.engine.history import ChunkCache, ParentRef, SaveHistory, ensure_shapes
from dsq_ckpt.engine.other_jobs import is_own
from dsq_ckpt.engine.removed_ancestors import should_write_keyframe
from dsq_ckpt.engine.shapes import Shapes, count_shared_elements, is_continuation, read_shapes
from dsq_ckpt.errors import CheckpointNotFound, DSQError, LoadFailed, SaveFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.groups import QUANTIZABLE
from dsq_ckpt.quantization.layout import ParentModel
from dsq_ckpt.storage.backend import get_storage, read_sizes
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.links import explain_parent_errors
from dsq_ckpt.storage.manifest import REFINEMENT_ROLES, Manifest, iter_checkpoints
from dsq_ckpt.storage.paths import expand_path, resolve_checkpoint_path
from dsq_ckpt.storage.record_fields import FACTOR_KEYS, parse_dtype
from dsq_ckpt.storage.runs import get_run, resolve_run, warn_about_unrelated_directory
from dsq_ckpt.storage.shard import RecordRef

_warned_runs: set[Path] = set()  # run directories with several states


class Lineage(NamedTuple):
    """The earlier checkpoints of a state to be saved.

    Attributes:
        previous: the previous checkpoint of the run, whether the new one is coded against it or not.
        candidate: the checkpoint that the new one may be coded against.
        lossy_resumes: number of restores of the run from lossy state before.
    """

    previous: ParentRef | None = None
    candidate: ParentRef | None = None
    lossy_resumes: int = 0


def find_lineage(
    path: Path, parent: str | os.PathLike[str] | None, shapes: Shapes, history: SaveHistory, siblings: int = 1
) -> Lineage:
    """Return the earlier checkpoints of a state that is saved to `path`.

    Args:
        path: the new checkpoint.
        parent: "auto" or None: the last checkpoint of this state that this process committed or loaded in the same run;
            else the path of a complete checkpoint.
        shapes: shapes of all tensors of the state, by name.
        history: checkpoints that this process committed or loaded.
        siblings: number of consecutive checkpoints that are coded against the same parent.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: a parent named by the caller cannot be read.
    """
    run = get_run(path)
    if parent is None or parent == "auto":
        last = _find_last(run, shapes, history, warns=parent is not None)
        if last is None:
            return Lineage(lossy_resumes=_count_resumes(run, history))
        overwritten = expand_path(last.path) == path.absolute()
        candidate = last._replace(position=0) if overwritten else last
        return Lineage(last, _find_shared_parent(last, history, siblings) or candidate, last.lossy_resumes)
    parent_path = resolve_checkpoint_path(parent)
    with CheckpointFiles(parent_path) as files:
        manifest, older = files.manifest, read_shapes(files)
    # Whatever the parent, the state continues the checkpoint that this process saved or loaded last.
    origin = _find_last(run, shapes, history) or _find_last(get_run(parent_path), shapes, history)
    resumes = manifest.lossy_resumes if origin is None else origin.lossy_resumes
    candidate = ParentRef(manifest.save_id, str(parent_path), manifest.depth, resumes, position=0)
    return Lineage(candidate if is_continuation(shapes, older) else None, candidate, resumes)


def _find_last(run: Path, shapes: Shapes, history: SaveHistory, warns: bool = False) -> ParentRef | None:
    """Return the last checkpoint of a state in a run directory; a load of it counts as a resume if it is lossy."""
    loaded = [checkpoint for checkpoint in history.checkpoints(run) if ensure_shapes(checkpoint)]
    candidates = [(checkpoint, checkpoint.shapes) for checkpoint in loaded if checkpoint.shapes is not None]
    older = [
        (count_shared_elements(shapes, other), checkpoint) for checkpoint, other in candidates
        if is_continuation(shapes, other)
    ]
    # A part of the state may have been saved by itself since: the checkpoint that shares most elements is continued.
    for _, checkpoint in sorted(older, key=lambda pair: -pair[0]):
        problem = "is gone or was replaced"
        try:
            manifest = Manifest.read(checkpoint.path)
        except CheckpointNotFound:
            pass
        except DSQError as error:
            checkpoint.complete, problem = True, f"cannot be read ({error})"
        else:
            if manifest.save_id == checkpoint.save_id:
                resumes = manifest.lossy_resumes + (checkpoint.loaded and manifest.lossy)
                return ParentRef(manifest.save_id, str(checkpoint.path), manifest.depth, resumes)
            if not is_own(manifest.save_id):
                problem = "was replaced by another process (two jobs need two directories)"
        if checkpoint.complete:  # else its save failed, or is still under way
            if warns:
                warn(f"the parent checkpoint '{checkpoint.path}' {problem}; writing a keyframe")
            return None
    if others := [
        checkpoint.path for checkpoint, other in candidates
        if checkpoint.complete and not is_continuation(shapes, other)
    ]:
        _warn_of_other_state(run, others[0])
    return None


def _find_shared_parent(last: ParentRef, history: SaveHistory, siblings: int) -> ParentRef | None:
    """Return the parent of the last checkpoint, if the next checkpoint is to have the same parent, else None.

    None also if that parent is gone; if the last checkpoint was loaded, so that only its own codes are in memory; or
    if most codes of the last checkpoint have no counterpart in the parent, so that those of the next would have none.
    """
    path, own = expand_path(last.path), history.find(last.save_id)
    with suppress(DSQError):
        manifest = Manifest.read(path)
        if not 0 < manifest.siblings < siblings or manifest.parent_name is None or (own is not None and own.loaded):
            return None
        older = Manifest.read(path.parent / manifest.parent_name)
        if older.save_id == manifest.parent and not _is_mostly_new(manifest, older):
            parent_path = str(path.parent / manifest.parent_name)
            return ParentRef(older.save_id, parent_path, older.depth, last.lossy_resumes, manifest.siblings + 1)
    return None


def _is_mostly_new(manifest: Manifest, older: Manifest) -> bool:
    """Return whether most bits of a checkpoint belong to groups that an older one lacks, or holds only zeros of.

    Moments are such groups if the older checkpoint was saved before the first step.
    """
    nonzero = {name for name, report in older.groups.items() if report.delta or report.bits_per_element}
    bits = {name: report.elements * report.bits_per_element for name, report in manifest.groups.items()}
    return 2 * sum(bits[name] for name in bits.keys() - nonzero) > sum(bits.values())


def _count_resumes(run: Path, history: SaveHistory) -> int:
    """Return the most lossy resumes of any state of a run, for a state whose tensors have new names."""
    counts = [0]
    for checkpoint in history.checkpoints(run):
        with suppress(DSQError):
            if checkpoint.loaded and (manifest := Manifest.read(checkpoint.path)).save_id == checkpoint.save_id:
                counts.append(manifest.lossy_resumes + manifest.lossy)
    return max(counts)


def _warn_of_other_state(run: Path, other: Path) -> None:
    """Warn, once for a run directory, that several states are saved in it."""
    if run not in _warned_runs:
        _warned_runs.add(run)
        warn(
            f"what is saved in '{run}' now has less than half of '{other.name}', the checkpoint before it, by the same "
            "names and shapes: it is taken for another state, which starts with a keyframe and keeps its refinement "
            "apart from that one's; if it is the same training, with tensors renamed, that costs one keyframe"
        )


def choose_parent(
    candidate: ParentRef | None, parent: str | os.PathLike[str] | None, config: DSQConfig
) -> ParentRef | None:
    """Return `candidate` if a delta against it is wanted and possible, else None; on the coordinator.

    Args:
        candidate: see `Lineage`.
        parent: the caller's argument; None requests a keyframe.
        config: defines whether deltas are made, and the longest chain.
    """
    if candidate is None or parent is None or not config.delta.enabled or candidate.depth >= config.delta.most_links:
        return None
    path = expand_path(candidate.path)
    manifest = Manifest.read(path)
    needed = {file.path_in(path): file for file in manifest.files if file.role in ("own", "ancestor")}
    sizes = read_sizes(needed)
    for needed_path, file in needed.items():
        size, problem = sizes[needed_path], None
        if isinstance(size, FileNotFoundError):
            problem = "lacks"
        elif isinstance(size, OSError):
            problem = f"cannot be used ({size.strerror}) for"
        elif size != file.size:
            problem = f"has {size} instead of {file.size} bytes in"
        if problem is not None:
            warn(f"the parent checkpoint '{path}' {problem} {file.name}; writing a keyframe instead of a delta")
            return None
    if parent == "auto" and should_write_keyframe(path, manifest):
        return None
    return None if parent == "auto" and is_keyframe_cheaper(path, manifest, candidate, config) else candidate


def has_refinement(path: Path, parent: ParentRef) -> bool:
    """Return whether a checkpoint at `path` may link the refinement files of its parent.

    On object stores files of ancestors are not linked. A parent that is shared may lose its refinement at any time.
    """
    directory = expand_path(parent.path)
    if parent.position > 1 or is_remote(path) or is_remote(directory):
        return False
    manifest = Manifest.read(directory)
    files = {file.path_in(directory): file.size for file in manifest.files if file.role in REFINEMENT_ROLES}
    return manifest.refinement == "kept" and read_sizes(files) == files


class ParentRecord(NamedTuple):
    """The record of the parent that a chunk is coded against.

    Attributes:
        ref: a record of the parent.
        requires: names of all files that the record needs.
        residual: whether the chunk is a difference to the record's values; else its codes are coded given the
            record's codes.
    """

    ref: RecordRef
    requires: frozenset[str]
    residual: bool = False


class ParentCheckpoint:
    """The parent checkpoint on one rank. Codes and values are read from memory if they are cached, else from disk.

    Args:
        ref: the parent.
        model: codebooks and scales of the parent.
        workers: threads.
        history: checkpoints that this process committed or loaded.
        shared: whether the next save has the same parent and needs the cached codes too.
    """

    def __init__(
        self, ref: ParentRef, model: ParentModel, workers: Workers, history: SaveHistory, shared: bool = False
    ) -> None:
        self.ref = ref
        self._is_shared = shared
        self.model = model
        self._workers = workers
        self._directory = expand_path(ref.path)
        with explain_parent_errors(self._directory, ref.save_id):
            self.checkpoint = Checkpoint(self._directory, lazy=True)
        if self.checkpoint.manifest.save_id != ref.save_id:
            self.checkpoint.close()
            raise SaveFailed(
                f"the parent '{ref.path}' was replaced while this save was planned: it is "
                f"{self.checkpoint.manifest.save_id}, expected {ref.save_id}; save again"
            )
        checkpoint = history.find(ref.save_id)
        if checkpoint is not None:
            checkpoint.complete = True
        self._cache = ChunkCache() if checkpoint is None else checkpoint.cache

    def close(self) -> None:
        self.checkpoint.close()

    def read_codes(self, key: ChunkKey, group: str) -> tuple[ParentRecord, Codes] | None:
        """Return the previous codes of a chunk, None if they cannot be used (other sharding, group or alphabet).

        Raises:
            SaveFailed: the parent was removed or replaced meanwhile.
        """
        with explain_parent_errors(self._directory, self.ref.save_id):
            return self._read_codes(key, group)

    def _read_codes(self, key: ChunkKey, group: str) -> tuple[ParentRecord, Codes] | None:
        book, ref = self.model.books.get(group), self._find_ref(key)
        if ref is None:
            return None
        record = self.checkpoint.read_record(ref)
        if book is None or tuple(record["shape"]) != key.shape:
            return None
        if record["type"] != "coded" or record["group"] != group or "residual" in record:
            return None
        if self.checkpoint.read_codebook(ref).symbols != book.symbols:
            return None
        if record.get("exponent", 0) != self.model.exponents.get(key.fqn, 0):
            return None
        codes = self._cache.codes.get(key)
        if codes is None:
            codes = self.checkpoint.decode_codes(ref, self._workers)
        return ParentRecord(ref, self.checkpoint.required_files(ref.file)), codes

    def get_device_codes(self, key: ChunkKey) -> torch.Tensor | None:
        """Return the previous codes of a chunk in device memory, else None; drop them unless the parent is shared."""
        codes = self._cache.device_codes
        return codes.get(key) if self._is_shared else codes.pop(key, None)

    def read_values(self, key: ChunkKey) -> tuple[ParentRecord, F32] | None:
        """Return the decoded values of a chunk, flat, None if they cannot be used (other sharding, or no numbers).

        Raises:
            SaveFailed: the parent was removed or replaced meanwhile.
        """
        with explain_parent_errors(self._directory, self.ref.save_id):
            return self._read_values(key)

    def _read_values(self, key: ChunkKey) -> tuple[ParentRecord, F32] | None:
        ref = self._find_ref(key)
        if ref is None:
            return None
        record = self.checkpoint.read_record(ref)
        if tuple(record["shape"]) != key.shape or parse_dtype(record["dtype"]) not in QUANTIZABLE:
            return None
        if not FACTOR_KEYS.isdisjoint(record):  # its codes are in units that change from save to save
            return None
        values = self._cache.values.get(key)
        if values is None:
            values = self.checkpoint.decode_values(ref, self._workers)
        return ParentRecord(ref, self.checkpoint.required_files(ref.file), residual=True), values

    def _find_ref(self, key: ChunkKey) -> RecordRef | None:
        return self.checkpoint.find_chunk(key, self._cache.refs)


def describe_base_loss(directory: Path, manifest: Manifest) -> str:
    """Return a message on the error of a checkpoint that is loaded without its refinement."""
    errors: dict[str, float] = {}
    for group, report in manifest.groups.items():
        kind = group.partition("/")[0]
        errors[kind] = max(errors.get(kind, 0.0), report.relative_error)
    # The relative error of differences says nothing about the values that they add up to.
    against = manifest.get_setting("delta", "against")
    rounded = {kind: float(f"{100 * error:.2g}") for kind, error in errors.items() if error >= 5e-5}
    loss = ", ".join(f"{kind} by up to {percent:g} %" for kind, percent in rounded.items())
    exact = [
        path.name for path, other in iter_checkpoints(directory.absolute().parent, lambda *_: None)
        if other.refinement == "kept" and other.save_id != manifest.save_id
    ]
    return (
        f"'{directory}' is loaded from its base layer alone, since newer checkpoints took over its refinement layer: "
        "what is loaded differs from what was saved"
        + (f" ({loss}, root mean square of a group of tensors)" if loss and against != "values" else "")
        + ", and training goes on as from a restart of lower precision. "
        + (f"Refinement is there in {', '.join(repr(name) for name in exact[:-4:-1])}. " if exact else "")
        + "To keep it longer set refinement.keep_last in the configuration, or save with pinned=True"
    )


@propagate_handler_errors()
def latest(run: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint directly below a run directory.

    Args:
        run: the run directory, or a URL; it need not exist.

    Returns:
        The path; None if the run has no checkpoint yet. Then a warning names what does not look like a new run: a
        directory in `run` that has checkpoints, or files other than logs and settings; or, if `run` does not exist, a
        directory with checkpoints and nearly the same name.

    Raises:
        ConfigError: `run` is no path, or empty.
        CheckpointNotFound: `run` is a file, a checkpoint or a dangling link.
        LoadFailed: the object store does not answer, or refuses access.
        DSQError: a manifest cannot be read, and its checkpoint may be the newest.

    Example:
        >>> dsq_ckpt.latest("run") is None  # before the first checkpoint
        True
        >>> result = dsq_ckpt.save({"w": torch.randn(256, 256)}, "run/step-000500")
        >>> dsq_ckpt.latest("run")
        'run/step-000500'
    """
    expect_run(run)
    try:
        return _find_latest(run)
    except RemoteError as error:
        raise LoadFailed(f"'{run}': which checkpoints are there is unknown: {error.strerror}") from error


def _find_latest(run: str | os.PathLike[str]) -> str | None:
    problems: list[tuple[Path, DSQError]] = []
    rank = get_job_rank()
    directory = resolve_run(run, rank)
    checkpoints = list(iter_checkpoints(directory, lambda path, error: problems.append((path, error))))
    older = set[str]().union(*(manifest.get_older_save_ids() for _, manifest in checkpoints))
    for path, error in problems:
        saves = {entry.name[:16] for entry in get_storage(path).list_entries(path) if entry.name.endswith(".index")}
        if not saves or not saves <= older:
            raise type(error)(
                f"{error}; that checkpoint may be the newest of '{run}': restore or delete it, or name the checkpoint "
                "to go on from"
            ) from error
    if not checkpoints:
        warn_about_unrelated_directory(directory, rank)
        return None
    return str(checkpoints[-1][0])
