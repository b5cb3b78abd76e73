"""Whether the files that a save is coded against are still what was written, and what to do if not.

All checkpoints of a chain share its keyframe, so one flipped bit there makes all of them unreadable, and those that
would still be coded against it. With each delta the ranks read a part of the files it builds on, from the device and
not from memory as far as the system lets them, so that damage is found while there is a run to write a new keyframe.
They are read by a thread beside the save and the training that follows; the next save of the chain acts upon it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import xxhash

from dsq_ckpt.core.interrupts import run_pending_handlers
from dsq_ckpt.core.notices import warn
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.core.workers import Workers
from dsq_ckpt.distributed.comm import Communicator, gather_from_all_ranks
from dsq_ckpt.engine.context import SaveContext
from dsq_ckpt.engine.history import ParentRef, SaveHistory
from dsq_ckpt.errors import CheckpointNotFound, DSQError, described
from dsq_ckpt.storage.atomic_io import sync_directory
from dsq_ckpt.storage.container import checksum_file
from dsq_ckpt.storage.links import copy_file, replace_by_link
from dsq_ckpt.storage.manifest import Manifest, ManifestFile, iter_checkpoints
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.runs import canonicalize, get_run

CHECKED_EVERY = 4
"""Of so many deltas of a chain that follow each other, each file is checked with one."""
_MOST = 64
_POLLED_EVERY = 0.1  # seconds
Findings = dict[tuple[Path, str], str]
"""Problems by checkpoint directory and name of the file, which is empty where the check itself failed."""
_under_way: list[_Check] = []  # or done, and not asked for; oldest first
os.register_at_fork(after_in_child=_under_way.clear)  # without their threads they would seem to have found nothing


class _Check:
    """A check of this rank's share of the files that a delta builds on, in a thread of its own.

    Attributes:
        saves: ids of the delta and of its parent, one of which the next save of the chain comes after.
    """

    def __init__(self, context: SaveContext, parent: ParentRef, rank: int) -> None:
        self.saves = {context.save_id, parent.save_id}
        self._parent, self._share = parent, slice(rank, None, context.ranks)
        self._found: Findings = {}
        self._thread = threading.Thread(target=self._run, name="dsq-ancestry", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is exiting
            self._run()

    def result(self) -> Findings:
        """Wait until the check ends, unless a signal handler raises meanwhile; return the problems."""
        while self._thread.is_alive():
            self._thread.join(_POLLED_EVERY)
            run_pending_handlers()
        return self._found

    def _run(self) -> None:
        directory = expand_path(self._parent.path)
        try:
            with Workers(1, 1) as workers:
                found = damaged(directory, due(self._parent)[self._share], workers)
        except CheckpointNotFound:
            return
        except Exception as error:  # what could not be checked is not known to be sound
            found = {"": described(error)}
        # An older checkpoint may be deleted meanwhile: a newer one has links of its own, or could not be made.
        there = {name: problem for name, problem in found.items() if not _gone(directory / name)}
        self._found = _in(directory, there)


def with_sound_parent(
    context: SaveContext, comm: Communicator, workers: Workers, history: SaveHistory
) -> SaveContext:
    """Return the context of a save, without its parent if a file of the parent is damaged; collective.

    The check began at the save before. The coordinator restores a damaged file if there is an intact copy, and warns,
    naming the checkpoints that need the file, whatever this save builds upon. If the save has a parent, the check for
    the next save begins.

    Raises:
        DSQError: on all ranks, when any failed; what was found is kept for the next save.
    """
    before = context.parent or context.previous
    if before is None:
        return context
    parent = context.parent
    known = history.find(before.save_id)
    checks = [check for check in _under_way if before.save_id in check.saves]

    def looked_for() -> tuple[bool, bool, Findings]:
        found = _joined([check.result() for check in checks])
        return known is None or known.suspect, known is not None and bool(known.cache), found

    answers = gather_from_all_ranks(comm, looked_for)
    found = _joined([found for *_, found in answers])
    # What is decoded, because its codes are not in memory, or made the last save fail, is checked whole, and at once.
    # Ranks agree on that, since each checks its share of the same list; one that wrote nothing lossy has no codes to
    # miss. What is exact is decoded at every save, which checks each block, and is stored anew where that fails.
    missed = bool(context.layout.tensors) and not any(held for _, held, _ in answers)
    if parent is not None and (any(doubtful for doubtful, *_ in answers) or missed):
        found |= _joined(gather_from_all_ranks(comm, lambda: _checked(
            parent, lambda: due(parent, everything=True)[comm.rank :: comm.size], workers
        )))
    builds_on_damage = False
    if found:
        if known is not None:
            known.suspect = True  # should this save fail
        builds_on_damage = gather_from_all_ranks(comm, lambda: comm.rank == 0 and _reported(found, parent, workers))[0]
    _under_way[:] = [check for check in _under_way if check not in checks]
    if builds_on_damage:
        return replace(context, parent=None, model=None)
    if parent is not None and not is_remote(expand_path(parent.path)):  # object stores verify their bytes themselves
        _under_way.append(_Check(context, parent, comm.rank))
        del _under_way[:-_MOST]
    return context


def _reported(found: Findings, parent: ParentRef | None, workers: Workers) -> bool:
    """Restore damaged files from copies, as far as there are any, and warn; return whether the parent was damaged."""
    names = {name for _, name in found}
    own: Findings = {}
    if parent is not None:
        own = _checked(parent, lambda: [file for file in due(parent, everything=True) if file.name in names], workers)
    # By run, since all checkpoints of it are restored at once.
    once = {(get_run(path), name): (path, problem) for (path, name), problem in (found | own).items()}
    settled = "; ".join(_settled(path, name, problem) for (_, name), (path, problem) in sorted(once.items()))
    if parent is not None and (own or "" in names):
        state = "is damaged" if any(names) else "could not be checked"
        warn(
            f"the parent checkpoint '{parent.path}' {state}; writing a keyframe, which needs none of its files. "
            + settled
        )
        return True
    warn(f"files of earlier checkpoints are damaged or could not be checked; this save does not need them. {settled}")
    return False


def _checked(parent: ParentRef, chosen: Callable[[], Sequence[ManifestFile]], workers: Workers) -> Findings:
    """Return the problems of some files of the parent, or of the manifest that lists them."""
    try:
        found = damaged(expand_path(parent.path), chosen(), workers)
    except (DSQError, OSError) as error:
        found = {"": str(error)}
    return _in(expand_path(parent.path), found)


def _in(directory: Path, found: Mapping[str, str]) -> Findings:
    return {(directory, name): problem for name, problem in found.items()}


def _joined(found: Sequence[Findings]) -> Findings:
    return {place: problem for one in found for place, problem in one.items()}


def _gone(path: Path) -> bool:
    """Return whether there is nothing at a path; an error of the device does not count as absence."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def due(parent: ParentRef, everything: bool = False) -> list[ManifestFile]:
    """Return the data files of a checkpoint that are to be checked with a delta against it, largest first."""
    files = [file for file in Manifest.read(expand_path(parent.path)).files if file.role in ("own", "ancestor")]
    turn = parent.depth + parent.place - 1  # rises with each delta, but where the parent changes after several
    chosen = [file for file in files if everything or _is_due(file.name, turn)]
    return sorted(chosen, key=lambda file: (-file.size, file.name))


