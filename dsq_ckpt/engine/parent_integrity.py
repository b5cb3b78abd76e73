"""Integrity checks of the files that a save is coded against, and their restoration.

All checkpoints of a chain share its keyframe, so one flipped bit there makes them unreadable, along with all that would
still be coded against it. With each delta the ranks therefore read a part of the files it depends on, from the device
instead of the page cache if the system permits. So damage is found while the run can still write a new keyframe. A
background thread reads them during the save and the training after it; the next save of the chain uses the result.
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
from dsq_ckpt.storage.manifest import REFINEMENT_ROLES, Manifest, ManifestFile, iter_checkpoints
from dsq_ckpt.storage.paths import expand_path
from dsq_ckpt.storage.runs import canonicalize, get_run

CHECK_PERIOD = 4
"""Each file is checked once in this many consecutive deltas of a chain."""
_MAX_CHECKS = 64
_POLL_SECONDS = 0.1
Problems = dict[tuple[Path, str], str]
"""Problems by checkpoint directory and name of the file; the name is empty if the check itself failed."""
_pending_checks: list[_FileCheck] = []  # running, or done and not collected; oldest first
os.register_at_fork(after_in_child=_pending_checks.clear)  # without threads they would report no problems


class _FileCheck:
    """A check of this rank's share of the files that a delta depends on, in a background thread.

    Attributes:
        saves: ids of the delta and of its parent; the next save of the chain follows one of them.
    """

    def __init__(self, context: SaveContext, parent: ParentRef, rank: int) -> None:
        self.saves = {context.save_id, parent.save_id}
        self._parent, self._slice = parent, slice(rank, None, context.ranks)
        self._refinement = context.refines_parent
        self._problems: Problems = {}
        self._thread = threading.Thread(target=self._run, name="dsq-parent-check", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is exiting
            self._run()

    def wait(self) -> Problems:
        """Wait until the check ends and return the problems; a signal handler may raise meanwhile."""
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            run_pending_handlers()
        return self._problems

    def _run(self) -> None:
        directory = expand_path(self._parent.path)
        try:
            with Workers(1, 1) as workers:
                files = select_files(self._parent, refinement=self._refinement)[self._slice]
                problems = find_damaged(directory, files, workers)
        except CheckpointNotFound:
            return
        except Exception as error:  # files that could not be checked may be damaged
            problems = {"": described(error)}
        # The parent may be deleted meanwhile: a newer checkpoint has its own links, or its save failed.
        existing = {name: problem for name, problem in problems.items() if not _is_missing(directory / name)}
        self._problems = _key_by_directory(directory, existing)


def drop_damaged_parent(
    context: SaveContext, comm: Communicator, workers: Workers, history: SaveHistory
) -> SaveContext:
    """Return the context of a save, without its parent if a file of the parent is damaged; collective.

    The check was started by the previous save. The coordinator restores a damaged file if there is an intact copy, and
    warns, naming the checkpoints that need the file, whether or not this save needs it. If the save has a parent, the
    check for the next save is started.

    Raises:
        DSQError: on all ranks, if any rank failed; the results are kept for the next save.
    """
    before = context.parent or context.previous
    if before is None:
        return context
    parent = context.parent
    checkpoint = history.find(before.save_id)
    checks = [check for check in _pending_checks if before.save_id in check.saves]

    def collect_problems() -> tuple[bool, bool, Problems]:
        problems = _merge([check.wait() for check in checks])
        return checkpoint is None or checkpoint.suspect, checkpoint is not None and bool(checkpoint.cache), problems

    answers = gather_from_all_ranks(comm, collect_problems)
    merged = _merge([merged for *_, merged in answers])
    # All files of the parent are checked now if they must be decoded, because no codes are in memory, or if the last
    # save failed. All ranks must agree, since each checks its share of one list; a rank that wrote nothing lossy has
    # no codes. Exact data needs no check: every save decodes it, which checks each block, and on failure stores it
    # without a parent.
    missed = bool(context.layout.tensors) and not any(is_cached for _, is_cached, _ in answers)
    if parent is not None and (any(is_suspect for is_suspect, *_ in answers) or missed):
        merged |= _merge(gather_from_all_ranks(comm, lambda: _check_files(
            parent, lambda: select_files(parent, True, refinement=False)[comm.rank :: comm.size], workers
        )))
    is_damaged = False
    if merged:
        if checkpoint is not None:
            checkpoint.suspect = True  # for the next save, should this one fail
        is_damaged = gather_from_all_ranks(
            comm, lambda: comm.rank == 0 and _restore_and_warn(merged, parent, workers)
        )[0]
    _pending_checks[:] = [check for check in _pending_checks if check not in checks]
    if is_damaged:
        return replace(context, parent=None, model=None)
    if parent is not None and not is_remote(expand_path(parent.path)):  # object stores verify their own data
        _pending_checks.append(_FileCheck(context, parent, comm.rank))
        del _pending_checks[:-_MAX_CHECKS]
    return context


def _restore_and_warn(problems: Problems, parent: ParentRef | None, workers: Workers) -> bool:
    """Restore damaged files from intact copies, if any, and warn; return whether the parent was damaged."""
    names = {name for _, name in problems}
    own_problems: Problems = {}
    if parent is not None:
        own_problems = _check_files(
            parent, lambda: [file for file in select_files(parent, all_files=True) if file.name in names], workers
        )
    # By run, since a file is restored in all checkpoints of a run at once.
    by_run = {(get_run(path), name): (path, problem) for (path, name), problem in (problems | own_problems).items()}
    details = "; ".join(
        _restore_or_describe(path, name, problem) for (_, name), (path, problem) in sorted(by_run.items())
    )
    if parent is not None and (own_problems or "" in names):
        state = "is damaged" if any(names) else "could not be checked"
        warn(
            f"the parent checkpoint '{parent.path}' {state}; writing a keyframe, which needs none of its files. "
            + details
        )
        return True
    warn(f"files of earlier checkpoints are damaged or could not be checked; this save does not need them. {details}")
    return False


def _check_files(parent: ParentRef, select: Callable[[], Sequence[ManifestFile]], workers: Workers) -> Problems:
    """Return the problems of selected files of the parent, or of the manifest that lists them."""
    try:
        problems = find_damaged(expand_path(parent.path), select(), workers)
    except (DSQError, OSError) as error:
        problems = {"": str(error)}
    return _key_by_directory(expand_path(parent.path), problems)


def _key_by_directory(directory: Path, problems: Mapping[str, str]) -> Problems:
    return {(directory, name): problem for name, problem in problems.items()}


def _merge(problems: Sequence[Problems]) -> Problems:
    return {path: problem for part in problems for path, problem in part.items()}


def _is_missing(path: Path) -> bool:
    """Return whether nothing exists at a path; an error of the device does not count as absence."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def select_files(parent: ParentRef, all_files: bool = False, refinement: bool = True) -> list[ManifestFile]:
    """Return the data files of a parent to check with a delta against it, largest first.

    Args:
        parent: the parent.
        all_files: return all of them, not the part that is due with this delta.
        refinement: include refinement, on which a delta depends only if it is stored as a difference.
    """
    roles = ("own", "ancestor", *(REFINEMENT_ROLES if refinement else ()))
    files = [file for file in Manifest.read(expand_path(parent.path)).files if file.role in roles]
    position = parent.depth + parent.position - 1  # rises with each delta, unless several deltas share a parent
    chosen = [file for file in files if all_files or _is_due(file.name, position)]
    return sorted(chosen, key=lambda file: (-file.size, file.name))


