"""Segments of a gradient log: files of consecutive steps, one for each rank and batch; see `docs/format.md`.

A segment is a container (`dsq_ckpt.storage.container`). A segment appears complete or not at all, and every byte is
covered by a checksum. Segments are independent of each other.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsq_ckpt.core.regular_files import read_regular, unreadable_error
from dsq_ckpt.core.strict_json import parse_strict_json
from dsq_ckpt.errors import CodingError, CorruptCheckpoint, DSQError, UnsupportedFormat
from dsq_ckpt.lowdiff.encoding import decode_gradient, decode_sparse_indices
from dsq_ckpt.lowdiff.train_state import ParameterEntry, entries_from
from dsq_ckpt.storage.atomic_io import AtomicFile, sync_directory
from dsq_ckpt.storage.container import Block, ContainerReader, ContainerWriter, FileInfo
from dsq_ckpt.storage.record_fields import parse_dtype

LOG = "log"
"""Name of the directory of segments in a run directory."""
_VERSION = 1
_MAX_MARKER_BYTES = 1 << 16
SESSION = re.compile(r"[0-9a-f]{16}")
"""Names of sessions."""
_NAME = re.compile(rf"(?P<session>{SESSION.pattern})-(?P<first>\d{{9,}})-(?P<last>\d{{9,}})-(?P<rank>\d{{5,}})\.grads")
_MAX_STEPS = 1 << 20  # per segment: readers allocate tables of steps, and a file name has no checksum
_TEMPORARY = re.compile(rf"\.(?:{_NAME.pattern}|{SESSION.pattern}\.closed)\.(?:dsq-)?[0-9a-f]{{8}}\.tmp")


class EncodedStep(NamedTuple):
    """An encoded step of a segment.

    Attributes:
        number: number of the step; the first step of a run is 1.
        record: plain data with the keys hyper, after, grads, buffers.
        blocks: byte blocks that `record` refers to by number.
    """

    number: int
    record: dict[str, Any]
    blocks: list[bytes]


class SegmentName(NamedTuple):
    """The parts of a segment's file name: session, first and last step, rank."""

    session: str
    first: int
    last: int
    rank: int

    @classmethod
    def from_path(cls, path: Path) -> SegmentName | None:
        """Parse a file name; return None if it is not the name of a segment."""
        match = _NAME.fullmatch(path.name)
        if match is None:
            return None
        first, last = int(match["first"]), int(match["last"])
        if not 0 <= last - first < _MAX_STEPS:
            return None
        return cls(match["session"], first, last, int(match["rank"]))

    def __str__(self) -> str:
        return f"{self.session}-{self.first:09d}-{self.last:09d}-{self.rank:05d}.grads"


def write_segment(
    run: Path, session: str, rank: int, ranks: int, entries: Sequence[ParameterEntry], steps: Sequence[EncodedStep],
    fsync: bool,
) -> FileInfo:
    """Write consecutive steps as one file.

    Args:
        run: run directory with a log.
        session: session of the log.
        rank: rank that logged the steps.
        ranks: number of ranks that share the parameters.
        entries: parameters that this rank logs.
        steps: consecutive steps.
        fsync: flush the file to the device.

    Raises:
        OSError: the file cannot be written; no part of it remains.
    """
    name = str(SegmentName(session, steps[0].number, steps[-1].number, rank))
    with ContainerWriter(run / LOG, name, fsync) as writer:
        listing = []
        for step in steps:
            blocks = [list(writer.add(block)) for block in step.blocks]
            listing.append({"step": step.number, "blocks": blocks, **step.record})
        info = writer.finish({
            "log": _VERSION, "session": session, "rank": rank, "ranks": ranks,
            "parameters": [list(entry) for entry in entries], "steps": listing,
        })
    if fsync:
        sync_directory(run / LOG)
    return info


