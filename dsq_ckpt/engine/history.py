"""`SaveHistory`: the checkpoints that a training process wrote or read, and the codes of the newest.

A process may train several states, such as a generator and its discriminator, and save them in one run directory or in
several. A `SaveHistory` is a short list of checkpoints, newest first, each with the names and shapes of its tensors,
which identify the state. All callers in a process share the default history unless they pass their own, so that
`dsq_ckpt.load` and a `Compressor` know the same checkpoints.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsq_ckpt.core.arrays import F32, Codes
from dsq_ckpt.engine import other_jobs
from dsq_ckpt.engine.back_off import BackOff
from dsq_ckpt.engine.shapes import Shapes, is_continuation, read_shapes
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.frozen_tensors import ChangeWatch
from dsq_ckpt.quantization.layout import ParentModel
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.paths import expand_path, resolve_checkpoint_path
from dsq_ckpt.storage.runs import get_run
from dsq_ckpt.storage.shard import RecordRef, RefinementSymbols

_MAX_CHECKPOINTS = 64
"""Most checkpoints in a history, over all run directories; the next save of a state beyond them is a keyframe."""
_MAX_CACHES = 4
"""Most checkpoints that keep codes and codebooks in memory; those of others are read from files when needed."""


class ParentRef(NamedTuple):
    """A checkpoint to code against; plain strings and numbers, so that DCP can send it in a plan."""

    save_id: str
    path: str
    depth: int
    lossy_resumes: int = 0
    """Lossy resumes of the next checkpoint: one more than before if this process loaded this one and it is lossy."""
    position: int = 1
    """Position of the next checkpoint, from 1, among consecutive ones with this parent; 0: the parent is not shared."""


@dataclass
class ChunkCache:
    """Chunks of a checkpoint that this rank keeps in memory for its next save.

    Attributes:
        codes: codes of each chunk, if `delta.against` is "codes"; 1 byte per element.
        values: decoded base layer of each chunk, if `delta.against` is "values"; float32, flat.
        device_codes: `codes` in device memory, of chunks that were quantized there; 1 byte per element.
        refinement: symbols of the refinement of each chunk that the next one may be the difference to.
        back_off: wait until a difference of refinement is tried again.
        refs: the record of each chunk, so that the index, which has the chunks of all ranks, need not be read.
    """

    codes: dict[ChunkKey, Codes] = field(default_factory=dict)
    values: dict[ChunkKey, F32] = field(default_factory=dict)
    device_codes: dict[ChunkKey, torch.Tensor] = field(default_factory=dict)
    refinement: dict[ChunkKey, RefinementSymbols] = field(default_factory=dict)
    back_off: BackOff = field(default_factory=BackOff)
    refs: dict[ChunkKey, RecordRef] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.codes or self.values or self.device_codes)


@dataclass(eq=False)
class KnownCheckpoint:
    """A checkpoint that this process wrote or read.

    Attributes:
        save_id: id of the save that wrote it.
        path: its directory.
        shapes: shapes of its tensors; None until they are read from its files.
        cache: its chunks on this rank.
        previous: save id of the previous checkpoint.
        follows_in_run: whether the previous checkpoint lies in the same run directory, so that the run is in use.
        shared_parent: save id of its parent, if the next checkpoint is to have the same one; then it has no cache.
        loaded: whether it was loaded, so that the next save comes from a restored state.
        complete: whether it is known to be committed; otherwise its manifest must be read.
        suspect: whether it may be damaged: a save against it failed, or a load met a damaged file.
        model: codebooks and scales for a child, if this process wrote the index; None: the index must be read.
        lossy: names of its lossy weights, if this process saved it.
        watch: observations of its training, up to this checkpoint.
    """

    save_id: str
    path: Path
    shapes: Shapes | None = None
    cache: ChunkCache = field(default_factory=ChunkCache)
    previous: str | None = None
    follows_in_run: bool = False
    shared_parent: str | None = None
    loaded: bool = False
    complete: bool = False
    suspect: bool = False
    model: ParentModel | None = None
    lossy: frozenset[str] | None = None
    watch: ChangeWatch = field(default_factory=ChangeWatch)

    @property
    def run(self) -> Path:
        return get_run(self.path)


Outline = list[KnownCheckpoint]
"""A history without cached chunks: plain data for another process."""


class SaveHistory:
    """The checkpoints that a training process wrote or read, and that its next saves may continue.

    Pass one to `DSQStorageWriter`, `DSQStorageReader`, `save`, `load` or `Compressor` to train independent runs in one
    process, even in the same directory; by default all share one history.

    It is pickled as a reference: in another process it becomes the history that was passed there before, or a new one.

    Example:
        >>> history = dsq_ckpt.SaveHistory()
        >>> state = {"w": torch.randn(256, 256)}
        >>> first = dsq_ckpt.save(state, "run/step-000500", history=history)
        >>> second = dsq_ckpt.save(state, "run/step-001000", history=history)
        >>> second.depth  # coded against the first
        1
    """

    def __init__(self) -> None:
        self._key = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._known: list[KnownCheckpoint] = []
        self.warned_since_keyframe: dict[str, bool] = {}
        """Names of tensors that the user was warned of since the last keyframe, and whether they were exact then."""
        self.warned_in_run = set[str]()
        """Groups whose update error exceeds its bound, and rounded weights, that were warned of since the run began."""
        _histories[self._key] = self

    @classmethod
    def _with_key(cls, key: str) -> SaveHistory:
        history = cls()
        history._key = key
        _histories[key] = history
        return history

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_by_key, (self._key,)

    def __repr__(self) -> str:
        return f"SaveHistory({len(self._known)} checkpoints)"

    def checkpoints(self, run: Path | None = None) -> list[KnownCheckpoint]:
        """Return the known checkpoints of a run directory, or of all, newest first."""
        with self._lock:
            return [checkpoint for checkpoint in self._known if run is None or checkpoint.run == run]

    def find(self, save_id: str) -> KnownCheckpoint | None:
        """Return a checkpoint by its save id, None if it is not known."""
        return next((checkpoint for checkpoint in self.checkpoints() if checkpoint.save_id == save_id), None)

    def add_pending(
        self, new: KnownCheckpoint, previous: ParentRef | None = None, parent: str | None = None
    ) -> None:
        """Add the checkpoint of a save under way; it takes effect once its manifest exists.

        Args:
            new: the checkpoint.
            previous: the previous checkpoint.
            parent: save id of the parent.
        """
        other_jobs.add_own(new.path, new.save_id)
        new.watch.save_ids.add(new.save_id)
        with self._lock:
            self._known[:] = [checkpoint for checkpoint in self._known if checkpoint.save_id != new.save_id]
            for other in self.checkpoints(new.run):
                if other.shapes is None and ensure_shapes(other):
                    self._mark_complete(other)  # another process committed it
            if previous is not None:
                new.previous, new.follows_in_run = previous.save_id, get_run(expand_path(previous.path)) == new.run
                if (before := self.find(previous.save_id)) is not None:
                    self._mark_complete(before)  # the coordinator read its manifest
            for other in self.checkpoints():
                # If each checkpoint has a run directory of its own, no later save would free these caches.
                if not other.cache or other.save_id in (new.previous, parent) or not _is_same_state(new, other):
                    continue
                if other.run == new.run or not other.follows_in_run:
                    other.cache = ChunkCache()
            self._known.insert(0, new)
            self._trim()

    def add_committed(self, path: Path, save_id: str, model: ParentModel | None = None) -> None:
        """Mark a checkpoint as committed: the next save of its state in its run is coded against it.

        Args:
            path: directory of the checkpoint.
            save_id: id of the save that wrote it.
            model: see `KnownCheckpoint`.
        """
        other_jobs.add_own(path, save_id)
        with self._lock:
            checkpoint = self.find(save_id)
            if checkpoint is None:
                with suppress(DSQError):  # without its index, nothing can be coded against it either
                    checkpoint = KnownCheckpoint(save_id, path.absolute(), _read_shapes_at(path, save_id))
                    self._known.append(checkpoint)
            if checkpoint is not None:
                checkpoint.model = model or checkpoint.model
                self._mark_complete(checkpoint)
            self._trim()

    def add_loaded(self, path: Path, save_id: str, cache: ChunkCache, files: CheckpointFiles | None = None) -> None:
        """Add a loaded checkpoint: the next save of its state is coded against it, whatever was saved after it.

        Args:
            path: directory of the checkpoint.
            save_id: id of the save that wrote it.
            cache: chunks of this rank.
            files: the checkpoint, if it is open.
        """
        other_jobs.add_loaded(path, save_id)
        with self._lock:
            with suppress(DSQError):  # it was replaced since
                shapes = _read_shapes_at(path, save_id) if files is None else read_shapes(files)
                new = KnownCheckpoint(save_id, path.absolute(), shapes, cache, loaded=True, complete=True)
                replaced = [
                    checkpoint for checkpoint in self._known
                    if checkpoint.save_id == save_id or (checkpoint.run == new.run and _is_same_state(new, checkpoint))
                ]
                # this load may not have read the damaged part
                new.suspect = any(checkpoint.suspect for checkpoint in replaced)
                new.watch = next(
                    (checkpoint.watch for checkpoint in replaced if save_id in checkpoint.watch.save_ids), new.watch
                )
                new.watch.save_ids.add(save_id)
                new.lossy = next((checkpoint.lossy for checkpoint in replaced if checkpoint.save_id == save_id), None)
                self._known[:] = [new, *(checkpoint for checkpoint in self._known if checkpoint not in replaced)]
            self._trim()

    def move(self, save_id: str, path: Path) -> None:
        """Record that the directory of a checkpoint was renamed within its run directory."""
        with self._lock:
            if (checkpoint := self.find(save_id)) is not None:
                checkpoint.path = path.absolute()

    def remove(self, save_id: str) -> None:
        """Remove the checkpoint of a save that failed, and its cached chunks."""
        with self._lock:
            self._known[:] = [checkpoint for checkpoint in self._known if checkpoint.save_id != save_id]

    def outline(self) -> Outline:
        """Return the known checkpoints without their cached chunks."""
        return [replace(checkpoint, cache=ChunkCache()) for checkpoint in self.checkpoints()]

    def adopt(self, outline: Outline) -> None:
        """Replace the known checkpoints by those of another process; keep the chunks that are cached here."""
        with self._lock:
            own_checkpoints = {checkpoint.save_id: checkpoint for checkpoint in self._known}
            adopted = {checkpoint.save_id: checkpoint for checkpoint in outline}
            for save_id in own_checkpoints.keys() & adopted.keys():
                entry = own_checkpoints[save_id]
                shared_parent = adopted[save_id].shared_parent or entry.shared_parent  # unknown to the other process
                adopted[save_id] = replace(
                    adopted[save_id], cache=entry.cache, shared_parent=shared_parent, watch=entry.watch,
                    lossy=entry.lossy,
                )
            shared = {checkpoint.shared_parent for checkpoint in adopted.values()} - {None} - adopted.keys()
            self._known[:] = [
                *adopted.values(), *(checkpoint for checkpoint in self._known if checkpoint.save_id in shared)
            ]

    def clear(self, path: str | os.PathLike[str] | None = None) -> None:
        """Forget the checkpoints of a run, so that its next save writes a keyframe.

        Args:
            path: a checkpoint of the run, whether it exists or not; None: forget all runs.
        """
        run = None if path is None else get_run(resolve_checkpoint_path(path))
        other_jobs.forget_run_watches(run)
        with self._lock:
            self._known[:] = [checkpoint for checkpoint in self._known if run is not None and checkpoint.run != run]
            self.warned_since_keyframe.clear()
            self.warned_in_run.clear()

    def mark_suspect(self) -> None:
        """Mark all checkpoints as suspect after a load met a damaged file; the next save checks its parent completely.

        All are marked because files are shared beyond a run directory too.
        """
        for checkpoint in self.checkpoints():
            checkpoint.suspect = True

    def release_device_codes(self, path: Path) -> None:
        """Free the codes in device memory of the run of `path`: its next checkpoint is a keyframe."""
        for checkpoint in self.checkpoints(get_run(path)):
            checkpoint.cache.device_codes.clear()

    def _mark_complete(self, new: KnownCheckpoint) -> None:
        """Drop the checkpoints that a committed one replaces: older ones of its state in its run."""
        new.complete = True
        index = self._known.index(new)
        for other in self._known[index + 1 :]:
            replaced = other.save_id == new.previous
            if other.save_id == new.shared_parent:
                continue
            if other.run == new.run and (replaced or _is_same_state(new, other)):
                self._known.remove(other)
            elif replaced:
                other.cache = ChunkCache()

    def _trim(self) -> None:
        del self._known[_MAX_CHECKPOINTS:]
        for checkpoint in [checkpoint for checkpoint in self._known if checkpoint.cache][_MAX_CACHES:]:
            checkpoint.cache = ChunkCache()
        for checkpoint in [checkpoint for checkpoint in self._known if checkpoint.model is not None][_MAX_CACHES:]:
            checkpoint.model = None

    def _reset_caches(self) -> None:
        """Renew the lock, which a thread of the parent may have held while it filled codes, and drop the caches."""
        self._lock = threading.RLock()
        for checkpoint in self._known:
            _parent_caches.append(checkpoint.cache)
            checkpoint.cache = ChunkCache()


_histories: weakref.WeakValueDictionary[str, SaveHistory] = weakref.WeakValueDictionary()
_unpickled: list[SaveHistory] = []  # of another process, newest last; kept alive for its next save
_MAX_UNPICKLED = 8
_parent_caches: list[ChunkCache] = []  # never freed: a forked child cannot use the device that codes may lie on
_default_history = SaveHistory._with_key("default")


def default_history() -> SaveHistory:
    """Return the history that all callers in this process share unless they pass another one."""
    return _default_history


def _get_by_key(key: str) -> SaveHistory:
    if key == _default_history._key:
        return _default_history
    history = _histories.get(key)
    if history is None:
        history = SaveHistory._with_key(key)
        _unpickled.append(history)
        del _unpickled[:-_MAX_UNPICKLED]
    elif history in _unpickled:
        _unpickled.remove(history)
        _unpickled.append(history)
    return history


def _reset_after_fork() -> None:
    for history in list(_histories.values()):
        history._reset_caches()


os.register_at_fork(after_in_child=_reset_after_fork)


def _is_same_state(one: KnownCheckpoint, other: KnownCheckpoint) -> bool:
    a, b = one.shapes, other.shapes
    return a is not None and b is not None and is_continuation(a, b) and is_continuation(b, a)


def ensure_shapes(checkpoint: KnownCheckpoint) -> bool:
    """Return whether the shapes of a checkpoint are known; read them from its files if these exist by now."""
    if checkpoint.shapes is None:
        with suppress(DSQError):
            checkpoint.shapes = _read_shapes_at(checkpoint.path, checkpoint.save_id)
    return checkpoint.shapes is not None


def _read_shapes_at(path: Path, save_id: str) -> Shapes:
    with CheckpointFiles(path) as files:
        if files.manifest.save_id != save_id:
            raise CheckpointNotFound(f"'{path}' is now of save {files.manifest.save_id}, expected {save_id}")
        return read_shapes(files)