def find_damaged(directory: Path, files: Sequence[ManifestFile], workers: Workers) -> dict[str, str]:
    """Return the problems of files of a checkpoint, by file name."""
    problems: dict[str, str] = {}
    for name, problem in workers.map(lambda file: (file.name, check_file(file.path_in(directory), file)), files):
        run_pending_handlers()
        if problem is not None:
            problems[name] = problem
    refinement = problems.keys() & {file.name for file in files if file.role in REFINEMENT_ROLES}
    if refinement and Manifest.read(directory).refinement == "dropped":  # meanwhile
        problems = {name: problem for name, problem in problems.items() if name not in refinement}
    return problems


def _is_due(name: str, position: int) -> bool:
    return (xxhash.xxh3_64_intdigest(name.encode()) + position) % CHECK_PERIOD == 0


def check_file(path: Path, expected: ManifestFile) -> str | None:
    """Return the problem of a file, None if its size and checksum are those of the manifest."""
    try:
        if not is_remote(path):
            _drop_from_page_cache(path)
        size, checksum = checksum_file(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if size != expected.size:
        return f"has {size} bytes, expected {expected.size}"
    return None if checksum == expected.checksum else f"has checksum {checksum}, expected {expected.checksum}"


def _drop_from_page_cache(path: Path) -> None:
    """Drop a file from the page cache, so that it is read from the device."""
    with suppress(AttributeError, OSError):  # not supported by this system or for this file
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _restore_or_describe(directory: Path, name: str, problem: str) -> str:
    """Restore a damaged file from an intact copy, if there is one; return a description of problem and result."""
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
        bad, good = _split_by_soundness(files)
        if not bad and canonicalize(directory) not in files:
            return f"{text}; it is gone, and no checkpoint that is left has this copy"
        if not bad:
            return f"{text}, and is sound when it is read again: the disk may be failing"
        if not good:
            return f"{text}: {_format_paths(bad)} cannot be read any more, and there is no intact copy"
        _restore(good[0] / name, [path / name for path in bad], files[good[0]])
    except (DSQError, OSError) as error:
        return f"{text}: it could not be restored ({error})"
    return f"{text}: it was restored in {_format_paths(bad)} from the intact copy in '{good[0].name}'"


def _split_by_soundness(files: Mapping[Path, ManifestFile]) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints that link to a damaged copy, and those that link to an intact one; read each copy once."""
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
            sound[inode] = check_file(path / file.name, file) is None
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


def _format_paths(paths: Sequence[Path]) -> str:
    text = ", ".join(f"'{path.name}'" for path in paths[:5])
    return text + (f" and {len(paths) - 5} more checkpoints" if len(paths) > 5 else "")
