"""The gradient log in a run directory: its sessions, and verification of its segments."""

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
        session: name of the session.
        first: oldest step in the segments.
        last: newest step in the segments.
        segments: number of segments.
        bytes: total size of the segments.
        steps: number of distinct steps in the segments.
        snapshot: name of the newest snapshot of the session; None if there is none, so that nothing can be replayed.
        complete: last step that can be recovered; None without a snapshot.
        ended: why recovery ends at this step, if anything is missing or damaged; else None.
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


def list_log_sessions(run: Path) -> list[LogSession]:
    """Return the sessions of the gradient log in a run directory, oldest first; empty without a log."""
    if is_remote(run) or not (run / "log").is_dir():
        return []
    from dsq_ckpt.lowdiff import segments, snapshots  # imports torch, only for runs with a log

    files: dict[str, list[tuple[segments.SegmentName, Path]]] = {}
    for name, path in segments.list_segments(run):
        files.setdefault(name.session, []).append((name, path))
    if not files:
        return []
    newest: dict[str, tuple[str, int]] = {}
    for path, _ in snapshots.list_snapshots(run):
        meta = snapshots.read_metadata(path)
        if meta is not None:
            newest.setdefault(meta["session"], (path.name, int(meta["step"])))
    sessions = []
    for session, named_paths in files.items():
        snapshot = newest.get(session)
        complete, ended = None, None
        if snapshot is not None:
            replayable = segments.replayable_steps(run, session, snapshot[1])
            complete, ended = snapshot[1] + len(replayable.segments), replayable.ended
        steps = {step for name, _ in named_paths for step in range(name.first, name.last + 1)}
        sessions.append(LogSession(
            session, min(steps), max(steps), len(named_paths), sum(path.stat().st_size for _, path in named_paths),
            len(steps), None if snapshot is None else snapshot[0], complete, ended,
        ))
    return sorted(sessions, key=lambda session: (session.first, session.session))


def check_segments(run: Path, deep: bool) -> list[tuple[str, int, str | None]]:
    """Read every segment of a run's log; return name, bytes and problem (None if it is intact) of each.

    Args:
        run: run directory.
        deep: also decode the gradients.
    """
    from dsq_ckpt.lowdiff import segments

    results = []
    for _, path in segments.list_segments(run):
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
        except Exception as error:  # any error means that the segment cannot be replayed
            if not os.path.lexists(path):  # training removed the segment after a newer snapshot
                continue
            problem = str(error) or repr(error)
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        results.append((f"{segments.LOG}/{path.name}", size, problem))
    return results
