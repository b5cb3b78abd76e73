"""The gradient log in a run directory: its sessions, and what is wrong with its segments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsq_ckpt.core.urls import is_remote


@dataclass
class LogSession:
    """The segments of one session of a gradient log.

    Attributes:
        session: its name.
        first: oldest step that is there.
        last: newest step that is there.
        segments: files.
        bytes: of them.
        steps: different steps in them.
        snapshot: name of the newest snapshot of the session; None: there is none, and nothing can be replayed.
        complete: last step that can be recovered; None without a snapshot.
        ended: why the log ends there, if anything is missing or damaged.
    """

    session: str
    first: int
    last: int
    segments: int
    bytes: int
    steps: int
    snapshot: str | None
    complete: int | None
    ended: str | None

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def sessions(run: Path) -> list[LogSession]:
    """Return the sessions of the gradient log in a run directory, oldest first; none if it has no log."""
    if is_remote(run) or not (run / "log").is_dir():
        return []
    from dsq_ckpt.lowdiff import segments, snapshots  # imports torch, which runs without a log do not need

    files: dict[str, list[tuple[segments.Name, Path]]] = {}
    for name, path in segments.names(run):
        files.setdefault(name.session, []).append((name, path))
    if not files:
        return []
    newest: dict[str, tuple[str, int]] = {}
    for path, _ in snapshots.newest_first(run):
        meta = snapshots.read_metadata(path)
        if meta is not None:
            newest.setdefault(meta["session"], (path.name, int(meta["step"])))
    found = []
    for session, named in files.items():
        snapshot = newest.get(session)
        complete, ended = None, None
        if snapshot is not None:
            course = segments.replayable_steps(run, session, snapshot[1])
            complete, ended = snapshot[1] + len(course.segments), course.ended
        steps = {step for name, _ in named for step in range(name.first, name.last + 1)}
        found.append(LogSession(
            session, min(steps), max(steps), len(named), sum(path.stat().st_size for _, path in named), len(steps),
            None if snapshot is None else snapshot[0], complete, ended,
        ))
    return sorted(found, key=lambda one: (one.first, one.session))


def check(run: Path, deep: bool) -> list[tuple[str, int, str | None]]:
    """Read every segment of a run's log: name, bytes, and what is wrong with it (None: nothing).

    Args:
        run: the run directory.
        deep: decode the gradients too.
    """
    from dsq_ckpt.lowdiff import segments

    found = []
    for _, path in segments.names(run):
        problem = None
        try:
            segment = segments.LogSegment(path)
            try:
                for step in segment.steps:
                    segment.buffers(step)
                    if deep:
                        segment.gradients(step)
                    else:
                        segment.blocks(step)
            finally:
                segment.close()
        except Exception as error:  # whatever it is, it cannot be replayed
            if not os.path.lexists(path):  # training removed it, after a snapshot that makes it unnecessary
                continue
            problem = str(error) or repr(error)
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        found.append((f"{segments.LOG}/{path.name}", size, problem))
    return found
