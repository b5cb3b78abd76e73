"""`SaveHistory`: the checkpoints that a training process wrote or read, and the codes of the newest.

A process may train several states, such as a generator and its discriminator, and save them in one run directory or in
several. A `SaveHistory` is a short list of checkpoints, newest first, each with the names and shapes of its tensors,
which tell the states apart. Unless an owner passes one of its own, everything in a process shares the default history,
so that `dsq_ckpt.load` and a `Compressor` know of each other.
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
from dsq_ckpt.engine.shapes import Shapes, continues, shapes_of
from dsq_ckpt.errors import CheckpointNotFound, DSQError
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.frozen_tensors import ChangeWatch
from dsq_ckpt.quantization.layout import ParentModel
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.paths import expand_path, resolve_checkpoint_path
from dsq_ckpt.storage.runs import get_run
from dsq_ckpt.storage.shard import RecordRef

_MOST = 64
"""Checkpoints known at once, over all run directories; the next save of a state beyond them is a keyframe."""
_MOST_CACHES = 4
"""How many of these keep codes and codebooks in memory; those of others are read from their files when needed."""


class ParentRef(NamedTuple):
    """A checkpoint to code against; plain strings and numbers, so that DCP can carry it in a plan."""

    save_id: str
    path: str
    depth: int
    lossy_resumes: int = 0
    """Of the checkpoint that comes after it: its own, and one more if this process loaded it and it is lossy."""
    place: int = 1
    """Position, from 1 on, of the next checkpoint among those in a row with this parent; 0: none is to share it."""


@dataclass
class ChunkCache:
    """Chunks of a checkpoint that this rank keeps in memory for its next save.

    Attributes:
        codes: codes of each chunk, where `delta.against` is "codes"; 1 byte per element.
        values: decoded base layer of each chunk, where `delta.against` is "values"; float32, flat.
        device_codes: `codes` in device memory, of chunks that were quantized there; 1 byte per element.
        refs: the record of each chunk, so that the index, which names those of all ranks, need not be read for them.
    """

    codes: dict[ChunkKey, Codes] = field(default_factory=dict)
    values: dict[ChunkKey, F32] = field(default_factory=dict)
    device_codes: dict[ChunkKey, torch.Tensor] = field(default_factory=dict)
    refs: dict[ChunkKey, RecordRef] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.codes or self.values or self.device_codes)


@dataclass(eq=False)
class KnownCheckpoint:
    """A checkpoint that this process wrote or read.

    Attributes:
        save_id: id of the save that wrote it.
        path: its directory.
        shapes: shapes of its tensors; None until its files tell them.
        cache: its chunks on this rank.
        previous: save id of the checkpoint it came after.
        follows: whether that checkpoint lies in the same run directory, so that the run is in use.
        shares: save id of the checkpoint it is coded against, if the next one is to be, too; it has no cache then.
        loaded: whether it was loaded, so that the next save comes from a restored state.
        complete: whether it is known to be committed; otherwise its manifest tells.
        suspect: whether it may be damaged: a save against it failed, or a load met a damaged file.
        model: what its index tells a child, where this process wrote that; None: the index is to be read.
        lossy: names of its lossy weights, where this process saved it.
        watch: what was seen of its training, at it and at those before it.
    """

    save_id: str
    path: Path
    shapes: Shapes | None = None
    cache: ChunkCache = field(default_factory=ChunkCache)
    previous: str | None = None
    follows: bool = False
    shares: str | None = None
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
    """The checkpoints that a training process wrote or read, which its next saves may come after.

    Pass one to `DSQStorageWriter`, `DSQStorageReader`, `save`, `load` or `Compressor` to train two runs in one process
    that are to know nothing of each other, even in the same directory; otherwise all share one history.

    It is pickled as a reference: in another process it is the history that was passed there before, or a new one.

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
        self.told: dict[str, bool] = {}
        """Names of tensors that the user was warned of since the last keyframe, and whether they were exact then."""
        self.said = set[str]()
        """Groups whose next update breaks its bound, and rounded weights, that a save spoke of since the run began."""
        _histories[self._key] = self

    @classmethod
    def _with_key(cls, key: str) -> SaveHistory:
        made = cls()
        made._key = key
        _histories[key] = made
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_key, (self._key,)

    def __repr__(self) -> str:
        return f"SaveHistory({len(self._known)} checkpoints)"

    def checkpoints(self, run: Path | None = None) -> list[KnownCheckpoint]:
        """Return the known checkpoints of a run directory, or of all, newest first."""
        with self._lock:
            return [one for one in self._known if run is None or one.run == run]

    def find(self, save_id: str) -> KnownCheckpoint | None:
        """Return a checkpoint by its save id, None if it is not known."""
        return next((one for one in self.checkpoints() if one.save_id == save_id), None)

    def add_pending(
        self, new: KnownCheckpoint, previous: ParentRef | None = None, parent: str | None = None
    ) -> None:
        """Add the checkpoint of a save under way; it counts once its manifest is there.

        Args:
            new: the checkpoint.
            previous: the checkpoint it comes after.
            parent: save id of the checkpoint it is coded against.
        """
        other_jobs.note_own(new.path, new.save_id)
        new.watch.save_ids.add(new.save_id)
        with self._lock:
            self._known[:] = [one for one in self._known if one.save_id != new.save_id]
            for other in self.checkpoints(new.run):
                if other.shapes is None and has_shapes(other):
                    self._complete(other)  # by another process
            if previous is not None:
                new.previous, new.follows = previous.save_id, get_run(expand_path(previous.path)) == new.run
                if (before := self.find(previous.save_id)) is not None:
                    self._complete(before)  # the coordinator read its manifest
            for other in self.checkpoints():
                # Where each checkpoint has a run directory of its own, no later save would free these caches.
                passed_by = other.run == new.run or not other.follows
                if other.cache and other.save_id not in (new.previous, parent) and passed_by and _same(new, other):
                    other.cache = ChunkCache()
            self._known.insert(0, new)
            self._bound()

    def add_committed(self, path: Path, save_id: str, model: ParentModel | None = None) -> None:
        """Mark a checkpoint as committed: it is the parent of the next save of its state in its run; see `model`."""
        other_jobs.note_own(path, save_id)
        with self._lock:
            found = self.find(save_id)
            if found is None:
                with suppress(DSQError):  # without its index, nothing can be coded against it either
                    self._known.append(found := KnownCheckpoint(save_id, path.absolute(), _shapes_at(path, save_id)))
            if found is not None:
                found.model = model or found.model
                self._complete(found)
            self._bound()

    def add_loaded(self, path: Path, save_id: str, cache: ChunkCache, files: CheckpointFiles | None = None) -> None:
        """Add a checkpoint that was loaded: the parent of the next save of its state, whatever came after it.

        Args:
            path: directory of the checkpoint.
            save_id: id of the save that wrote it.
            cache: chunks of this rank.
            files: the checkpoint, if it is open.
        """
        other_jobs.note_loaded(path, save_id)
        with self._lock:
            with suppress(DSQError):  # it was replaced since
                shapes = _shapes_at(path, save_id) if files is None else shapes_of(files)
                new = KnownCheckpoint(save_id, path.absolute(), shapes, cache, loaded=True, complete=True)
                replaced = [
                    one for one in self._known if one.save_id == save_id or (one.run == new.run and _same(new, one))
                ]
                new.suspect = any(one.suspect for one in replaced)  # this load may not have read the damaged part
                new.watch = next((one.watch for one in replaced if save_id in one.watch.save_ids), new.watch)
                new.watch.save_ids.add(save_id)
                new.lossy = next((one.lossy for one in replaced if one.save_id == save_id), None)
                self._known[:] = [new, *(one for one in self._known if one not in replaced)]
            self._bound()

    def move(self, save_id: str, path: Path) -> None:
        """Note that the directory of a checkpoint was renamed within its run directory."""
        with self._lock:
            if (found := self.find(save_id)) is not None:
                found.path = path.absolute()

    def remove(self, save_id: str) -> None:
        """Remove the checkpoint of a save that failed, and its cached chunks."""
        with self._lock:
            self._known[:] = [one for one in self._known if one.save_id != save_id]

    def outline(self) -> Outline:
        """Return the known checkpoints without their chunks."""
        return [replace(one, cache=ChunkCache()) for one in self.checkpoints()]

    def adopt(self, outline: Outline) -> None:
        """Replace the known checkpoints by those of another process; chunks that are cached here stay."""
        with self._lock:
            own = {one.save_id: one for one in self._known}
            adopted = {one.save_id: one for one in outline}
            for save_id in own.keys() & adopted.keys():
                known = own[save_id]
                shares = adopted[save_id].shares or known.shares  # the other process does not know what it was
                adopted[save_id] = replace(
                    adopted[save_id], cache=known.cache, shares=shares, watch=known.watch, lossy=known.lossy
                )
            shared = {one.shares for one in adopted.values()} - {None} - adopted.keys()
            self._known[:] = [*adopted.values(), *(one for one in self._known if one.save_id in shared)]

    def clear(self, path: str | os.PathLike[str] | None = None) -> None:
        """Forget the run that the checkpoint at `path` belongs to, or all; the next save there is a keyframe."""
        run = None if path is None else get_run(resolve_checkpoint_path(path))
        other_jobs.forget(run)
        with self._lock:
            self._known[:] = [one for one in self._known if run is not None and one.run != run]
            self.told.clear()
            self.said.clear()

    def doubt(self) -> None:
        """Note that a load met a damaged file: the parent of the next save is checked completely first.

        All checkpoints are marked, since they share files beyond their run directory too.
        """
        for one in self.checkpoints():
            one.suspect = True

    def release_device_codes(self, path: Path) -> None:
        """Free the codes in device memory of the run of `path`: its next checkpoint is a keyframe."""
        for one in self.checkpoints(get_run(path)):
            one.cache.device_codes.clear()

    def _complete(self, new: KnownCheckpoint) -> None:
        """Drop the checkpoints that a committed one takes the place of: older ones of its state in its run."""
        new.complete = True
        place = self._known.index(new)
        for other in self._known[place + 1 :]:
            replaced = other.save_id == new.previous
            if other.save_id == new.shares:
                continue
            if other.run == new.run and (replaced or _same(new, other)):
                self._known.remove(other)
            elif replaced:
                other.cache = ChunkCache()

    def _bound(self) -> None:
        del self._known[_MOST:]
        for one in [one for one in self._known if one.cache][_MOST_CACHES:]:
            one.cache = ChunkCache()
        for one in [one for one in self._known if one.model is not None][_MOST_CACHES:]:
            one.model = None

    def _after_fork(self) -> None:
        """Renew the lock, which a thread that is not in the child may have held while it filled codes."""
        self._lock = threading.RLock()
        for one in self._known:
            _inherited.append(one.cache)
            one.cache = ChunkCache()