class LogSegment:
    """A segment opened for reading.

    Attributes:
        entries: parameters of the segment's rank.
        steps: record of each step, by number.

    Raises:
        CorruptCheckpoint, UnsupportedFormat: the file is truncated, altered, newer, or does not match its name.
    """

    def __init__(self, path: Path) -> None:
        name = SegmentName.from_path(path)
        assert name is not None
        self.path = path
        self._reader: ContainerReader | None = ContainerReader(path)
        try:
            contents = self._reader.contents
            if contents.get("log", _VERSION) > _VERSION:
                raise UnsupportedFormat(
                    f"'{path}' is a log of version {contents['log']}, this dsq_ckpt reads up to {_VERSION}; upgrade it"
                )
            self.rank, self.ranks = int(contents["rank"]), int(contents["ranks"])
            self.entries = entries_from(contents["parameters"])
            self.steps: dict[int, dict[str, Any]] = {int(step["step"]): step for step in contents["steps"]}
            actual = SegmentName(contents["session"], min(self.steps), max(self.steps), int(contents["rank"]))
            if actual != name or len(self.steps) != name.last - name.first + 1:
                raise CorruptCheckpoint(f"'{path}' holds {actual}, not what its name says: it was renamed or altered")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpoint(f"'{path}' is no segment of a gradient log: {error!r}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the file until the next read, since a log may have more files than a process may open."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def blocks(self, step: int) -> list[bytes]:
        """Return the blocks of a step, verified by their checksums."""
        if self._reader is None:
            self._reader = ContainerReader(self.path)
        return [self._reader.read(Block(*block)) for block in self.steps[step]["blocks"]]

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        """Return the flat gradients of a step by name, without parameters that had no gradient.

        Raises:
            CorruptCheckpoint: the segment's data is inconsistent.
        """
        gradients: dict[str, torch.Tensor] = {}
        with self.translate_errors(step):
            blocks = self.blocks(step)
            for encoded in self.steps[step]["grads"]:
                entries = [self.entries[number] for number in encoded["params"]]
                sizes = [entry.elements for entry in entries]
                flat = torch.empty(sum(sizes), dtype=parse_dtype(encoded["dtype"]))
                decode_gradient(encoded, flat, blocks.__getitem__)
                for entry, gradient in zip(entries, flat.split(sizes), strict=True):
                    gradients[entry.name] = gradient
        return gradients

    def sent_indices(self, step: int) -> dict[str, torch.Tensor | None]:
        """Return the int64 indices of the elements sent in a step, by name; None for all elements.

        Raises:
            CorruptCheckpoint: the segment's data is inconsistent.
        """
        sent: dict[str, torch.Tensor | None] = {}
        with self.translate_errors(step):
            blocks = self.blocks(step)
            for encoded in self.steps[step]["grads"]:
                entries = [self.entries[number] for number in encoded["params"]]
                if encoded["as"] != "sparse":
                    sent |= dict.fromkeys(entry.name for entry in entries)
                    continue
                sizes = [entry.elements for entry in entries]
                flat = decode_sparse_indices(encoded, sum(sizes), blocks.__getitem__)
                bounds = torch.tensor([0, *sizes]).cumsum(0)
                cuts = torch.searchsorted(flat, bounds).tolist()
                for number, entry in enumerate(entries):
                    sent[entry.name] = flat[cuts[number] : cuts[number + 1]] - bounds[number]
        return sent

    @contextmanager
    def translate_errors(self, step: int) -> Iterator[None]:
        """Return a context in which errors name the segment and the step."""
        try:
            yield
        except DSQError as error:
            if str(self.path) in str(error):
                raise
            kind = CorruptCheckpoint if isinstance(error, CodingError) else type(error)
            raise kind(f"'{self.path}', step {step}: {error}") from error
        except (
            KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError, AttributeError, AssertionError,
        ) as error:  # also errors of the optimizer, which asserts the types of hyperparameters
            raise CorruptCheckpoint(f"'{self.path}', step {step}: {error!r}") from error

    def buffers(self, step: int) -> dict[str, torch.Tensor]:
        """Return the buffers of the model that changed in a step, by name.

        Raises:
            CorruptCheckpoint: the segment's data is inconsistent.
        """
        buffers = {}
        with self.translate_errors(step):
            blocks = self.blocks(step)
            for name, dtype_string, shape, block in self.steps[step].get("buffers", ()):
                raw, dtype = bytearray(blocks[block]), parse_dtype(dtype_string)
                if len(raw) != torch.Size(shape).numel() * dtype.itemsize:
                    raise CorruptCheckpoint(f"buffer '{name}' has {len(raw)} bytes")
                buffers[name] = (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).view(shape)
        return buffers

    def hyper_and_after(self, step: int) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
        """Return the hyperparameters of each group in a step, and a dictionary with `hyper` and `states` after it.

        The hyperparameters are None if the optimizer made no step.

        Raises:
            CorruptCheckpoint: the segment's data is inconsistent.
        """
        with self.translate_errors(step):
            record = self.steps[step]
            hyper, after = record["hyper"], record["after"]
            for groups in (hyper, after["hyper"]):
                if groups is not None and not all(isinstance(group, dict) for group in groups):
                    raise CorruptCheckpoint("hyperparameters are no objects")
            if not isinstance(after["states"], dict):
                raise CorruptCheckpoint("states are no object")
            return hyper, after


def list_segments(run: Path, session: str | None = None) -> list[tuple[SegmentName, Path]]:
    """Return name and path of the segments of a run in order, of one session or of all sessions."""
    directory = run / LOG
    segments = []
    for path in directory.iterdir() if directory.is_dir() else ():
        name = SegmentName.from_path(path)
        if name is not None and session in (None, name.session):
            segments.append((name, path))
    return sorted(segments)


def closed_marker_path(run: Path, session: str) -> Path:
    """Return the path of the file that marks a session as closed without a failure."""
    return run / LOG / f"{session}.closed"


def mark_closed(run: Path, session: str, last: int | None, fsync: bool) -> None:
    """Mark a session as closed, with its last step, or None if the session logged no step."""
    path = closed_marker_path(run, session)
    with AtomicFile(path, fsync) as file:
        file.stream.write(json.dumps({"last": last}).encode())
        file.publish()
    if fsync:
        sync_directory(path.parent)


def read_last_step(run: Path, session: str) -> int | None:
    """Return the last step of a closed session; None if the session is not closed, has no step, or was closed by an
    older version.

    Raises:
        CorruptCheckpoint: the marker file is damaged.
        LoadFailed: the marker file cannot be read.
    """
    path = closed_marker_path(run, session)
    try:
        text = read_regular(path, _MAX_MARKER_BYTES)
        last = parse_strict_json(text)["last"] if text else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable_error(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"'{path}' does not hold the last step of its session: {error!r}") from error
    if last is not None and type(last) is not int:
        raise CorruptCheckpoint(f"'{path}' has {last!r} as the last step; expected an integer or null")
    return last


def find_temporary_files(run: Path) -> Iterator[Path]:
    """Yield temporary files of killed writers."""
    directory = run / LOG
    for path in directory.iterdir() if directory.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name):
            yield path


