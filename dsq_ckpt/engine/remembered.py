"""Checkpoints that this process wrote or read: what the next save of each state may come after, and its codes.

A process may train several states, such as a generator and its discriminator, and save them in one run directory or in
several. So what is remembered is a short list of checkpoints, newest first, each with the names and shapes of its
tensors, which tell the states apart. It is module-level, because DCP's process mode pickles the writer for every save.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from dsq_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, DSQError
from dsq_ckpt.quantization.chunk import ChunkKey, Codes, Floats32
from dsq_ckpt.storage.files import CheckpointFiles
from dsq_ckpt.storage.manifest import local_path
from dsq_ckpt.storage.runs import run_of

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor of a state, of all ranks, by fully qualified name."""

_MOST = 64
"""Checkpoints remembered at once, over all run directories; the next save of a state beyond them is a keyframe."""
_MOST_MEMORIES = 4
"""How many of these keep codes in memory; those of the others are decoded from their files when they are needed."""


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

    def __bool__(self) -> bool:
        return bool(self.codes or self.values or self.resident)


@dataclass(eq=False)
class Remembered:
    """A checkpoint this process wrote or read.

    Attributes:
        save_id: of the checkpoint.
        path: its directory.
        shapes: of its tensors; None until its files tell them.
        memory: its chunks here.
        previous: save id of the checkpoint it came after.
        follows: that one lies in the same run directory, so that the run is in use.
        loaded: it was loaded: what is saved next comes from a restored state.
        complete: it is known to be committed; of others their manifest tells.
        suspect: it may be damaged: a save that was coded against it failed, or a load met a damaged file.
    """

    save_id: str
    path: Path
    shapes: Shapes | None = None
    memory: Memory = field(default_factory=Memory)
    previous: str | None = None
    follows: bool = False
    loaded: bool = False
    complete: bool = False
    suspect: bool = False

    @property
    def run(self) -> Path:
        return run_of(self.path)


_all: list[Remembered] = []
_lock = threading.RLock()
_inherited: list[Memory] = []  # never freed: a forked child cannot use the device that codes may lie on


def _forked() -> None:
    """In a child: a thread that is not here may have held the lock, or have been about to fill codes."""
    global _lock
    _lock = threading.RLock()
    for one in _all:
        _inherited.append(one.memory)
        one.memory = Memory()


os.register_at_fork(after_in_child=_forked)


def continues(newer: Shapes, older: Shapes) -> bool:
    """Return whether a state is a later one of the training that an older checkpoint is of.

    It is if at least half of the older one's elements, or most of its tensors, are there, by the same names and in the
    same shapes: layers may come, go and change, but neither the discriminator in place of the generator, nor a part of
    a state in place of the whole, makes what was saved before superfluous. Tensors count too, since one whose shape
    changes at every save, such as an encoded text, may have more elements than a small model.
    """
    if not older:
        return not newer
    same = [name for name, shape in older.items() if newer.get(name) == shape]
    return 2 * shared(newer, older) >= shared(older, older) or 2 * len(same) > len(older)


def shared(one: Shapes, other: Shapes) -> int:
    """Return how many elements two states have in tensors of the same names and shapes; a scalar counts as one."""
    return sum(max(1, math.prod(shape)) for name, shape in one.items() if other.get(name) == shape)


def _same(one: Remembered, other: Remembered) -> bool:
    if one.shapes is None or other.shapes is None:
        return False
    return continues(one.shapes, other.shapes) and continues(other.shapes, one.shapes)


