"""Power cuts: only what was flushed is sure to survive, of everything else any part may.

The calls of real saves are recorded. A trial cuts the recording anywhere and makes one of the directories that a disk
may hold then: a file has what was in it at its last fsync, and perhaps some of what was written since, or zeros; a name
that was given or taken away since the last fsync of its directory may be there or not. In each of them every checkpoint
is as it was before the save or as it is after it, and what was reported as saved is there.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dsq_ckpt
from campaigns import subjects
from campaigns.calls import Operation, recorded, recording
from campaigns.harness import Campaign, Found, told
from campaigns.subjects import State, same, state_at
from dsq_ckpt.storage import gc

SCENES = ("first", "keyframe", "delta", "overwrite", "async")
_CONFIG: State = {
    "quantize": {"min_elements": 256}, "storage": {"block_elements": 1024}, "refinement": {"keep_last": 1},
}
_DIRECTORY = -1


class Disk:
    """What a disk holds: inodes with what was flushed and what was written, and names that are sure or pending."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.names: dict[str, int] = {}
        self.flushed: dict[int, bytes] = {}
        self.directories: dict[int, str] = {root.stat().st_ino: self.root}
        for path in root.rglob("*"):
            inode = path.stat().st_ino
            if path.is_dir():
                self.directories[inode] = str(path)
                self.names[str(path)] = _DIRECTORY
            else:
                self.names[str(path)] = inode
                self.flushed[inode] = path.read_bytes()

    def after(self, operations: Sequence[Operation], rng: random.Random) -> dict[str, bytes | None]:
        """Return possible paths and contents after a power cut that follows these calls; None for a directory."""
        names, now = dict(self.names), dict(self.names)
        flushed, written = dict(self.flushed), dict(self.flushed)
        directories = dict(self.directories)
        pending: list[list[tuple[str, int | None]]] = []
        for call in operations:
            if call.what == "W":
                old = written.get(call.inode, b"").ljust(call.offset, b"\0")
                written[call.inode] = old[: call.offset] + call.data + old[call.offset + len(call.data) :]
            elif call.what == "T":
                written[call.inode] = b""
            elif call.what == "F" and call.inode in directories:
                where = directories[call.inode]
                for change in list(pending):
                    if any(os.path.dirname(path) == where for path, _ in change):
                        _apply(names, change)
                        pending.remove(change)
            elif call.what == "F":
                flushed[call.inode] = written.get(call.inode, b"")
            else:
                change = _change(call, now)
                if call.what == "C":
                    written[call.inode] = b""
                elif call.what == "M":
                    directories[call.inode] = call.one
                _apply(now, change)
                pending.append(change)
        how = rng.choice(["none", "all", "first", "some"])
        count = rng.randrange(len(pending) + 1)
        for place, change in enumerate(pending):
            if how == "all" or (how == "first" and place < count) or (how == "some" and rng.random() < 0.5):
                _apply(names, change)
        contents = {
            inode: _survives(flushed.get(inode), data, rng) for inode, data in written.items()
        }
        return {
            path: None if inode == _DIRECTORY else contents[inode] for path, inode in names.items()
            if self._reached(path, names)
        }

    def _reached(self, path: str, names: dict[str, int]) -> bool:
        above = os.path.dirname(path)
        return above == self.root or (above in names and self._reached(above, names))


def _change(call: Operation, now: dict[str, int]) -> list[tuple[str, int | None]]:
    if call.what == "C":
        return [(call.one, call.inode)]
    if call.what == "M":
        return [(call.one, _DIRECTORY)]
    if call.what == "R":
        return [(call.two, now[call.one]), (call.one, None)]
    if call.what == "X":
        return [(call.two, now[call.one]), (call.one, now[call.two])]
    if call.what == "L":
        return [(call.two, now[call.one])]
    return [(call.one, None)]


def _apply(names: dict[str, int], change: Iterable[tuple[str, int | None]]) -> None:
    for path, inode in change:
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


def _survives(flushed: bytes | None, written: bytes, rng: random.Random) -> bytes:
    """Return a file's content after the power cut: as flushed, as written, or in between."""
    if flushed == written:
        return written
    sure = flushed or b""
    how = rng.choice(["flushed", "written", "zeros", "first"])
    if how == "flushed":
        return sure
    if how == "zeros":
        return sure + bytes(max(0, len(written) - len(sure)))
    return written if how == "written" else written[: rng.randrange(len(written) + 1)]


class Scene(NamedTuple):
    """A recording: the disk before, the calls, how many there had been when each save returned, and what is right.

    Attributes:
        right: by checkpoint, the states that it may have, of which None is: not there.
        final: by checkpoint, the state that it has after the save returned.
    """

    disk: Disk
    calls: list[Operation]
    returned: int
    right: dict[str, list[State | None]]
    final: dict[str, State]


