"""Target directories of saves and exports: checks before the first write, and cleanup after a failed save."""

from __future__ import annotations

import itertools
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from dsq_ckpt.core.arguments import expect_flags
from dsq_ckpt.core.urls import is_remote
from dsq_ckpt.errors import (
    CheckpointExists,
    CheckpointNotFound,
    CorruptCheckpoint,
    DSQError,
    LoadFailed,
    SaveFailed,
    UnsupportedFormat,
)
from dsq_ckpt.storage.backend import get_storage
from dsq_ckpt.storage.gc import HARMLESS_NAMES, collect_failed_save, is_dsq_file
from dsq_ckpt.storage.manifest import MANIFEST, Manifest, is_complete
from dsq_ckpt.storage.paths import find_file_above
from dsq_ckpt.storage.runs import canonicalize

_ATTACHMENT_NAMES = re.compile(
    r"[A-Za-z0-9_-]+\.pt|offloaded_tensors|\..+\.[0-9a-f]{16}\.old|\..+\.pt\.[0-9a-f]{8}\.tmp"
)
"""Names of DeepSpeed's files, of their backups (see `attachment_files`), and of files that earlier versions left
unfinished."""


def refuse_existing(goal: Path, overwrite: bool) -> None:
    """Raise an error if the target of an export exists and `overwrite` is False.

    Raises:
        CheckpointExists: the target exists and `overwrite` is False.
        ConfigError: `overwrite` is no bool.
    """
    expect_flags(overwrite=overwrite)
    if os.path.lexists(goal) and not overwrite:
        raise CheckpointExists(f"'{goal}' exists; choose another target, or overwrite it (overwrite=True)")


def refuse_target(path: Path, overwrite: bool, attached: bool = False) -> None:
    """Raise an error if the target of a save is neither new, nor empty, nor a directory of dsq files.

    Files of an interrupted save are dsq files. Other files beside a complete checkpoint are accepted.

    Args:
        path: the checkpoint directory.
        overwrite: a complete checkpoint may be replaced.
        attached: DeepSpeed's files are part of the checkpoint.

    Raises:
        CheckpointExists: there is a complete checkpoint and `overwrite` is False, or the path is a link to one beside.
        ConfigError: `overwrite` is no bool.
        SaveFailed: the path is not a directory, has other files, is inside a checkpoint, or is a whole bucket.
    """
    expect_flags(overwrite=overwrite)
    if is_remote(path) and path.parent == path:
        example = path / "run" / "step-000001"
        raise SaveFailed(f"'{path}' is a whole bucket; save to a key in it, to '{example}' for example")
    if not is_remote(path) and (file := find_file_above(path)):
        raise SaveFailed(f"'{path}' leads through '{file}', which is no directory; choose another path")
    refuse_within_checkpoint(path)
    if is_remote(path):
        if attached:
            raise SaveFailed(f"'{path}': files of DeepSpeed lie beside a checkpoint only in a local directory")
        if not get_storage(path).list_entries(path):
            return
    elif not os.path.lexists(path):
        return
    elif not path.is_dir():
        raise SaveFailed(f"'{path}' exists and is not a directory; choose another path for the checkpoint")
    if not is_remote(path) and path.is_symlink() and _is_checkpoint(path) and _is_beside(path):
        raise CheckpointExists(
            f"'{path}' is a link to '{os.readlink(path)}', another checkpoint of the directory, which a save to the "
            "link would replace; remove the link, or name another path, or that checkpoint itself"
        )
    if foreign := _list_foreign_names(path, attached):
        raise SaveFailed(_explain_foreign_names(path, foreign))
    if is_complete(path) and not overwrite:
        raise CheckpointExists(
            f"'{path}' holds a complete checkpoint; choose another path, or overwrite it (overwrite=True)"
        )


def _is_beside(link: Path) -> bool:
    """Return whether a link leads to another entry of its own directory."""
    return link.resolve().parent == link.parent.resolve()