def shapes_of(files: CheckpointFiles) -> Shapes:
    """Return the shapes of the tensors in an opened checkpoint.

    Raises:
        CorruptCheckpoint: its index is not as documented.
    """
    try:
        return {str(name): tuple(tensor["shape"]) for name, tensor in files.index["tensors"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"'{files.directory}': the index is not as documented ({error!r})") from error


def known(run: Path | None = None) -> list[Remembered]:
    """Return what is remembered of a run directory, or of all, newest first."""
    with _lock:
        return [one for one in _all if run is None or one.run == run]


def find(save_id: str) -> Remembered | None:
    """Return a checkpoint by its save id, if it is remembered."""
    return next((one for one in known() if one.save_id == save_id), None)


def remember_pending(
    path: Path, save_id: str, memory: Memory, shapes: Shapes | None = None, previous: ParentRef | None = None
) -> None:
    """Take note of what a save under way leaves for the next; it counts once its manifest is there.

    Args:
        path: of the checkpoint.
        save_id: of it.
        memory: chunks of this rank.
        shapes: of the tensors of all ranks; None: not known before its files are there.
        previous: the checkpoint it comes after.
    """
    new = Remembered(save_id, path.absolute(), shapes, memory)
    with _lock:
        _all[:] = [one for one in _all if one.save_id != save_id]
        for other in known(new.run):
            if other.shapes is None and has_shapes(other):
                _complete(other)  # by another process
        if previous is not None:
            new.previous, new.follows = previous.save_id, run_of(Path(previous.path)) == new.run
            if (before := find(previous.save_id)) is not None:
                _complete(before)  # the coordinator read its manifest
        for other in known():
            # Where each checkpoint lies in a directory of its own, no later save would free what the others left.
            passed_by = other.run == new.run or not other.follows
            if other.memory and other.save_id != new.previous and passed_by and _same(new, other):
                other.memory = Memory()
        _all.insert(0, new)
        _bound()


def remember_committed(path: Path, save_id: str) -> None:
    """Take note of a checkpoint that was committed: the parent of the next save of its state in its run."""
    with _lock:
        found = find(save_id)
        if found is None:
            with suppress(DSQError):  # without its index, nothing can be coded against it either
                _all.append(found := Remembered(save_id, path.absolute(), _shapes_at(path, save_id)))
        if found is not None:
            _complete(found)
        _bound()


def remember_loaded(path: Path, save_id: str, memory: Memory) -> None:
    """Take note of a checkpoint that was loaded: the parent of the next save of its state, whatever came after it."""
    with _lock:
        with suppress(DSQError):  # it was replaced since
            new = Remembered(save_id, path.absolute(), _shapes_at(path, save_id), memory, loaded=True, complete=True)
            replaced = [one for one in _all if one.save_id == save_id or (one.run == new.run and _same(new, one))]
            new.suspect = any(one.suspect for one in replaced)  # less may have been read than what is damaged
            _all[:] = [new, *(one for one in _all if one not in replaced)]
        _bound()


def has_shapes(one: Remembered) -> bool:
    """Return whether the shapes of a checkpoint are known, or its files are there by now and tell them."""
    if one.shapes is None:
        with suppress(DSQError):
            one.shapes = _shapes_at(one.path, one.save_id)
    return one.shapes is not None


Outline = list[Remembered]


def outline() -> Outline:
    """Return which checkpoints this process knows, without their chunks; plain data for another process."""
    return [replace(one, memory=Memory()) for one in known()]


def adopt(those: Outline) -> None:
    """Know the checkpoints that another process knows, in place of one's own; what is known of their chunks stays."""
    with _lock:
        memories = {one.save_id: one.memory for one in _all}
        _all[:] = [replace(one, memory=memories.get(one.save_id, one.memory)) for one in those]


def forget(path: str | os.PathLike[str] | None = None) -> None:
    """Forget what is known of the run that the checkpoint at `path` belongs to, or of all; then comes a keyframe."""
    run = None if path is None else run_of(local_path(path))
    with _lock:
        _all[:] = [one for one in _all if run is not None and one.run != run]


def doubt() -> None:
    """Take note that a load met a damaged file: whatever is coded against next is checked whole before.

    That is all that is remembered, since checkpoints share files beyond their run directory too.
    """
    for one in known():
        one.suspect = True


def release_resident(path: Path) -> None:
    """Free codes in device memory that the run of `path` left there: its next checkpoint is a keyframe."""
    for one in known(run_of(path)):
        one.memory.resident.clear()


@contextmanager
def apart() -> Iterator[None]:
    """Let nothing that is known be used in here, nor be different afterwards."""
    with _lock:
        before, _all[:] = list(_all), []
    try:
        yield
    finally:
        with _lock:
            _all[:] = before


def _complete(new: Remembered) -> None:
    """Drop what a committed checkpoint takes the place of: older ones of its state in its run."""
    new.complete = True
    place = _all.index(new)
    for other in _all[place + 1 :]:
        replaced = other.save_id == new.previous
        if other.run == new.run and (replaced or _same(new, other)):
            _all.remove(other)
        elif replaced:
            other.memory = Memory()


def _bound() -> None:
    del _all[_MOST:]
    for one in [one for one in _all if one.memory][_MOST_MEMORIES:]:
        one.memory = Memory()


def _shapes_at(path: Path, save_id: str) -> Shapes:
    with CheckpointFiles(path) as files:
        if files.manifest.save_id != save_id:
            raise CheckpointNotFound(f"'{path}' is now of save {files.manifest.save_id}, expected {save_id}")
        return shapes_of(files)