class ReplayableSteps(NamedTuple):
    """The steps of a log that can be replayed.

    Attributes:
        segments: one segment of each rank for each step, oldest step first.
        ended: why later steps cannot be replayed; None if no step is known to be lost.
    """

    segments: list[list[LogSegment]]
    ended: str | None


def replayable_steps(run: Path, session: str, after: int, last: int | None = None) -> ReplayableSteps:
    """Return the consecutive steps after `after` of which every rank's segment exists and opens.

    Args:
        run: directory of the run.
        session: session of the snapshot.
        after: steps done at the snapshot.
        last: last step to return; None for all.
    """
    ranks, problem = None, None
    by_step: dict[int, dict[int, Path]] = {}
    for name, path in list_segments(run, session):
        for step in range(max(name.first, after + 1), name.last + 1):
            by_step.setdefault(step, {})[name.rank] = path
    cache: dict[Path, LogSegment | DSQError] = {}
    steps: list[list[LogSegment]] = []
    step = after + 1
    while (last is None or step <= last) and step in by_step and problem is None:
        step_segments: list[LogSegment] = []
        for _, path in sorted(by_step[step].items()):
            if path not in cache:
                try:
                    cache[path] = LogSegment(path)
                except DSQError as error:
                    cache[path] = error
            segment = cache[path]
            if isinstance(segment, DSQError):
                problem = f"step {step} cannot be read: {segment}"
                break
            ranks = segment.ranks
            step_segments.append(segment)
        if problem is None and len(step_segments) != ranks:
            missing = list(itertools.islice((rank for rank in range(ranks or 0) if rank not in by_step[step]), 9))
            text = ", ".join(map(str, missing[:8])) + (" and others" if len(missing) > 8 else "")
            problem = f"step {step} is not complete: the share of rank(s) {text} is missing"
        if problem is None:
            steps.append(step_segments)
            step += 1
    try:
        closed = read_last_step(run, session)
    except DSQError as error:
        closed, problem = None, problem or str(error)
    later = [number for number in (*by_step, closed or 0) if number > step or number == closed == step]
    if problem is None and step not in by_step and later and (last is None or step <= last):
        status = "is there" if min(later) in by_step else "was logged before the log was closed"
        problem = f"step {step} is missing, although step {min(later)} {status}"
    return ReplayableSteps(steps, problem)


def find_superseded(run: Path, snapshots: Mapping[str, int]) -> list[Path]:
    """Return the files of the log that no snapshot needs.

    Args:
        run: directory of the run.
        snapshots: step of the oldest remaining snapshot, by session.
    """
    markers = (run / LOG).glob("*.closed")
    # A session without a snapshot may be newer than all sessions with one, while its first snapshot is being saved.
    newest = max(snapshots.values(), default=0)
    return [path for path in markers if path.stem not in snapshots] + [
        path for name, path in list_segments(run) if name.last <= snapshots.get(name.session, newest)
    ]