def refuse_within_checkpoint(path: Path) -> None:
    """Raise an error if a path is inside a checkpoint.

    Raises:
        SaveFailed: the path is inside a checkpoint.
    """
    for above in canonicalize(path).parents:
        if _is_checkpoint(above):
            raise SaveFailed(
                f"'{path}' lies in '{above}', which is a checkpoint itself and takes no other; save beside it, to "
                f"'{above.with_name(path.name)}' for example"
            )


def _list_foreign_names(path: Path, attached: bool) -> list[str]:
    """Return the names of a directory that are not of dsq files; none if it has a complete checkpoint."""
    names = sorted(entry.name for entry in get_storage(path).list_entries(path))
    if MANIFEST in names:
        try:
            Manifest.read(path)
            return []
        except UnsupportedFormat:  # of a newer version
            return []
        except DSQError:
            if any(map(is_dsq_file, names)):  # a damaged manifest; alone it may belong to another program
                names.remove(MANIFEST)
    return [
        name for name in names
        if not (is_dsq_file(name) or HARMLESS_NAMES.fullmatch(name) or (attached and _ATTACHMENT_NAMES.fullmatch(name)))
    ]


def _explain_foreign_names(path: Path, names: list[str]) -> str:
    """Return an error message with the contents of the directory and a possible path of the checkpoint."""
    below = [name for name in names if _holds_checkpoint(path / name)]
    if below:
        return (
            f"'{path}' is a run directory, which holds checkpoints such as '{below[-1]}'; save to a directory in it, "
            f"such as '{path / 'step-000001'}'"
        )
    shown = ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"'{path}' holds other files ({shown}), and a checkpoint needs a directory of its own, new or empty; save to "
        f"'{path / 'run' / 'step-000001'}' for example"
    )


def _is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a checkpoint; other programs use the manifest's file name, too."""
    try:
        return is_complete(path) and bool(Manifest.read(path))
    except UnsupportedFormat:
        return True
    except DSQError:
        return False


def _holds_checkpoint(path: Path) -> bool:
    try:
        return is_complete(path)
    except DSQError:  # no permission, as in the root of a file system
        return False


class TargetDirectory:
    """Target directory of a save, whose former state `discard` restores.

    Args:
        path: the checkpoint directory, which was checked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        above = () if is_remote(path) else (path, *path.parents)
        self._absent = list(itertools.takewhile(lambda directory: not directory.exists(), above))
        self._since = time.time()
        self._claimed: tuple[str, set[str]] | None = None

    def claim(self, save_id: str, parent: Manifest | None) -> None:
        """Set the files that the save will write: those with its save id, and links to files of its parent.

        A save that fails before this call has not written anything.
        """
        self._claimed = save_id, set() if parent is None else {file.name for file in parent.files}

    def discard(self) -> None:
        """Remove the files of the failed save and the directories it created, once no rank writes any more.

        A complete checkpoint, files of a save in progress, and files of other programs stay.
        """
        if self._claimed is None:
            return
        save_id, inherited = self._claimed
        if is_remote(self._path):
            _discard_objects(self._path, save_id)
            return
        with suppress(OSError, DSQError):
            collect_failed_save(self._path, save_id, inherited, self._since)
        with suppress(OSError):  # not empty: something else lives there
            for directory in self._absent:
                directory.rmdir()


def _discard_objects(path: Path, save_id: str) -> None:
    """Remove the objects of a failed save, all of which have its save id.

    None is removed if the save may have been committed, as when only the last response was lost.
    """
    storage = get_storage(path)
    with suppress(CheckpointNotFound):
        try:
            if Manifest.read(path).save_id == save_id:
                return
        except (CorruptCheckpoint, LoadFailed):
            return
    with suppress(OSError):
        for entry in storage.list_entries(path):
            if entry.name.startswith(save_id):
                storage.remove(path / entry.name)