def damaged(directory: Path, files: Sequence[ManifestFile], workers: Workers) -> dict[str, str]:
    """Return the problems of files of a checkpoint, by file name."""
    found: dict[str, str] = {}
    for name, problem in workers.map(lambda file: (file.name, problem_of(file.path_in(directory), file)), files):
        run_pending_handlers()
        if problem is not None:
            found[name] = problem
    return found


def _is_due(name: str, turn: int) -> bool:
    return (xxhash.xxh3_64_intdigest(name.encode()) + turn) % CHECKED_EVERY == 0


def problem_of(path: Path, expected: ManifestFile) -> str | None:
    """Return the problem of a file, None if it is as it was written."""
    try:
        if not is_remote(path):
            _forget_pages(path)
        size, checksum = checksum_file(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if size != expected.size:
        return f"has {size} bytes, expected {expected.size}"
    return None if checksum == expected.checksum else f"has checksum {checksum}, expected {expected.checksum}"


def _forget_pages(path: Path) -> None:
    """Drop a file from the page cache, so that it is read from the device."""
    with suppress(AttributeError, OSError):  # not on this system, or not for this file
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _settled(directory: Path, name: str, problem: str) -> str:
    """Restore a damaged file from an intact copy, if there is one; return what was found and done, for people."""
    if not name:
        return f"the check of '{directory}' failed: {problem}"
    text = f"'{directory / name}' {problem}"
    if is_remote(directory):
        return f"{text}: checkpoints that need it cannot be read any more, unless the store keeps an older version"
    try:
        holders = {path: manifest for path, manifest in iter_checkpoints(get_run(directory), lambda *_: None)}
        with suppress(CheckpointNotFound):  # deleted since
            holders.setdefault(canonicalize(directory), Manifest.read(directory))
        files = {
            path: file for path, manifest in holders.items() for file in manifest.files if file.name == name
        }
        bad, good = _sorted_by_soundness(files)
        if not bad and canonicalize(directory) not in files:
            return f"{text}; it is gone, and no checkpoint that is left has this copy"
        if not bad:
            return f"{text}, and is sound when it is read again: the disk may be failing"
        if not good:
            return f"{text}: {_listed(bad)} cannot be read any more, and there is no intact copy"
        _restore(good[0] / name, [path / name for path in bad], files[good[0]])
    except (DSQError, OSError) as error:
        return f"{text}: it could not be restored ({error})"
    return f"{text}: it was restored in {_listed(bad)} from the intact copy in '{good[0].name}'"


def _sorted_by_soundness(files: Mapping[Path, ManifestFile]) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints that link to a damaged file, and those that link to a sound one; reads each file once."""
    sound: dict[tuple[int, int], bool] = {}
    bad: list[Path] = []
    good: list[Path] = []
    for path, file in files.items():
        try:
            status = os.stat(path / file.name)
        except FileNotFoundError:
            bad.append(path)
            continue
        inode = status.st_dev, status.st_ino
        if inode not in sound:
            sound[inode] = problem_of(path / file.name, file) is None
        (good if sound[inode] else bad).append(path)
    return bad, good


def _restore(intact: Path, damaged: Sequence[Path], expected: ManifestFile) -> None:
    """Replace all damaged files by links to one copy of an intact one."""
    first, *others = damaged
    copy_file(intact, first, True, expected)
    for path in others:
        replace_by_link(first, path)
    for path in damaged:
        sync_directory(path.parent)


def _listed(paths: Sequence[Path]) -> str:
    shown = ", ".join(f"'{path.name}'" for path in paths[:5])
    return shown + (f" and {len(paths) - 5} more checkpoints" if len(paths) > 5 else "")
