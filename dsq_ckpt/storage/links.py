"""Files that several checkpoints share: hard links, and where they are not shared, copies."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from dsq_ckpt.errors import CorruptCheckpoint
from dsq_ckpt.storage.atomic_io import AtomicFile, relink
from dsq_ckpt.storage.container import file_checksum
from dsq_ckpt.storage.manifest import ManifestFile, is_plain

NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.ENOSYS)
"""Errors that say that a link cannot be made here, and not that anything is wrong."""


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
        if error.errno not in NO_LINKS:
            raise
        copy_file(source, target, fsync)


def replace_by_link(source: Path, target: Path) -> None:
    """Make a name stand for another file, complete or not at all; a copy where links cannot be made."""
    try:
        relink(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        copy_file(source, target, fsync=True)


def copy_file(source: Path, target: Path, fsync: bool, expected: ManifestFile | None = None) -> None:
    """Copy a file, complete or not at all; what has the target's name is replaced.

    Raises:
        CorruptCheckpoint: the copy is not the file that was expected.
    """
    with open(source, "rb") as origin, AtomicFile(target, fsync) as copy:
        shutil.copyfileobj(origin, copy.stream, 1 << 22)
        copy.complete()
        if expected is not None and file_checksum(copy.hidden) != (expected.size, expected.checksum):
            raise CorruptCheckpoint(f"'{source}' is not what was written: its checksum is wrong; nothing was copied")
        copy.publish()