_histories: weakref.WeakValueDictionary[str, SaveHistory] = weakref.WeakValueDictionary()
_unpickled: list[SaveHistory] = []  # of another process, newest last: kept, as its next save is to find them
_MOST_UNPICKLED = 8
_inherited: list[ChunkCache] = []  # never freed: a forked child cannot use the device that codes may lie on
_DEFAULT = SaveHistory._with_key("default")


def default_history() -> SaveHistory:
    """Return the history that everything in this process shares unless it is given another one."""
    return _DEFAULT


def forget(path: str | os.PathLike[str] | None = None) -> None:
    """Clear the default history; see `SaveHistory.clear`."""
    _DEFAULT.clear(path)


def _of_key(key: str) -> SaveHistory:
    if key == _DEFAULT._key:
        return _DEFAULT
    found = _histories.get(key)
    if found is None:
        found = SaveHistory._with_key(key)
        _unpickled.append(found)
        del _unpickled[:-_MOST_UNPICKLED]
    elif found in _unpickled:
        _unpickled.remove(found)
        _unpickled.append(found)
    return found


def _forked() -> None:
    for one in list(_histories.values()):
        one._after_fork()


os.register_at_fork(after_in_child=_forked)


def _same(one: KnownCheckpoint, other: KnownCheckpoint) -> bool:
    own, others = one.shapes, other.shapes
    return own is not None and others is not None and continues(own, others) and continues(others, own)


def has_shapes(one: KnownCheckpoint) -> bool:
    """Return whether the shapes of a checkpoint are known, or its files are there by now and tell them."""
    if one.shapes is None:
        with suppress(DSQError):
            one.shapes = _shapes_at(one.path, one.save_id)
    return one.shapes is not None


def _shapes_at(path: Path, save_id: str) -> Shapes:
    with CheckpointFiles(path) as files:
        if files.manifest.save_id != save_id:
            raise CheckpointNotFound(f"'{path}' is now of save {files.manifest.save_id}, expected {save_id}")
        return shapes_of(files)
