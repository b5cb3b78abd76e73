"""Chains of checkpoints: the parent of a save, its codes and values, the latest one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect
from dsq_ckpt.core.arrays import F32, Codes
from dsq_ckpt.core.interrupts import propagate_handler_errors
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.job import rank_in_job
from dsq_ckpt.engine.history import ChunkCache, ParentRef, SaveHistory, has_shapes
from dsq_ckpt.engine.other_jobs import is_own
from dsq_ckpt.engine.removed_ancestors import a_keyframe_pays
from dsq_ckpt.engine.shapes import Shapes, continues, shapes_of, shared
from dsq_ckpt.errors import CheckpointNotFound, DSQError, SaveFailed
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.groups import QUANTIZABLE
from dsq_ckpt.quantization.layout import ParentModel
from dsq_ckpt.storage.backend import get_storage, read_sizes
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.links import explain_parent_errors
from dsq_ckpt.storage.manifest import Manifest, iter_checkpoints
from dsq_ckpt.storage.paths import expand_path, resolve_checkpoint_path
from dsq_ckpt.storage.record_fields import FACTORS, parse_dtype
from dsq_ckpt.storage.runs import get_run, resolve_run, warn_about_unrelated_directory
from dsq_ckpt.storage.shard import RecordRef

_told: set[Path] = set()  # run directories that were said to hold several states


class Lineage(NamedTuple):
    """The checkpoints that a state to be saved comes after.

    Attributes:
        previous: the checkpoint that it comes after in its run, whether it is coded against it or not.
        base: the checkpoint that it may be coded against.
        lossy_resumes: how often the run was restored from lossy state before.
    """

    previous: ParentRef | None = None
    base: ParentRef | None = None
    lossy_resumes: int = 0


def lineage(
    path: Path, parent: str | os.PathLike[str] | None, shapes: Shapes, history: SaveHistory, siblings: int = 1
) -> Lineage:
    """Return the checkpoints that a save to `path` comes after.

    Args:
        path: the new checkpoint.
        parent: "auto" or None: the last checkpoint of this state that this process committed or loaded in the same run;
            else the path of a complete checkpoint.
        shapes: shapes of all tensors of the state, by name.
        history: checkpoints that this process committed or loaded.
        siblings: how many checkpoints in a row are to be coded against the same one.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: a parent named by the caller cannot be read.
    """
    run = get_run(path)
    if parent is None or parent == "auto":
        last = _last(run, shapes, history, warns=parent is not None)
        if last is None:
            return Lineage(lossy_resumes=_resumes(run, history))
        own = last._replace(place=0) if expand_path(last.path) == path.absolute() else last  # which is overwritten
        return Lineage(last, _shared(last, history, siblings) or own, last.lossy_resumes)
    named = resolve_checkpoint_path(parent)
    with CheckpointFiles(named) as files:
        manifest, older = files.manifest, shapes_of(files)
    # Whatever it is coded against, the state comes from what this process saved or loaded last.
    origin = _last(run, shapes, history) or _last(get_run(named), shapes, history)
    resumes = manifest.lossy_resumes if origin is None else origin.lossy_resumes
    base = ParentRef(manifest.save_id, str(named), manifest.depth, resumes, place=0)
    return Lineage(base if continues(shapes, older) else None, base, resumes)


def _last(run: Path, shapes: Shapes, history: SaveHistory, warns: bool = False) -> ParentRef | None:
    """Return the last checkpoint of a state in a run directory, counting a load of it as a resume if it is lossy."""
    candidates = [(one, one.shapes) for one in history.checkpoints(run) if has_shapes(one) and one.shapes is not None]
    older = [(shared(shapes, other), one) for one, other in candidates if continues(shapes, other)]
    # A part of the state may have been saved by itself since: of both, the whole is what is continued.
    for _, one in sorted(older, key=lambda pair: -pair[0]):
        problem = "is gone or was replaced"
        try:
            manifest = Manifest.read(one.path)
        except CheckpointNotFound:
            pass
        except DSQError as error:
            one.complete, problem = True, f"cannot be read ({error})"
        else:
            if manifest.save_id == one.save_id:
                resumes = manifest.lossy_resumes + (one.loaded and manifest.lossy)
                return ParentRef(manifest.save_id, str(one.path), manifest.depth, resumes)
            if not is_own(manifest.save_id):
                problem = "was replaced by another process (two jobs need two directories)"
        if one.complete:  # else it is of a save that failed, or is still under way
            if warns:
                warn(f"the parent checkpoint '{one.path}' {problem}; writing a keyframe")
            return None
    if others := [one.path for one, other in candidates if one.complete and not continues(shapes, other)]:
        _tell_apart(run, others[0])
    return None


def _shared(last: ParentRef, history: SaveHistory, siblings: int) -> ParentRef | None:
    """Return the checkpoint that the last one is coded against, if the next one is to be coded against it, too.

    None: it is not, or it is gone; or the last one was loaded, so that its codes are in memory and not that one's; or
    most of the last one has no codes there that it could be coded given, and the next one would have none either.
    """
    path, known = expand_path(last.path), history.find(last.save_id)
    with suppress(DSQError):
        manifest = Manifest.read(path)
        if not 0 < manifest.siblings < siblings or manifest.parent_name is None or (known is not None and known.loaded):
            return None
        older = Manifest.read(path.parent / manifest.parent_name)
        if older.save_id == manifest.parent and not _mostly_new(manifest, older):
            place = str(path.parent / manifest.parent_name)
            return ParentRef(older.save_id, place, older.depth, last.lossy_resumes, manifest.siblings + 1)
    return None


def _mostly_new(manifest: Manifest, older: Manifest) -> bool:
    """Return whether most codes of a checkpoint are of groups that an older one has nothing of but zeros, if at all.

    Such are moments, if the older one was saved before the first step.
    """
    taught = {name for name, report in older.groups.items() if report.delta or report.bits_per_element}
    bits = {name: report.elements * report.bits_per_element for name, report in manifest.groups.items()}
    return 2 * sum(bits[name] for name in bits.keys() - taught) > sum(bits.values())


def _resumes(run: Path, history: SaveHistory) -> int:
    """Return how often any state of a run was restored, for a state whose tensors have new names."""
    counts = [0]
    for one in history.checkpoints(run):
        with suppress(DSQError):
            if one.loaded and (manifest := Manifest.read(one.path)).save_id == one.save_id:
                counts.append(manifest.lossy_resumes + manifest.lossy)
    return max(counts)


def _tell_apart(run: Path, other: Path) -> None:
    """Warn, once for a run directory, that several states are saved in it."""
    if run not in _told:
        _told.add(run)
        warn(
            f"what is saved in '{run}' now has less than half of '{other.name}', the checkpoint before it, by the same "
            "names and shapes: it is taken for another state, which starts with a keyframe and keeps its refinement "
            "apart from that one's; if it is the same training, with tensors renamed, that costs one keyframe"
        )


def choose_parent(
    base: ParentRef | None, parent: str | os.PathLike[str] | None, config: DSQConfig
) -> ParentRef | None:
    """Return `base` if a delta against it is wanted and possible, else None; on the coordinator.

    Args:
        base: see `lineage`.
        parent: None asks for a keyframe.
        config: chain length and whether deltas are made at all.
    """
    if base is None or parent is None or not config.delta.enabled or base.depth >= config.delta.most_links:
        return None
    path = expand_path(base.path)
    manifest = Manifest.read(path)
    needed = {file.path_in(path): file for file in manifest.files if file.role in ("own", "ancestor")}
    found = read_sizes(needed)
    for place, file in needed.items():
        size, problem = found[place], None
        if isinstance(size, FileNotFoundError):
            problem = "lacks"
        elif isinstance(size, OSError):
            problem = f"cannot be used ({size.strerror}) for"
        elif size != file.size:
            problem = f"has {size} instead of {file.size} bytes in"
        if problem is not None:
            warn(f"the parent checkpoint '{path}' {problem} {file.name}; writing a keyframe instead of a delta")
            return None
    return None if parent == "auto" and a_keyframe_pays(path, manifest) else base


class BaseRecord(NamedTuple):
    """The record of the parent that a chunk is coded against.

    Attributes:
        ref: a record of the parent.
        requires: all files that record needs.
        residual: the chunk is added to that record's values; otherwise its codes are coded given that record's.
    """

    ref: RecordRef
    requires: frozenset[str]
    residual: bool = False


class Parent:
    """The parent checkpoint on one rank; codes and values come from memory if they are cached, else from disk.

    Args:
        ref: the parent.
        model: codebooks and scales of the parent.
        workers: threads.
        history: checkpoints that this process committed or loaded.
        shared: whether the next save is to be coded against it, too, and needs what is cached.
    """

    def __init__(
        self, ref: ParentRef, model: ParentModel, workers: Workers, history: SaveHistory, shared: bool = False
    ) -> None:
        self.ref = ref
        self._shared = shared
        self.model = model
        self._workers = workers
        with explain_parent_errors(expand_path(ref.path), ref.save_id):
            self.checkpoint = Checkpoint(expand_path(ref.path), lazy=True)
        if self.checkpoint.manifest.save_id != ref.save_id:
            self.checkpoint.close()
            raise SaveFailed(
                f"the parent '{ref.path}' was replaced while this save was planned: it is "
                f"{self.checkpoint.manifest.save_id}, expected {ref.save_id}; save again"
            )
        found = history.find(ref.save_id)
        if found is not None:
            found.complete = True
        self._cache = ChunkCache() if found is None else found.cache

    def close(self) -> None:
        self.checkpoint.close()

    def codes(self, key: ChunkKey, group: str) -> tuple[BaseRecord, Codes] | None:
        """Return the previous codes of a chunk, None if there are none to use (other sharding, group or alphabet).

        Raises:
            SaveFailed: the parent was removed or replaced meanwhile.
        """
        with explain_parent_errors(expand_path(self.ref.path), self.ref.save_id):
            return self._codes(key, group)

    def _codes(self, key: ChunkKey, group: str) -> tuple[BaseRecord, Codes] | None:
        book, ref = self.model.books.get(group), self._find(key)
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
        return BaseRecord(ref, self.checkpoint.required_files(ref.file)), codes

    def device_codes(self, key: ChunkKey) -> torch.Tensor | None:
        """Return the previous codes of a chunk in device memory, None if they are not there; removed unless shared."""
        codes = self._cache.device_codes
        return codes.get(key) if self._shared else codes.pop(key, None)

    def values(self, key: ChunkKey) -> tuple[BaseRecord, F32] | None:
        """Return what a chunk decodes to, flat, None if it cannot be used (other sharding, or no numbers).

        Raises:
            SaveFailed: the parent was removed or replaced meanwhile.
        """
        with explain_parent_errors(expand_path(self.ref.path), self.ref.save_id):
            return self._values(key)

    def _values(self, key: ChunkKey) -> tuple[BaseRecord, F32] | None:
        ref = self._find(key)
        if ref is None:
            return None
        record = self.checkpoint.read_record(ref)
        if tuple(record["shape"]) != key.shape or parse_dtype(record["dtype"]) not in QUANTIZABLE:
            return None
        if not FACTORS.isdisjoint(record):  # its codes stand for values in units that change
            return None
        values = self._cache.values.get(key)
        if values is None:
            values = self.checkpoint.decode_values(ref, self._workers)
        return BaseRecord(ref, self.checkpoint.required_files(ref.file), residual=True), values

    def _find(self, key: ChunkKey) -> RecordRef | None:
        return self.checkpoint.find_chunk(key, self._cache.refs)


def what_the_base_costs(directory: Path, manifest: Manifest) -> str:
    """Return a message on what is lost when a checkpoint without its refinement is loaded."""
    errors: dict[str, float] = {}
    for group, report in manifest.groups.items():
        kind = group.partition("/")[0]
        errors[kind] = max(errors.get(kind, 0.0), report.relative_error)
    # What is known of differences says nothing about the values that they add up to.
    against = manifest.get_setting("delta", "against")
    rounded = {kind: float(f"{100 * error:.2g}") for kind, error in errors.items() if error >= 5e-5}
    lost = ", ".join(f"{kind} by up to {percent:g} %" for kind, percent in rounded.items())
    kept = [
        path.name for path, other in iter_checkpoints(directory.absolute().parent, lambda *_: None)
        if other.refinement == "kept" and other.save_id != manifest.save_id
    ]
    return (
        f"'{directory}' is loaded from its base layer alone, since newer checkpoints took over its refinement layer: "
        "what is loaded differs from what was saved"
        + (f" ({lost}, root mean square of a group of tensors)" if lost and against != "values" else "")
        + ", and training goes on as from a restart of lower precision. "
        + (f"Refinement is there in {', '.join(repr(name) for name in kept[:-4:-1])}. " if kept else "")
        + "To keep it longer set refinement.keep_last in the configuration, or save with pinned=True"
    )


@propagate_handler_errors()
def latest(run: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint directly below a run directory.

    None: the run has not begun. A warning tells of files in its directory other than logs and settings, of directories
    with checkpoints in it, and, where it does not exist, of one with checkpoints and nearly the same name.

    Raises:
        ConfigError: `run` is no path.
        CheckpointNotFound: `run` is a file, a checkpoint or a dangling link.
        DSQError: a manifest cannot be read, and its checkpoint may be the newest.

    Example:
        >>> dsq_ckpt.latest("run") is None  # before the first checkpoint
        True
        >>> result = dsq_ckpt.save({"w": torch.randn(256, 256)}, "run/step-000500")
        >>> dsq_ckpt.latest("run")
        'run/step-000500'
    """
    expect("run", run, (str, os.PathLike), "the directory of a run, as a str or a Path: latest(run)")
    problems: list[tuple[Path, DSQError]] = []
    rank = rank_in_job()
    directory = resolve_run(run, rank)
    found = list(iter_checkpoints(directory, lambda path, error: problems.append((path, error))))
    older = set[str]().union(*(manifest.get_older_save_ids() for _, manifest in found))
    for path, error in problems:
        saves = {entry.name[:16] for entry in get_storage(path).list_entries(path) if entry.name.endswith(".index")}
        if not saves or not saves <= older:
            raise type(error)(
                f"{error}; that checkpoint may be the newest of '{run}': restore or delete it, or name the checkpoint "
                "to go on from"
            ) from error
    if not found:
        warn_about_unrelated_directory(directory, rank)
        return None
    return str(found[-1][0])
