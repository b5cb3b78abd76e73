"""Files that several checkpoints share: hard links, and where they are not shared, copies."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.container import NOT_ALL, file_checksum, naming
from dsq_ckpt.errors import CorruptCheckpoint, DSQError
from dsq_ckpt.manifest import Manifest, ManifestFile, is_plain

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.ENOSYS)


def link_files(source: Path, target: Path, names: frozenset[str], fsync: bool) -> None:
    """Make `names` of the directory `source` appear in `target`: hard links, copies where links cannot be made.

    Raises:
        CorruptCheckpoint: a file is missing in `source`, or a name leads out of it.
    """
    for name in sorted(names):
        if not is_plain(name):
            raise CorruptCheckpoint(f"a data file in '{source}' requires {name!r}, which is not a plain file name")
        if (target / name).exists():
            continue
        try:
            link_or_copy(source / name, target / name, fsync)
        except FileNotFoundError as error:
            raise CorruptCheckpoint(
                f"'{source / name}' is missing, but the new checkpoint is coded against it; "
                "save with parent=None for a keyframe"
            ) from error


def link_or_copy(source: Path, target: Path, fsync: bool) -> None:
    """Give a file another name, one of a copy where links cannot be made; nothing where there is a file of that name.

    Raises:
        OSError: it cannot be linked or copied.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return  # another rank was faster
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy_file(source, target, fsync)


def inherit(parent: Path, target: Path, names: frozenset[str], copies: int, fsync: bool) -> None:
    """Make the files that a new checkpoint needs of its parent appear in it, keyframe files in several copies.

    Of `copies` checkpoints of a chain that follow each other, no two share a keyframe file: each has it from the
    checkpoint that many before it, or copies it where that one is gone.

    Args:
        parent: directory of the parent.
        target: directory of the new checkpoint.
        names: of the parent's data files.
        copies: of each file that needs no other, on the device; 1: all checkpoints share it.
        fsync: flush copies to the device.

    Raises:
        CorruptCheckpoint: a file is missing, a name leads elsewhere, or what was copied is not what was written.
    """
    if copies > 1:
        from dsq_ckpt.files import CheckpointFiles  # imports torch, which `dsq log` does without

        with CheckpointFiles(parent) as files:
            known = {file.name: file for file in files.manifest.files}
            keyframes = {name for name in names & known.keys() if files.requires(name) == {name}}
        holders = _newest_first(parent, copies) if keyframes else []
        for name in keyframes:
            if not (target / name).exists():
                _other_copy([holder / name for holder in holders], target / name, known[name], copies, fsync)
    link_files(parent, target, names, fsync)


def _newest_first(parent: Path, count: int) -> list[Path]:
    """Return a checkpoint and those before it in its run, as far as they are there."""
    found, manifest = [parent], Manifest.read(parent)
    while len(found) < count and manifest.previous_name is not None:
        expected, directory = manifest.previous, parent.parent / manifest.previous_name
        try:
            manifest = Manifest.read(directory)
        except DSQError:
            break
        if manifest.save_id != expected:
            break
        found.append(directory)
    return found


def _other_copy(holders: list[Path], target: Path, file: ManifestFile, copies: int, fsync: bool) -> None:
    """Link a file from the oldest of `copies` holders, if that shares it with none of the others; else copy it."""
    inodes = []
    for path in holders:
        with suppress(FileNotFoundError):
            inodes.append(path.stat().st_ino)
    if len(inodes) == copies and inodes[-1] not in inodes[:-1]:
        try:
            os.link(holders[-1], target)
            return
        except FileExistsError:
            return  # another rank was faster
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    copy_file(holders[0], target, fsync, file)


def replace_by_link(source: Path, target: Path) -> None:
    """Make a name stand for another file, complete or not at all; a copy where links cannot be made."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        os.link(source, temporary)
        os.replace(temporary, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy_file(source, target, fsync=True)
    finally:
        temporary.unlink(missing_ok=True)


def copy_file(source: Path, target: Path, fsync: bool, expected: ManifestFile | None = None) -> None:
    """Copy a file, complete or not at all; what has the target's name is replaced.

    Raises:
        CorruptCheckpoint: the copy is not the file that was expected.
    """
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with naming(target, NOT_ALL), open(source, "rb") as origin, open(temporary, "xb") as copy:
            shutil.copyfileobj(origin, copy, 1 << 22)
            copy.flush()
            if fsync:
                os.fsync(copy.fileno())
        if expected is not None and file_checksum(temporary) != (expected.size, expected.checksum):
            raise CorruptCheckpoint(f"'{source}' is not what was written: its checksum is wrong; nothing was copied")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