class Power(Campaign):
    """Power cuts."""

    name = "power"
    full = 2500
    few = 15
    preload = True

    def prepare(self) -> None:
        """Record a save of each kind."""
        for scene in SCENES:
            history = dsq_ckpt.SaveHistory()
            root = self.directory / scene
            run, right = root / "deep" / "run", dict[str, list[State | None]]()
            root.mkdir()
            for step in (1, 2) if scene != "first" else ():
                dsq_ckpt.save(state_at(step), run / f"step-{step}", config=_CONFIG, no_dist=True, history=history)
                right[f"step-{step}"] = [subjects.read_all(run / f"step-{step}")]
            if scene != "first":
                subjects.read_like(run / "step-2", history=history)
            disk, log = Disk(root), self.directory / f"{scene}.log"
            target = run / ("step-2" if scene == "overwrite" else "step-3")
            with recording(root, log):
                if scene == "async":
                    dsq_ckpt.async_save(state_at(3), target, config=_CONFIG, history=history).result()
                else:
                    dsq_ckpt.save(
                        state_at(3), target, config=_CONFIG, parent=None if scene == "keyframe" else "auto",
                        overwrite=scene == "overwrite", no_dist=True, history=history,
                    )
                calls = len(recorded(log))
            final = {path.name: subjects.read_all(path) for path in sorted(run.iterdir())}
            for name, state in final.items():
                right.setdefault(name, [None]).append(state)
            tree = Scene(disk, recorded(log), calls, right, final)
            (self.directory / f"{scene}.pickle").write_bytes(pickle.dumps(tree))
            shutil.rmtree(root)

    def begin(self) -> None:
        """Read the recordings."""
        torch.set_num_threads(1)
        self.scenes: dict[str, Scene] = {
            scene: pickle.loads((self.directory / f"{scene}.pickle").read_bytes()) for scene in SCENES
        }
        self.work = self.directory / f"lane-{os.getpid()}"

    def kind(self, number: int) -> str:
        """Return the save that is cut."""
        return SCENES[number % len(SCENES)]

    def trial(self, number: int) -> Found:
        """Make a directory that a power cut may leave, and read it; "detected": the new checkpoint is invisible."""
        rng, scene = self.rng(number), self.scenes[self.kind(number)]
        cut = len(scene.calls) if rng.random() < 0.1 else rng.randrange(len(scene.calls) + 1)
        shutil.rmtree(self.work, ignore_errors=True)
        self._write(scene.disk.after(scene.calls[:cut], rng), scene.disk.root)
        problem, fresh = self._problem(scene, cut)
        if problem is not None:
            return Found("wrong", f"cut after call {cut} of {len(scene.calls)} ({scene.returned}: reported): {problem}")
        return Found("detected" if fresh else "unchanged")

    def _write(self, tree: dict[str, bytes | None], root: str) -> None:
        self.work.mkdir()
        for path in sorted(tree):
            target = self.work / os.path.relpath(path, root)
            data = tree[path]
            if data is None:
                target.mkdir(exist_ok=True)
            else:
                target.write_bytes(data)

    def _problem(self, scene: Scene, cut: int) -> tuple[str | None, bool]:
        """Return the problem, and whether a checkpoint is missing."""
        run = self.work / "deep" / "run"
        states: dict[str, State | None] = {}
        history = dsq_ckpt.SaveHistory()
        for name, right in scene.right.items():
            try:
                states[name] = subjects.read_all(run / name, history=history)
            except dsq_ckpt.CheckpointNotFound:
                states[name] = None
            except dsq_ckpt.DSQError as error:
                return f"{name}: {told(error)}", False
            allowed: list[Any] = right if cut < scene.returned else [scene.final[name]]
            if not any(_alike(states[name], state) for state in allowed):
                return f"{name} {'is not there' if states[name] is None else 'has other values'}", False
        if run.exists():
            dsq_ckpt.save(state_at(4), run / "step-4", config=_CONFIG, no_dist=True, history=history)
            if wrong := subjects.far(subjects.read_all(run / "step-4"), state_at(4)):
                return f"the next save: {wrong}", False
            gc.collect_garbage(run, 0)
            left = [file.name for file in run.rglob("*") if file.name.endswith((".tmp", ".old"))]
            if left:
                return f"left behind after gc: {left}", False
        return None, None in states.values()


def _alike(one: State | None, other: State | None) -> bool:
    return one is other if one is None or other is None else same(one, other)
